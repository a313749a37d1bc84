"""A request looked at, and ended, from the outside."""

import asyncio
import json

import pytest

from pdserve.control.gateway_peers import GatewayPeers
from pdserve.control.keyspace import Keyspace
from pdserve.control.request_state import RequestFacts, RequestRecord, RequestStatus, StoryEntry

MODEL = "org/demo"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
ID = "chatcmpl-" + "0123456789abcdef" * 2


@pytest.fixture
async def peer(redis) -> GatewayPeers:
    """The other gateway, which lives, and hears of what it is told when a test has it listen."""
    peer = GatewayPeers(redis, Keyspace("test"), "gateway-1", lease_s=60.0)
    await peer.hear()
    return peer


@pytest.fixture
async def gateway(start_gateway, redis):
    return await start_gateway(peers=GatewayPeers(redis, Keyspace("test"), "gateway-0", lease_s=60.0))


def record(request_id: str, status: RequestStatus) -> RequestRecord:
    facts = RequestFacts(1, "disaggregated", "prefill-0", "decode-0", 7, "stop")
    return RequestRecord(request_id, "gateway-1", status, 12, 1000, 1500, facts, (StoryEntry(1000, status, ""),))


async def ask(gateway, method: str, response_id: str) -> tuple[int, dict]:
    async with gateway.session.request(method, f"{gateway.url}/v1/requests/{response_id}") as response:
        return response.status, await response.json()


async def test_the_record_of_every_choice_is_shown(gateway, peer):
    gateway.records.update(
        {
            f"{ID}-0": record(f"{ID}-0", RequestStatus.FINISHED),
            f"{ID}-1": record(f"{ID}-1", RequestStatus.DECODING),
        }
    )

    status, shown = await ask(gateway, "GET", ID)

    assert status == 200 and shown["id"] == ID and shown["status"] == "decoding"
    assert [choice["status"] for choice in shown["choices"]] == ["finished", "decoding"]
    assert shown["choices"][0]["story"] == [{"at_ms": 1000, "status": "finished", "note": ""}]
    assert shown["choices"][0]["route"] == "disaggregated" and shown["choices"][0]["num_output_tokens"] == 7


@pytest.mark.parametrize("response_id", [ID, "nope", "cmpl-1:2", "x" * 300])
@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_an_unknown_request_is_not_found(gateway, method, response_id):
    status, reply = await ask(gateway, method, response_id)

    assert status == 404 and reply["error"]["code"] == "request_not_found"


async def test_cancelling_ends_a_stream_with_an_error_and_frees_its_work(gateway):
    gateway.say("one two three four", hold_after=1)
    gateway.script.proceed.clear()
    async with gateway.session.post(gateway.url + "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
        first = json.loads((await response.content.readline()).removeprefix(b"data: "))

        assert await ask(gateway, "DELETE", first["id"]) == (
            200,
            {"id": first["id"], "object": "request", "cancelled": True, "status": "cancelled"},
        )
        rest = (await response.content.read()).decode()

    assert '"code":"cancelled"' in rest and rest.endswith("}}\n\ndata: [DONE]\n\n") and rest.count("[DONE]") == 1
    assert gateway.source.started[0].ended == "cancelled" and len(gateway.open_requests) == 0


async def test_cancelling_ends_a_whole_answer_too(gateway):
    gateway.say("one two three four", hold_after=1)
    gateway.script.proceed.clear()
    waiting = asyncio.create_task(gateway.post("/v1/chat/completions", CHAT))
    async with asyncio.timeout(50):
        await gateway.source.has_started.wait()
    response_id = gateway.source.started[0].request.request_id.removesuffix("-0")

    status, _ = await ask(gateway, "DELETE", response_id)
    answered, reply, _ = await waiting

    assert status == 200 and answered == 499 and reply["error"]["code"] == "cancelled"


async def test_what_another_gateway_answers_is_ended_there(gateway, peer):
    gateway.records[f"{ID}-0"] = record(f"{ID}-0", RequestStatus.DECODING)
    asked = asyncio.create_task(ask(gateway, "DELETE", ID))
    async with asyncio.timeout(60):
        while await peer.hear() != [ID]:
            continue
    gateway.records[f"{ID}-0"] = record(f"{ID}-0", RequestStatus.CANCELLED)

    status, reply = await asked

    assert status == 200 and reply["cancelled"] is True and reply["status"] == "cancelled"


async def test_a_gateway_that_does_not_end_it_is_told_of_with_the_state(gateway, peer):
    gateway.records[f"{ID}-0"] = record(f"{ID}-0", RequestStatus.DECODING)

    status, reply = await ask(gateway, "DELETE", ID)

    assert status == 503 and reply["error"]["code"] == "gateway_silent" and "decoding" in reply["error"]["message"]
    assert await peer.hear() == [ID]


@pytest.mark.parametrize("status", [RequestStatus.FINISHED, RequestStatus.FAILED])
async def test_what_has_ended_keeps_its_end(gateway, status):
    gateway.records[f"{ID}-0"] = record(f"{ID}-0", status)

    for _ in range(2):
        answered, reply = await ask(gateway, "DELETE", ID)
        assert answered == 200 and reply["cancelled"] is False and reply["status"] == status


async def test_what_a_lost_gateway_left_behind_has_failed(gateway, peer):
    gateway.records[f"{ID}-0"] = record(f"{ID}-0", RequestStatus.DECODING)
    gateway.records[f"{ID}-1"] = record(f"{ID}-1", RequestStatus.FINISHED)
    await peer.leave()

    status, reply = await ask(gateway, "DELETE", ID)
    _, shown = await ask(gateway, "GET", ID)

    assert status == 200 and reply["cancelled"] is False and reply["status"] == "failed"
    assert shown["status"] == "failed"
    assert [choice["error_code"] for choice in shown["choices"]] == ["gateway_lost", None]
