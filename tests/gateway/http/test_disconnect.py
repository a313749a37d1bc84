"""A client that leaves is noticed within a second, wherever its request is; a gateway that stops lets streams end."""

import asyncio
import json

import pytest

from pdserve.gateway.open_requests import OpenRequests

MODEL = "org/demo"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


async def open_raw(gateway, body: dict) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    await writer.drain()
    return reader, writer


async def until(condition, timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  (it becomes true across a socket)
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("handler_cancellation", [False, True])
@pytest.mark.parametrize("stage", ["admission", "prefill", "streaming", "whole"])
async def test_work_is_cancelled_when_the_client_leaves(start_gateway, handler_cancellation, stage):
    gateway = await start_gateway(handler_cancellation=handler_cancellation)
    gateway.say("one two three four five", hold_after={"prefill": 0, "streaming": 3}.get(stage, 2))
    gateway.script.proceed.clear()
    if stage == "admission":
        gateway.script.admit.clear()
    reader, writer = await open_raw(gateway, {**CHAT, "stream": stage != "whole"})
    if stage in ("prefill", "streaming"):
        await reader.readuntil(b"\r\n\r\n")
    await until(lambda: len(gateway.open_requests) == 1)
    if stage != "admission":
        await until(lambda: bool(gateway.source.started))

    writer.close()
    await writer.wait_closed()
    await until(lambda: len(gateway.open_requests) == 0)

    if stage == "admission":
        assert gateway.source.num_abandoned == 1 and gateway.source.started == []
    else:
        assert [generation.ended for generation in gateway.source.started] == ["cancelled"]
    async with gateway.session.get(gateway.url + "/metrics") as response:
        page = await response.text()
    assert 'pdserve_requests_total{endpoint="chat",outcome="cancelled"} 1.0' in page


async def test_client_that_leaves_in_the_middle_of_its_upload_is_one_cancelled_request(gateway):
    host, port = gateway.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"model": ')
    await until(lambda: len(gateway.open_requests) == 1)

    writer.close()
    await writer.wait_closed()
    await until(lambda: len(gateway.open_requests) == 0)

    async with gateway.session.get(gateway.url + "/metrics") as response:
        assert 'outcome="cancelled"} 1.0' in await response.text()


async def test_endless_stream_ends_when_the_client_leaves(gateway):
    gateway.say("la ", is_endless=True)
    reader, writer = await open_raw(gateway, {**CHAT, "stream": True})
    await reader.readuntil(b"data: ")

    writer.close()
    await writer.wait_closed()

    await until(lambda: len(gateway.open_requests) == 0)


async def test_client_that_does_not_read_is_dropped_and_others_are_served(start_gateway):
    gateway = await start_gateway(slow_client_timeout_s=0.3, max_model_len=10**6)
    token_ids = gateway.tokenizer.encode("word " * 40)
    gateway.say_ids(token_ids * 1000, chunk=50)
    body = {**CHAT, "stream": True, "logprobs": True, "top_logprobs": 20}
    _, writer = await open_raw(gateway, body)
    await until(lambda: bool(gateway.source.started))
    slow = gateway.source.started[0]

    await until(lambda: slow.ended is not None)
    assert slow.ended == "cancelled"
    writer.close()

    gateway.say("fine")
    status, _, _ = await gateway.post("/v1/chat/completions", CHAT)
    assert status == 200


async def test_draining_refuses_new_requests_and_lets_a_stream_finish(gateway):
    gateway.say("one two three", hold_after=1)
    gateway.script.proceed.clear()
    async with gateway.session.post(gateway.url + "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
        draining = asyncio.ensure_future(gateway.open_requests.drain(grace_s=5.0))
        await until(lambda: gateway.open_requests.is_draining)

        status, reply, refused = await gateway.post("/v1/chat/completions", CHAT)
        assert status == 503 and reply["error"]["code"] == "draining" and refused.headers["Retry-After"]
        async with gateway.session.get(gateway.url + "/ready") as ready:
            assert ready.status == 503
        async with gateway.session.get(gateway.url + "/health") as health:
            assert health.status == 200
        gateway.script.proceed.set()
        text = await response.text()
    await draining

    assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("is_stream", [True, False])
async def test_after_the_grace_each_request_gets_an_error(gateway, is_stream):
    gateway.say("one two three", hold_after=1)
    gateway.script.proceed.clear()
    answer = asyncio.ensure_future(
        gateway.session.post(gateway.url + "/v1/chat/completions", json={**CHAT, "stream": is_stream})
    )
    await until(lambda: bool(gateway.source.started) and gateway.source.started[0].num_sent >= 1)

    await gateway.open_requests.drain(grace_s=0.05)

    async with await answer as response:
        text = await response.text()
    assert text.count("data: [DONE]\n\n") == is_stream
    last = text.removesuffix("data: [DONE]\n\n").rstrip().split("\n\n")[-1].removeprefix("data: ")
    assert response.status == (200 if is_stream else 503)
    assert json.loads(last)["error"]["code"] == "draining"
    assert [generation.ended for generation in gateway.source.started] == ["cancelled"]


async def test_drain_of_an_idle_gateway_returns_at_once():
    async with asyncio.timeout(30):
        await OpenRequests().drain(grace_s=60.0)
