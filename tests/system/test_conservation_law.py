"""The conservation law: whatever is cancelled whenever, everything held is given back and nothing is left in Redis."""

import asyncio
import contextlib
import json
import random
from typing import Any

import aiohttp
import pytest
import redis

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_NUM_REQUESTS = 200
_CONCURRENCY = 24


async def test_two_hundred_requests_half_of_them_cancelled(start_cluster: Any, demo_model_dir: Any) -> None:
    cluster = start_cluster(demo_model_dir, 1, 1, ("--num-blocks", "120"))
    chance = random.Random(7)
    plans = [_plan(chance, is_cancelled=number % 2 == 0) for number in range(_NUM_REQUESTS)]
    limit = asyncio.Semaphore(_CONCURRENCY)
    async with aiohttp.ClientSession(cluster.url) as session:
        outcomes = await asyncio.gather(*(_send(session, limit, body, cut_s) for body, cut_s in plans))

    # A node's word of what it holds may be older than the last request.
    await asyncio.to_thread(cluster.wait_until, lambda: not _num_open(cluster), "all have ended", 60)
    await asyncio.to_thread(cluster.wait_idle)
    status = cluster.status()

    for (_, cut_s), outcome in zip(plans, outcomes, strict=True):
        assert outcome == "answered" or (cut_s is not None and outcome.startswith("cut")), outcome
    # Of what is cut before its head some were not read by the gateway, and are no requests.
    requests = status["requests"]
    num_begun = sum(outcome != "cut before its head" for outcome in outcomes)
    assert num_begun <= requests["finished"] + requests["cancelled"] <= _NUM_REQUESTS
    assert outcomes.count("answered") <= requests["finished"]
    assert requests["failed"] == 0 and requests["cancelled"] > 0
    assert _num_open(cluster) == 0
    for node in status["nodes"]:
        blocks = node["blocks"]
        assert blocks["free"] + blocks["cached"] == blocks["total"] == 120
    _assert_every_key_expires(cluster)


def _num_open(cluster: Any) -> int:
    status = cluster.status()
    active = ("queued", "prefilling", "transferring", "decoding")
    return int(status["open_requests"]) + sum(status["requests"][name] for name in active)


def _plan(chance: random.Random, is_cancelled: bool) -> tuple[dict[str, Any], float | None]:
    body = {
        "model": "test",
        "prompt": [chance.randrange(1000, 20000) for _ in range(chance.choice([1, 15, 16, 17, 80, 200]))],
        "max_tokens": chance.choice([1, 2, 8, 24]),
        "stream": chance.random() < 0.7,
        "ignore_eos": True,
    }
    return body, chance.uniform(0.0, 2.0) if is_cancelled else None


async def _send(
    session: aiohttp.ClientSession, limit: asyncio.Semaphore, body: dict[str, Any], cut_s: float | None
) -> str:
    """Send one request and hang up after `cut_s`, if it has not been answered by then."""
    has_head = False
    async with limit:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(cut_s):
                async with session.post("/v1/completions", json=body) as reply:
                    has_head = True
                    text = await reply.text()
                    is_whole = reply.status == 200 and _is_whole(text, body["stream"])
                    return "answered" if is_whole else f"{reply.status} {text[-300:]}"
        return "cut" if has_head else "cut before its head"


def _is_whole(text: str, is_stream: bool) -> bool:
    """Whether the answer ended as it should. Its events are parsed, for the model may write "error" or "[DONE]"."""
    events = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    if is_stream and events[-1:] != ["[DONE]"]:
        return False
    parts = [json.loads(event) for event in (events[:-1] if is_stream else [text])]
    return bool(parts) and all("choices" in part and "error" not in part for part in parts)


def _assert_every_key_expires(cluster: Any) -> None:
    client = redis.Redis.from_url(cluster.redis.url, decode_responses=True)
    try:
        keys = list(client.scan_iter("*"))
        assert keys
        assert [key for key in keys if client.pttl(key) == -1] == []  # -2 is of a key that has just ended
    finally:
        client.close()
