"""The least that a streamed token can cost: what `benchmarks/gateway.py` holds the gateway against.

One process with two paths, asked like the gateway, each writing an event of the gateway's size to every stream in
every step: `/aiohttp` is a bare handler that is woken and calls `StreamResponse.write`, `/write` is woken and hands the
bytes to the kernel. `/whole` reads a body and answers at once, with as much as the gateway does. `/others` creates a
record in Redis and has the scripted nodes say one token before it does so: what a request waits for beside the gateway.
"""

import argparse
import asyncio
import os
import secrets
from contextlib import AsyncExitStack

import zmq.asyncio
from aiohttp import web
from amounts import above_zero

from pdserve.control.channel import ControlClient
from pdserve.control.keyspace import Keyspace
from pdserve.control.messages import DecodeTask, GenerationTask, NodeRole, PrefillTask, ToGateway, TokenBatch
from pdserve.control.node_registry import NodeRegistry
from pdserve.control.redis_connection import RedisConnection, connect
from pdserve.control.request_store import RequestStore
from pdserve.engine.sampling_params import SamplingParams

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


class Others:
    """Asks Redis and the nodes for what the gateway asks them, and nothing else; for one request at a time."""

    def __init__(self, redis: RedisConnection, prefill: ControlClient, decode: ControlClient) -> None:
        self._store = RequestStore(redis, Keyspace("bench"))
        self._prefill = prefill
        self._decode = decode

    @classmethod
    async def meet(cls, redis: RedisConnection, stack: AsyncExitStack) -> "Others":
        """Connect to the nodes that Redis knows; `stack` hangs up."""
        context = stack.enter_context(zmq.asyncio.Context())
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        clients: dict[NodeRole, ControlClient] = {}
        registry = NodeRegistry(redis, Keyspace("bench"), 10.0)
        while len(clients) < len(NodeRole):
            await asyncio.sleep(0.1)
            for node in await registry.list():
                if node.info.role not in clients:
                    client = ControlClient.connect(context, node.info.control_endpoint)
                    stack.callback(client.close)
                    stack.callback(tasks.create_task(client.watch(), name=f"watch {node.info.node_id}").cancel)
                    clients[node.info.role] = client
        return cls(redis, clients[NodeRole.PREFILL], clients[NodeRole.DECODE])

    async def whole(self, request: web.Request) -> web.Response:
        """POST /others."""
        await request.json()
        request_id = secrets.token_hex(16)
        await self._store.create(request_id, "floor", 5)
        sampling = SamplingParams(max_tokens=1, seed=1, ignore_eos=True)
        task = GenerationTask(request_id, request_id, (1, 2, 3, 4, 5), (), sampling, "", 60.0)
        self._decode.send(DecodeTask(task, request_id))
        self._prefill.send(PrefillTask(task, request_id, "tcp://127.0.0.1:9", "scripted-decode", "0"))
        await self._prefill.follow(_is_of_tokens)
        return web.json_response(_WHOLE)


def _is_of_tokens(message: ToGateway) -> bool:
    return isinstance(message, TokenBatch)


async def _serve(step_s: float, redis_url: str) -> None:
    async with AsyncExitStack() as stack:
        redis = connect(redis_url)
        stack.push_async_callback(redis.close)
        await _serve_floors(Floor(step_s), await Others.meet(redis, stack))


async def _serve_floors(floor: Floor, others: Others) -> None:
    app = web.Application()
    app.add_routes(
        [
            web.post("/aiohttp", floor.by_aiohttp),
            web.post("/write", floor.by_write),
            web.post("/whole", floor.whole),
            web.post("/others", others.whole),
        ]
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
    parser.add_argument("--step-ms", type=above_zero(float), default=15.0)
    parser.add_argument("--redis-url", required=True)
    options = parser.parse_args()
    asyncio.run(_serve(options.step_ms / 1e3, options.redis_url))


if __name__ == "__main__":
    main()
