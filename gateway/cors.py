"""What a browser asks before it lets a page of another origin call the API (CORS). Off by default."""

from aiohttp import hdrs, web

from pdserve.gateway.deps import DEPS
from pdserve.gateway.middlewares import Handler

_LIMITS = ", ".join(f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining"))
_EXPOSED = f"X-Request-Id, request-id, Retry-After, x-pdserve-route, x-pdserve-warning, {_LIMITS}"
_MAX_AGE_S = "600"


@web.middleware
async def answer_preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a browser's preflight by itself: it carries no API key."""
    is_preflight = request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
    if not is_preflight or _allowed_origin(request) is None:
        return await handler(request)
    headers = {
        hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, POST, DELETE",
        hdrs.ACCESS_CONTROL_MAX_AGE: _MAX_AGE_S,
    }
    if asked := request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS):
        headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = asked
    return web.Response(status=204, headers=headers)


async def allow_origin(request: web.Request, response: web.StreamResponse) -> None:
    """Let pages of an allowed origin read any response, streams and errors included."""
    origins = request.app[DEPS].config.cors_allow_origins
    if not origins:
        return
    response.headers.add(hdrs.VARY, hdrs.ORIGIN)
    if (origin := _allowed_origin(request)) is not None:
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
        response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _EXPOSED


def _allowed_origin(request: web.Request) -> str | None:
    origins = request.app[DEPS].config.cors_allow_origins
    if "*" in origins:
        return "*"
    origin = request.headers.get(hdrs.ORIGIN)
    return origin if origin in origins else None
