"""Who is served first and who has waited too long, through real processes that run one sequence at a time."""

import asyncio
import signal
from typing import Any

import aiohttp
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_ONE_AT_A_TIME = ("--num-blocks", "200", "--block-size", "8", "--max-num-seqs", "1", "--num-threads", "1")
_PRIORITY = ("--scheduling-policy", "priority")
_LONG = 450


async def _ask(session: aiohttp.ClientSession, max_tokens: int, **fields: Any) -> tuple[int, dict[str, Any]]:
    body = {"model": "test", "prompt": [7, 8, 9], "max_tokens": max_tokens, "ignore_eos": True, **fields}
    async with session.post("/v1/completions", json=body) as reply:
        return reply.status, await reply.json()


async def _begin_long(session: aiohttp.ClientSession, max_tokens: int = _LONG) -> aiohttp.ClientResponse:
    """Return a stream that has begun and holds the only place."""
    body = {"model": "test", "prompt": [5, 6], "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    reply = await session.post("/v1/completions", json=body)
    assert reply.status == 200
    while not (await reply.content.readline()).startswith(b"data: "):
        pass
    return reply


async def test_the_least_priority_is_served_first_whoever_came_first(tiny_model: Any, start_cluster: Any) -> None:
    cluster = start_cluster(tiny_model(), prefill=0, node_options=_ONE_AT_A_TIME, common_options=_PRIORITY)
    order: list[int] = []

    async def ask(session: aiohttp.ClientSession, priority: int) -> None:
        status, reply = await _ask(session, 3, priority=priority)
        assert status == 200, reply
        order.append(priority)

    async with aiohttp.ClientSession(cluster.url) as session:
        running = await _begin_long(session)
        cluster.processes["decode-0"].send_signal(signal.SIGSTOP)  # or it could be done before all have come
        try:
            asked = []
            for number, priority in enumerate((9, 5, 0, -5), start=2):
                asked.append(asyncio.ensure_future(ask(session, priority)))
                await asyncio.to_thread(cluster.wait_until, lambda n=number: _num_open(cluster) == n, f"{number} open")
        finally:
            cluster.processes["decode-0"].send_signal(signal.SIGCONT)
        await asyncio.gather(*asked)
        assert b"data: [DONE]" in await running.read()

    assert order == [-5, 0, 5, 9]
    cluster.wait_idle()


async def test_who_has_waited_too_long_is_told_so_and_nobody_else(tiny_model: Any, start_cluster: Any) -> None:
    model_dir = tiny_model(max_position_embeddings=8_192)  # so that the place is held for far longer than one may wait
    options = ("--num-blocks", "900", "--block-size", "8", "--max-num-seqs", "1", "--num-threads", "1")
    cluster = start_cluster(model_dir, prefill=0, node_options=(*options, "--max-waiting-s", "1"))
    async with aiohttp.ClientSession(cluster.url) as session:
        running = await _begin_long(session, 6_000)
        cluster.processes["decode-0"].send_signal(signal.SIGSTOP)  # or it could be done before the other has come
        try:
            asked = asyncio.ensure_future(_ask(session, 3))
            await asyncio.to_thread(cluster.wait_until, lambda: _num_open(cluster) == 2, "2 open")
        finally:
            cluster.processes["decode-0"].send_signal(signal.SIGCONT)

        status, reply = await asked

        assert status == 503 and reply["error"]["code"] == "queue_timeout", reply
        assert b"data: [DONE]" in await running.read()
        assert (await _ask(session, 3))[0] == 200
    cluster.wait_idle()


def _num_open(cluster: Any) -> int:
    counts = cluster.status()["requests"]
    return sum(counts[state] for state in ("queued", "prefilling", "transferring", "decoding"))
