"""Logs: one JSON object per line, with the id of its request."""

from __future__ import annotations

import json
import logging
import secrets
import sys
from contextvars import ContextVar
from typing import TextIO

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
        if (id := request_id.get()) is not None:
            line["request_id"] = id
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(stream: TextIO | None = None, level: int = logging.INFO) -> None:
    """Send the logs of weft and uvicorn to one stream (stderr). None of their lines has prompts."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JSONFormatter())
    for name in ("weft", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


def new_request() -> str:
    """Set and return a new request id; one chosen by the client could forge log lines."""
    id = f"req_{secrets.token_hex(12)}"
    request_id.set(id)
    return id
