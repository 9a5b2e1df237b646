"""The OpenAPI document: what FastAPI knows of the routes, and what only we know of bodies and errors."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from weft import __version__
from weft.serve import wire

SCHEMAS = "#/components/schemas/"
REASONS = {
    400: "The request breaks a rule; `param` is the field, the message has what would work.",
    401: "The key is missing or wrong.",
    403: "Asked by another site's page, or under another name than this machine's.",
    404: "There is none, or it was deleted or expired.",
    408: "The body did not come in time.",
    409: "Not in the state for it; `x-should-retry: false`.",
    413: "The body is too large.",
    415: "The body is neither JSON nor, where it may be, a form.",
    416: "The range is outside of the file.",
    429: "Too many jobs wait; Retry-After has seconds.",
    431: "The address and the headers are too large.",
    500: "A fault of the server's; its log has the `x-request-id`.",
    503: "Starting, stopping or busy; Retry-After has seconds.",
}
ALWAYS = (403, 431, 500, 503)
BINARY = {"schema": {"type": "string", "format": "binary"}}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": wire.Error, "description": REASONS[status]} for status in statuses}


def files(kind: str) -> dict[int | str, dict[str, Any]]:
    sorts = ("video/mp4", "image/webp") if kind == "video" else ("image/png", "image/jpeg", "image/webp")
    whole = {"description": "The file.", "content": dict.fromkeys(sorts, BINARY)}
    part = {
        "description": "A part of it.",
        "content": dict.fromkeys((*sorts, "multipart/byteranges"), BINARY),
    }
    return {200: whole, 206: part, 304: {"description": "It has not changed."}}


def events() -> dict[int | str, dict[str, Any]]:
    text = {"type": "string"}
    each = {"type": "object", "properties": {"event": text, "data": text}, "required": ["event", "data"]}
    return {200: {"description": "Events.", "content": {"text/event-stream": {"schema": each}}}}


def body(model: type[BaseModel], *, form: bool = False) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"$ref": SCHEMAS + model.__name__}}}
    if form:
        content["multipart/form-data"] = {"schema": {"$ref": f"{SCHEMAS}{model.__name__}Form"}}
    return {"requestBody": {"required": True, "content": content}}


def document(app: FastAPI, *, key: bool) -> dict[str, Any]:
    made = get_openapi(
        title="weft", version=__version__, routes=app.routes,
        description="Videos and images as OpenAI's API has them. What is weft's own is under `weft`.",
    )  # fmt: skip
    schemas = made["components"]["schemas"]
    for model in (wire.VideoAsks, wire.ImageAsks, wire.Error):
        schema = model.model_json_schema(ref_template=SCHEMAS + "{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
    schemas["VideoAsksForm"] = _form(schemas["VideoAsks"])
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    error = {"application/json": {"schema": {"$ref": SCHEMAS + "Error"}}}
    for path, item in made["paths"].items():
        for operation in item.values():
            said = operation["responses"]
            said.pop("422", None)
            for status in (*ALWAYS, *((401,) if key else ())):
                said.setdefault(str(status), {"description": REASONS[status], "content": error})
            if key and path not in ("/live", "/health"):
                operation["security"] = [{"key": []}]
    if key:
        made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return made


def _form(schema: dict[str, Any]) -> dict[str, Any]:
    """The same fields in a form, where the picture is a file."""
    fields = {**schema["properties"], "input_reference": {"type": "string", "format": "binary"}}
    return {**schema, "title": "VideoAsksForm", "properties": fields}
