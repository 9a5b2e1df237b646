"""Routing: what the routes take, told to clients that ask for something else."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute

from weft.core.errors import nearest_of
from weft.serve.errors import Refused, shown


class Routes:
    """The routes of some routers."""

    def __init__(self, routers: Sequence[APIRouter]) -> None:
        self._routers = routers

    @cached_property
    def _routes(self) -> list[APIRoute]:
        """When the first request comes: later than the routes."""
        return [route for router in self._routers for route in router.routes if isinstance(route, APIRoute)]

    @cached_property
    def _query(self) -> dict[Any, list[str]]:
        return {
            route.endpoint: [each.alias for each in route.dependant.query_params] for route in self._routes
        }

    def methods(self, path: str) -> list[str]:
        """All methods of a path."""
        matching = [route for route in self._routes if route.path_regex.match(path)]
        return sorted({method for route in matching for method in route.methods or ()})

    def check_query(self, request: Request) -> None:
        """A dependency: refuse query parameters that the endpoint does not have, or has once."""
        known = self._query.get(request.scope["endpoint"], [])
        names = [name for name, _ in request.query_params.multi_items()]
        for name in names:
            if name not in known:
                message = f"There is no parameter {shown(name)!r}. {nearest_of(name[:100], known)}"
                raise Refused(400, "unknown_parameter", message, param=shown(name))
            if names.count(name) > 1:
                raise Refused(400, "repeated_parameter", f"{name} is given twice. Give it once.", param=name)
