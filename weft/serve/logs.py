"""Logs: one JSON object a line, with the id of the request that it belongs to."""

from __future__ import annotations

import json
import logging
import secrets
import sys
from contextvars import ContextVar
from typing import Any, TextIO

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
access = logging.getLogger("weft.serve.access")
_OWN = {*vars(logging.makeLogRecord({})), "message", "asctime", "color_message", "taskName"}


class Lines(logging.Formatter):
    """What was logged with `extra=` becomes fields of the line."""

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage(),
        }  # fmt: skip
        if (id := request_id.get()) is not None:
            said["request_id"] = id
        said |= {name: value for name, value in vars(record).items() if name not in _OWN}
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str)


def configure(stream: TextIO | None = None, level: int = logging.INFO) -> None:
    """All loggers of weft and uvicorn to one stream (stderr). Prompts are in none of their lines."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(Lines())
    for name in ("weft", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


def new_request() -> str:
    """An id of ours for a request: a client's own would be a way to write into the log."""
    id = f"req_{secrets.token_hex(12)}"
    request_id.set(id)
    return id
