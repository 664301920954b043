"""Bodies of requests, as records."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from aiohttp import web

T = TypeVar("T")


async def read(request: web.Request, kind: type[T]) -> T:
    """The body of a request. Raises ValueError that names the field."""
    try:
        return msgspec.convert(await request.json(), kind)  # not msgspec's own reader, which knows no NaN
    except msgspec.ValidationError as error:
        raise ValueError(f"body: {error}") from None
    except RecursionError:
        raise ValueError("body: is nested too deeply") from None
