"""A hook of mkdocs: writes the reference of commands and of HTTP from what they say of themselves."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

from typer.main import get_command

from weft.cli import main as front


def on_page_markdown(markdown: str, **_: Any) -> str:
    # Files outside of docs/ are in the repository, not in these pages.
    markdown = re.sub(r"\[`?([^\]`]+)`?\]\(\.\./(?:weft|bench|tests)/[^)]*\)", r"`\1`", markdown)
    if "[weft --help]" in markdown:
        return markdown.replace("[weft --help]", commands())
    return markdown.replace("[openapi]", routes()) if "[openapi]" in markdown else markdown


def commands() -> str:
    """The help of weft and of every verb."""
    parts = [_help(get_command(front._app()), "weft")]
    parts += [f"## weft {name}\n\n{_help(front.load(name), f'weft {name}')}" for name in front.VERBS]
    return "\n\n".join(parts)


def _help(command: Any, name: str) -> str:
    return f"```text\n{command.make_context(name, [], resilient_parsing=True).get_help()}\n```"


def routes() -> str:
    """A section for each route, and a table for each schema."""
    from weft.serve.api.app import create_app
    from weft.serve.api.limits import RequestLimits
    from weft.serve.api.openapi import openapi_schema

    said = openapi_schema(
        create_app(SimpleNamespace(on_event=[], disk=None), limits=RequestLimits()), key=False
    )
    parts: list[str] = []
    for path, methods in said["paths"].items():
        for method, about in methods.items():
            parts.append(
                f"## {method.upper()} {path}\n\n{about.get('description') or about.get('summary', '')}"
            )
            rows = [(p["name"], p["in"], _kind(p.get("schema", {})), "") for p in about.get("parameters", [])]
            sent = about.get("requestBody", {}).get("content", {})
            rows += [("body", kind, _kind(body["schema"]), "") for kind, body in sent.items()]
            parts += [_table(("name", "in", "type", ""), rows)] if rows else []
            answers = [(status, answer["description"]) for status, answer in about["responses"].items()]
            parts.append(_table(("status", ""), answers))
    for name, schema in said["components"]["schemas"].items():
        if fields := schema.get("properties"):
            parts.append(f"## {name}\n\n{schema.get('description', '')}")
            rows = [(field, _kind(of), of.get("description", "")) for field, of in fields.items()]
            parts.append(_table(("field", "type", ""), rows))
    return "\n\n".join(parts)


def _kind(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    many = schema.get("anyOf") or schema.get("oneOf")
    return " or ".join(map(_kind, many)) if many else str(schema.get("const", schema.get("type", "any")))


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = (head, ("---",) * len(head), *rows)
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in lines)
