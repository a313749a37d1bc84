"""The least that a streamed token can cost: what `benchmarks/gateway.py` holds the gateway against.

One process with two paths, asked like the gateway, each writing an event of the gateway's size to every stream in
every step: `/aiohttp` is a bare handler that is woken and calls `StreamResponse.write`, `/write` is woken and hands the
bytes to the kernel. `/whole` reads a body and answers at once, with as much as the gateway does.
"""

import argparse
import asyncio
import os

from aiohttp import web

_EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1700000000,'
    b'"model":"scripted","choices":[{"index":0,"text":" the","logprobs":null,"finish_reason":null,"stop_reason":null}]}'
    b"\n\n"
)
_CHUNK = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
_WHOLE = {
    "id": "cmpl-0123456789abcdef0123456789abcdef",
    "object": "text_completion",
    "created": 1700000000,
    "model": "scripted",
    "choices": [{"index": 0, "text": " the", "logprobs": None, "finish_reason": "length", "stop_reason": None}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6},
}
_END = b"data: [DONE]\n\n"


class Floor:
    """Owns the step that all streams wait for."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._stepped: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def step(self) -> None:
        """Wake every stream in every step, until cancelled."""
        while True:
            await asyncio.sleep(self._step_s)
            self._stepped.set_result(None)
            self._stepped = asyncio.get_running_loop().create_future()

    async def by_aiohttp(self, request: web.Request) -> web.StreamResponse:
        """POST /aiohttp."""
        num_tokens, response = await self._open(request)
        for _ in range(num_tokens):
            await self._stepped  # nobody is cancelled here
            await response.write(_EVENT)
        await response.write_eof(_END)
        return response

    async def by_write(self, request: web.Request) -> web.StreamResponse:
        """POST /write."""
        num_tokens, response = await self._open(request)
        assert request.transport is not None
        file_no = request.transport.get_extra_info("socket").fileno()
        for _ in range(num_tokens):
            await self._stepped  # nobody is cancelled here
            os.write(file_no, _CHUNK)
        await response.write_eof(_END)
        return response

    async def whole(self, request: web.Request) -> web.Response:
        """POST /whole."""
        await request.json()
        return web.json_response(_WHOLE)

    async def _open(self, request: web.Request) -> tuple[int, web.StreamResponse]:
        body = await request.json()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        return int(body["max_tokens"]), response


async def _serve(step_s: float) -> None:
    floor = Floor(step_s)
    app = web.Application()
    app.add_routes(
        [web.post("/aiohttp", floor.by_aiohttp), web.post("/write", floor.by_write), web.post("/whole", floor.whole)]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        print(f"listening on http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
        await floor.step()
    finally:
        await runner.cleanup()


def main() -> None:
    """Serve until terminated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=15.0)
    asyncio.run(_serve(parser.parse_args().step_ms / 1e3))


if __name__ == "__main__":
    main()
