"""Query parameters: reject those that FastAPI would ignore."""

from __future__ import annotations

from fastapi import Request
from fastapi.routing import APIRoute

from weft.core.errors import nearest_of
from weft.serve.api_error import APIError, quote_input


def check_query(request: Request) -> None:
    """A dependency: reject query parameters that the route does not have, or that are repeated."""
    route: APIRoute = request.scope["route"]
    known = [parameter.alias for parameter in route.dependant.query_params]
    names = [name for name, _ in request.query_params.multi_items()]
    for name in names:
        if name not in known:
            message = f"Unknown parameter {quote_input(name)!r}. {nearest_of(name[:100], known)}"
            raise APIError(400, "unknown_parameter", message, param=quote_input(name))
        if names.count(name) > 1:
            raise APIError(400, "repeated_parameter", f"{name} is repeated. Send it once.", param=name)
