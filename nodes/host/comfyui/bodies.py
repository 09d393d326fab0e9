"""Bodies of requests to the pack's routes: read, checked, and refused with a sentence."""

import json
from collections.abc import Callable
from typing import Any

from aiohttp import web

MOST_BYTES = 1 << 20


async def text_of(request: web.Request, most: int = MOST_BYTES) -> str:
    """Return the text of a request's body.

    Raises:
        HTTPBadRequest: it is longer than ``most`` bytes, or no text.
    """
    body = await request.read()
    if len(body) > most:
        raise web.HTTPBadRequest(text=f"The body has {len(body)} bytes. At most {most} are read.")
    try:
        return body.decode()
    except UnicodeDecodeError:
        raise web.HTTPBadRequest(text="The body is not text in UTF-8.") from None


async def json_of(request: web.Request, expected: str, fits: Callable[[Any], bool]) -> Any:
    """Return the JSON of a request's body.

    Raises:
        HTTPBadRequest: it is not what is ``expected``: no JSON, or it does not fit.
    """
    text = await text_of(request)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise web.HTTPBadRequest(text=f"The body is not JSON. Send {expected}.") from None
    if not fits(value):
        raise web.HTTPBadRequest(text=f"The JSON is not {expected}.")
    return value
