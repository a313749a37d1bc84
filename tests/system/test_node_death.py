"""Killed nodes, a killed Redis: each client gets one terminal answer, nothing stays held, what returns serves again."""

import asyncio
import json
import signal
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_PROMPT = list(range(1000, 1040))


class Stream:
    """A streamed completion as a client sees it."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.finish_reasons: list[str] = []
        self.errors: list[dict[str, Any]] = []
        self.num_done = 0
        self.started = asyncio.Event()

    @property
    def num_terminal(self) -> int:
        """Terminal words: a finish reason or an error."""
        return len(self.finish_reasons) + len(self.errors)

    async def run(self, session: aiohttp.ClientSession, max_tokens: int, seed: int) -> None:
        body = {
            "model": "test",
            "prompt": _PROMPT,
            "max_tokens": max_tokens,
            "temperature": 1.0,
            "seed": seed,
            "stream": True,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        async with session.post("/v1/completions", json=body) as reply:
            assert reply.status == 200, await reply.text()
            async for line in reply.content:
                if line.startswith(b"data: "):
                    self._take(line[len(b"data: ") :].strip())

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.num_done += 1
            return
        event = json.loads(data)
        if "error" in event:
            self.errors.append(event["error"])
            return
        for choice in event["choices"]:
            self.token_ids += choice.get("token_ids") or []
            if choice["finish_reason"]:
                self.finish_reasons.append(choice["finish_reason"])
        if self.token_ids:
            self.started.set()


async def _start_streams(
    group: asyncio.TaskGroup, session: aiohttp.ClientSession, count: int, max_tokens: int
) -> list[Stream]:
    streams = [Stream() for _ in range(count)]
    for seed, stream in enumerate(streams):
        group.create_task(stream.run(session, max_tokens, seed))
    await asyncio.gather(*(stream.started.wait() for stream in streams))
    return streams


async def _complete(session: aiohttp.ClientSession, max_tokens: int = 4) -> int:
    body = {"model": "test", "prompt": _PROMPT, "max_tokens": max_tokens, "temperature": 0}
    async with session.post("/v1/completions", json=body) as reply:
        await reply.read()
        return reply.status


async def test_only_decode_node_killed_with_four_streams_running(start_cluster: Any, demo_model_dir: Path) -> None:
    """C015, C142: one terminal answer each within 10 s, prefill holds nothing, a new decode node serves at once."""
    cluster = start_cluster(demo_model_dir, 1, 1, ("--num-blocks", "200"))
    async with aiohttp.ClientSession(cluster.url) as session:
        async with asyncio.TaskGroup() as group:
            streams = await _start_streams(group, session, 4, max_tokens=400)
            killed_at = time.monotonic()
            cluster.kill("decode-0")
        assert time.monotonic() - killed_at < 10
        assert [stream.num_terminal for stream in streams] == [1, 1, 1, 1]
        assert all(stream.errors for stream in streams) and [stream.num_done for stream in streams] == [1, 1, 1, 1]

        await asyncio.to_thread(cluster.wait_idle)
        await asyncio.to_thread(
            cluster.wait_until, lambda: cluster.get("/ready")[0] == 503, "not ready without a decode node", 60
        )
        assert cluster.get("/health")[0] == 200
        assert await _complete(session) == 503

        cluster.start_node("decode", 1)
        await asyncio.to_thread(cluster.wait_ready)
        assert await _complete(session) == 200
    await asyncio.to_thread(cluster.wait_idle)


def _with_cache(cluster: Any) -> list[str]:
    """The decode nodes that hold a prompt in their cache: where the same prompt goes again."""
    nodes = cluster.status()["nodes"]
    return [node["node_id"] for node in nodes if node["role"] == "decode" and node["blocks"]["cached"]]


async def test_streams_go_on_on_another_decode_node(start_cluster: Any, demo_model_dir: Path) -> None:
    """A node's death that the client never notices: the tokens are those of an undisturbed run."""
    cluster = start_cluster(demo_model_dir, 1, 2, ("--num-blocks", "200"))
    async with aiohttp.ClientSession(cluster.url) as session:
        undisturbed = [Stream() for _ in range(4)]
        for seed, stream in enumerate(undisturbed):
            await stream.run(session, 120, seed)
        await asyncio.to_thread(cluster.wait_until, lambda: _with_cache(cluster), "a decode node has the prompt", 60)
        async with asyncio.TaskGroup() as group:
            streams = await _start_streams(group, session, 4, max_tokens=120)
            cluster.kill(_with_cache(cluster)[0])

    for disturbed, stream in zip(streams, undisturbed, strict=True):
        assert disturbed.errors == []
        assert (disturbed.finish_reasons, disturbed.num_done) == (["length"], 1)
        assert disturbed.token_ids == stream.token_ids
    await asyncio.to_thread(cluster.wait_idle)
    assert cluster.status()["routes"]["migrated"] >= 1


