"""What operators and load balancers ask: does the process live, can it serve, what is it doing."""

import time
from importlib.metadata import version

from aiohttp import web

from pdserve.gateway.deps import DEPS
from pdserve.gateway.error_responses import ErrorReply, json_response
from pdserve.gateway.tier_metrics import tier_page
from pdserve.gateway.transfer_metrics import transfer_page

_VERSION = version("pdserve")


async def live(request: web.Request) -> web.Response:
    """GET /health, /live and /ping: the process lives, whatever its load and its peers."""
    return json_response({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """GET /ready: a token can be produced now."""
    reason = request.app[DEPS].not_ready_reason()
    if reason is not None:
        return ErrorReply(503, reason, code="not_ready", retry_after_s=1.0).response()
    return json_response({"status": "ready"})


async def show_version(request: web.Request) -> web.Response:
    """GET /version."""
    return json_response({"version": _VERSION})


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics, for Prometheus."""
    deps = request.app[DEPS]
    num_running, num_waiting = deps.status.request_counts()
    speculation = deps.status.speculation()
    page = deps.metrics.page(deps.not_ready_reason() is None, num_running, num_waiting, speculation)
    loads = deps.status.loads()
    page += tier_page(loads) + transfer_page(loads, deps.status.malformed(), deps.status.retries())
    return web.Response(body=page, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def admin_status(request: web.Request) -> web.Response:
    """GET /admin/status."""
    deps = request.app[DEPS]
    reason = deps.not_ready_reason()
    own = {
        "version": _VERSION,
        "ready": reason is None,
        "not_ready_reason": reason,
        "uptime_s": round(time.monotonic() - deps.started_s, 3),
        "open_requests": len(deps.open_requests),
    }
    return json_response({**own, **deps.status.report()})
