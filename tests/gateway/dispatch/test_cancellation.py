"""Requests ended at another gateway than the one that answers them: two gateways, one Redis, nodes that never end."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import aiohttp
import pytest

from pdserve.control.messages import CancelTask, DecodeTask, NodeRole, Stage
from pdserve.engine.sampling_defaults import SamplingDefaults
from pdserve.engine.tokenizer import Tokenizer
from pdserve.gateway import request_cancellation, request_recorder
from pdserve.gateway.app import create_app
from pdserve.gateway.config import GatewayConfig, HttpConfig
from pdserve.gateway.dispatch_parts import open_dispatch
from pdserve.gateway.http_server import listening

MODEL = "tiny"


async def one_token(node, peer, message) -> None:
    """Begin every answer, and never go on."""
    if isinstance(message, DecodeTask):
        await node.report(peer, message.task, Stage.PREFILLING)
        await node.speak(peer, message.task, 0, 1)


class TwoGateways:
    """Both on one node. What is 503 for now is asked again, as the machine may be busy."""

    def __init__(self, session: aiohttp.ClientSession, urls: list[str], node) -> None:
        self.session = session
        self.here, self.elsewhere = urls
        self.node = node

    async def ask(self, method: str, url: str, body: dict | None = None) -> dict:
        async with asyncio.timeout(90):
            while True:
                async with self.session.request(method, url, json=body) as response:
                    reply = await response.json()
                    if response.status == 200:
                        return reply
                    assert response.status == 503, reply

    async def until_heard(self, kind: type) -> None:
        await self.node.until_heard(lambda: any(isinstance(message, kind) for message in self.node.heard))


@pytest.fixture
async def gateways(cluster, shared_redis, demo_model_dir, monkeypatch) -> AsyncIterator[TwoGateways]:
    monkeypatch.setattr(request_recorder, "_READ_AFTER_WRITE_S", 30.0)  # a busy machine's Redis may be slow
    monkeypatch.setattr(request_cancellation, "_WAIT_S", 30.0)
    tokenizer = Tokenizer.load(demo_model_dir)
    http = HttpConfig(model_names=(MODEL,), port=0)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(cluster)
        node = await cluster.add(NodeRole.DECODE, "d1")
        node.script = one_token
        urls = []
        for _ in range(2):
            config = GatewayConfig(
                model_dir=demo_model_dir,
                redis_url=shared_redis.url,
                http=http,
                namespace="test",
                pool=cluster.pool_config,
            )
            dispatch = await stack.enter_async_context(open_dispatch(config, (1, 2, 3)))
            app = create_app(http, tokenizer, dispatch.backend, SamplingDefaults())
            urls.append(await stack.enter_async_context(listening(app, http)))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield TwoGateways(session, urls, node)


async def first_event(gateways: TwoGateways, response: aiohttp.ClientResponse) -> dict:
    event = json.loads((await response.content.readline()).removeprefix(b"data: "))
    assert "error" not in event, event
    return event


async def test_any_gateway_ends_a_request_and_says_so_ever_after(gateways: TwoGateways) -> None:
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 60, "n": 2, "stream": True, "seed": 1}
    async with asyncio.timeout(90):
        while (begun := await gateways.session.post(gateways.here + "/v1/completions", json=body)).status == 503:
            begun.release()  # it has not met the node yet
    async with begun as response:
        response_id = (await first_event(gateways, response))["id"]
        request = f"/v1/requests/{response_id}"
        ended = {"id": response_id, "object": "request", "cancelled": True, "status": "cancelled"}

        assert await gateways.ask("DELETE", gateways.elsewhere + request) == ended
        for url in (gateways.elsewhere, gateways.here):
            shown = await gateways.ask("GET", url + request)
            assert [choice["status"] for choice in shown["choices"]] == ["cancelled"] * 2
            assert await gateways.ask("DELETE", url + request) == ended
        rest = (await response.content.read()).decode()

    assert '"code":"cancelled"' in rest and rest.count("[DONE]") == 1
    await gateways.until_heard(CancelTask)


@pytest.mark.parametrize("place", ["here", "elsewhere"])
@pytest.mark.parametrize("way", ["cancel", "delete", "as a request"])
async def test_a_response_that_was_ended_is_so_in_its_record_too(gateways: TwoGateways, place: str, way: str) -> None:
    url = getattr(gateways, place)
    body = {"model": MODEL, "input": "Hi", "max_output_tokens": 60, "background": True}
    queued = await gateways.ask("POST", gateways.here + "/v1/responses", body)
    request, response = f"{url}/v1/requests/{queued['id']}", f"{url}/v1/responses/{queued['id']}"
    async with asyncio.timeout(90):
        while await status_of(gateways, request) != "prefilling" and await status_of(gateways, request) != "decoding":
            assert await status_of(gateways, response) in ("queued", "in_progress")

    match way:
        case "cancel":
            await gateways.ask("POST", f"{response}/cancel")
        case "delete":
            await gateways.ask("DELETE", response)
        case _:
            await gateways.ask("DELETE", request)

    assert await status_of(gateways, request) == "cancelled"
    if way == "delete":
        assert await status_of(gateways, response) is None
    else:
        async with asyncio.timeout(90):
            while (status := await status_of(gateways, response)) == "in_progress":
                continue  # its end is stored behind that of its request
        assert status == "cancelled"


async def status_of(gateways: TwoGateways, url: str) -> str | None:
    async with gateways.session.get(url) as response:
        return (await response.json()).get("status")
