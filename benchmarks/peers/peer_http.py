"""The part of OpenAI's API that the load generator needs, for libraries that have no server of their own."""

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Waiting:
    """A request and where its tokens go; None ends it. `has_left` is set when its client has gone."""

    prompt: list[int]
    num_output: int
    loop: asyncio.AbstractEventLoop
    tokens: "asyncio.Queue[int | None]" = field(default_factory=asyncio.Queue)
    has_left: bool = False

    def put(self, token_id: int | None) -> None:
        """Hand over from the computing thread."""
        self.loop.call_soon_threadsafe(self.tokens.put_nowait, token_id)


async def serve(accept: Callable[[Waiting], None]) -> None:
    """Give each request to `accept`, which must not block; prints the URL and serves until the process is killed."""
    runner = web.AppRunner(_application(accept))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"serving on http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


def _application(accept: Callable[[Waiting], None]) -> web.Application:
    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "demo"}]})

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        one = Waiting(body["prompt"], body["max_tokens"], asyncio.get_running_loop())
        accept(one)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            await response.prepare(request)
            while (token_id := await one.tokens.get()) is not None:
                event = {"choices": [{"text": "", "token_ids": [token_id]}]}
                await response.write(f"data: {json.dumps(event)}\n\n".encode())
            await response.write(b"data: [DONE]\n\n")
        except ConnectionError:
            logger.debug("a client has gone")
        finally:
            one.has_left = True
        return response

    app = web.Application(client_max_size=2**24)
    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", complete)])
    return app