async def test_prefill_node_killed_while_prompts_are_computed(start_cluster: Any, demo_model_dir: Path) -> None:
    """C144: what was under way goes on elsewhere, what decodes is not touched, a new prefill node is used again."""
    cluster = start_cluster(demo_model_dir, 1, 1, ("--num-blocks", "400", "--max-num-batched-tokens", "64"))
    body = {"model": "test", "prompt": list(range(2000, 5000)), "max_tokens": 4, "temperature": 0}

    def is_prefilling() -> bool:
        status = cluster.status()  # what a node says of its load may be a second old: the gateway knows sooner
        is_at_work = any(node["role"] == "prefill" and node["running"] for node in status["nodes"])
        return is_at_work or bool(status["requests"]["prefilling"] and status["requests"]["decoding"])

    async with aiohttp.ClientSession(cluster.url) as session, asyncio.TaskGroup() as group:
        [stream] = await _start_streams(group, session, 1, max_tokens=400)
        long = group.create_task(_post(session, body))
        await asyncio.to_thread(cluster.wait_until, is_prefilling, "the long prompt is being computed", 60)
        cluster.kill("prefill-0")
        status, answer = await long
        assert status == 200, answer

    assert (stream.finish_reasons, stream.errors) == (["length"], [])
    await asyncio.to_thread(cluster.wait_idle)
    cluster.start_node("prefill", 1)
    await asyncio.to_thread(
        cluster.wait_until,
        lambda: sum(node["ready"] for node in cluster.status()["nodes"]) == 2,
        "the new prefill node is known and ready",
    )
    before = cluster.status()["routes"]["disaggregated"]
    async with aiohttp.ClientSession(cluster.url) as session:
        assert await _complete(session) == 200
    assert cluster.status()["routes"]["disaggregated"] == before + 1


async def test_prefill_node_killed_with_twenty_requests_in_flight(start_cluster: Any, tiny_model: Any) -> None:
    """C144: every request is answered as without the accident, also those that keep coming; nothing stays held."""
    cluster = start_cluster(tiny_model(), 1, 1, ("--num-blocks", "900"))
    bodies = [
        {"model": "test", "prompt": [3 + (7 * number + index) % 150 for index in range(150)], "max_tokens": 4}
        | {"temperature": 0, "ignore_eos": True}
        for number in range(30)
    ]
    async with aiohttp.ClientSession(cluster.url, connector=aiohttp.TCPConnector(limit=0)) as session:
        async with asyncio.TaskGroup() as group:
            cluster.processes["prefill-0"].send_signal(signal.SIGSTOP)  # none is over before the node is killed
            asked = [group.create_task(_post(session, body)) for body in bodies[:20]]
            await asyncio.to_thread(
                cluster.wait_until, lambda: cluster.status()["attempts"] >= 20, "20 are in flight", 60
            )
            cluster.kill("prefill-0")
            asked += [group.create_task(_post(session, body)) for body in bodies[20:]]
        answers = [task.result() for task in asked]
        assert {status for status, _ in answers} == {200}, answers
        await asyncio.to_thread(cluster.wait_idle)
        for body, (_, answer) in zip(bodies, answers, strict=True):
            status, again = await _post(session, body)
            assert (status, json.loads(again)["choices"]) == (200, json.loads(answer)["choices"])
    await asyncio.to_thread(cluster.wait_idle)


async def _post(session: aiohttp.ClientSession, body: dict[str, Any]) -> tuple[int, str]:
    async with session.post("/v1/completions", json=body) as reply:
        return reply.status, await reply.text()


async def test_redis_that_comes_last_is_waited_for(start_cluster: Any, tiny_model: Any) -> None:
    """C168: gateway and nodes that find no Redis stay, say so, and serve once it is there."""
    cluster = start_cluster(tiny_model(), 0, 0, ("--num-blocks", "100"))
    cluster.kill("redis")
    for role in ("prefill", "decode"):
        cluster.start_node(role)
    await asyncio.to_thread(
        cluster.wait_until,
        lambda: cluster.status()["not_ready_reason"] == "Redis does not answer",
        "the reason is said",
    )
    assert cluster.get("/ready")[0] == 503

    cluster.start_redis()
    await asyncio.to_thread(cluster.wait_ready)

    async with aiohttp.ClientSession(cluster.url) as session:
        status, answer = await _post(session, {"model": "test", "prompt": list(range(5, 45)), "max_tokens": 4})
        assert status == 200, answer
    assert all(process.poll() is None for process in cluster.processes.values())


async def test_redis_killed_while_streams_run(start_cluster: Any, demo_model_dir: Path) -> None:
    """C168: the streams finish, new requests get a 503 until it is back, then all works without a restart."""
    cluster = start_cluster(demo_model_dir, 1, 1, ("--num-blocks", "200"))
    async with aiohttp.ClientSession(cluster.url) as session:
        async with asyncio.TaskGroup() as group:
            streams = await _start_streams(group, session, 3, max_tokens=120)
            cluster.kill("redis")
            async with session.post("/v1/completions", json={"model": "test", "prompt": "hi"}) as reply:
                error = (await reply.json())["error"]
                assert (reply.status, error["code"]) == (503, "redis_unavailable")
                assert int(reply.headers["Retry-After"]) >= 1
        assert all(stream.finish_reasons == ["length"] and not stream.errors for stream in streams)

        cluster.start_redis()
        await asyncio.to_thread(cluster.wait_ready)
        assert await _complete(session) == 200
        await asyncio.to_thread(
            cluster.wait_until, lambda: len(cluster.status()["nodes"]) == 2, "the nodes are registered again", 60
        )
    await asyncio.to_thread(cluster.wait_idle)
