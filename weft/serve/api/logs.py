"""Logs: one line per record, as text or as a JSON object, with the id of its request."""

from __future__ import annotations

import json
import logging
import secrets
import sys
from contextvars import ContextVar
from typing import TextIO, cast

from weft.serve.jobs import JsonObject

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
access = logging.getLogger("weft.serve.access")
_STANDARD_FIELDS = {*vars(logging.makeLogRecord({})), "message", "asctime", "color_message", "taskName"}


class JSONFormatter(logging.Formatter):
    """Format a record as one line; what was logged with `extra=` becomes fields of it."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage(),
        }  # fmt: skip
        line |= _fields(record)
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """Format a record for a terminal: time, level, message, and fields as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={_short(value)}" for name, value in _fields(record).items())
        time, level = self.formatTime(record, "%H:%M:%S"), record.levelname.lower()
        line = f"{time} {level:<7} {record.getMessage()}  {fields}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _fields(record: logging.LogRecord) -> JsonObject:
    id = request_id.get()
    fields = {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}
    return fields if id is None else {**fields, "request_id": id}


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict):
        return ",".join(f"{name}:{_short(each)}" for name, each in cast("JsonObject", value).items())
    text = str(value)
    is_word = text.isprintable() and text and not set(text) & set(' "=')
    return text if is_word else json.dumps(text, ensure_ascii=not text.isprintable())


def configure(level: str = "info", style: str = "auto", stream: TextIO | None = None) -> None:
    """Send the logs of weft and uvicorn to one stream (stderr). None of their lines has prompts."""
    handler = logging.StreamHandler(stream or sys.stderr)
    is_text = style == "text" or (style == "auto" and handler.stream.isatty())
    handler.setFormatter(TextFormatter() if is_text else JSONFormatter())
    for name in ("weft", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper())


def new_request() -> str:
    """Set and return a new request id; one chosen by the client could forge log lines."""
    id = f"req_{secrets.token_hex(12)}"
    request_id.set(id)
    return id
