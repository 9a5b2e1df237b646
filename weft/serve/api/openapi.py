"""OpenAPI schema: FastAPI's, with the request bodies and error responses that FastAPI cannot see."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from weft import __version__
from weft.serve.api.schemas import ErrorResponse, ImageRequest, VideoRequest
from weft.serve.jobs import JsonObject

Responses = dict[int | str, JsonObject]
SCHEMAS = "#/components/schemas/"
REASONS = {
    400: "The request is invalid; `param` is the field, the message has what would be accepted.",
    401: "The key is missing or wrong.",
    403: "Requested by a page of another site, or under a host name that is not this machine's.",
    404: "Not found, deleted or expired.",
    408: "The body did not arrive in time.",
    409: "Not in the required state; `x-should-retry: false`.",
    413: "The body is too large.",
    415: "The body is neither JsonObject nor, where allowed, a form.",
    416: "The range is outside of the file.",
    429: "Too many jobs are queued; Retry-After has seconds.",
    431: "The address and the headers are too large.",
    500: "Internal error; the server's log has the `x-request-id`.",
    503: "Starting, stopping or busy; Retry-After has seconds.",
}
COMMON_ERRORS = (403, 431, 500, 503)
BINARY = {"schema": {"type": "string", "format": "binary"}}


def error_responses(*statuses: int) -> Responses:
    return {status: {"model": ErrorResponse, "description": REASONS[status]} for status in statuses}


def file_responses(kind: str) -> Responses:
    types = ("video/mp4", "image/webp") if kind == "video" else ("image/png", "image/jpeg", "image/webp")
    partial = dict.fromkeys((*types, "multipart/byteranges"), BINARY)
    return {
        200: {"description": "The file.", "content": dict.fromkeys(types, BINARY)},
        206: {"description": "Byte ranges of the file.", "content": partial},
        304: {"description": "Not modified."},
    }


def event_responses() -> Responses:
    text = {"type": "string"}
    event = {"type": "object", "properties": {"event": text, "data": text}, "required": ["event", "data"]}
    return {200: {"description": "Events.", "content": {"text/event-stream": {"schema": event}}}}


def request_body(model: type[BaseModel], *, form: bool = False) -> JsonObject:
    content = {"application/json": {"schema": {"$ref": SCHEMAS + model.__name__}}}
    if form:
        content["multipart/form-data"] = {"schema": {"$ref": f"{SCHEMAS}{model.__name__}Form"}}
    return {"requestBody": {"required": True, "content": content}}


def openapi_schema(app: FastAPI, *, key: bool) -> JsonObject:
    openapi = get_openapi(
        title="weft", version=__version__, routes=app.routes,
        description="Videos and images as OpenAI's API has them. What is weft's own is under `weft`.",
    )  # fmt: skip
    _, definitions = models_json_schema(
        [(VideoRequest, "validation"), (ImageRequest, "validation"), (ErrorResponse, "validation")],
        ref_template=SCHEMAS + "{model}",
    )
    schemas = openapi["components"]["schemas"]
    schemas.update(definitions["$defs"])
    video = schemas["VideoRequest"]  # in a form the picture is a file
    fields = {**video["properties"], "input_reference": BINARY["schema"]}
    schemas["VideoRequestForm"] = {**video, "title": "VideoRequestForm", "properties": fields}
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    error = {"application/json": {"schema": {"$ref": SCHEMAS + "ErrorResponse"}}}
    for path, item in openapi["paths"].items():
        for operation in item.values():
            responses = operation["responses"]
            responses.pop("422", None)
            for status in (*COMMON_ERRORS, *((401,) if key else ())):
                responses.setdefault(str(status), {"description": REASONS[status], "content": error})
            if key and path not in ("/live", "/health"):
                operation["security"] = [{"key": []}]
    if key:
        openapi["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return openapi
