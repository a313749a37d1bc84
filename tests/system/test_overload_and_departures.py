"""More requests than there is room for, clients and gateways that leave, nodes that hang: nothing is lost, doubled or
kept. One installation with a tiny model and few blocks.
"""

import asyncio
import json
import random
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_PROMPT = [7 + i % 180 for i in range(40)]
_BLOCKS = ("--num-blocks", "48", "--num-threads", "1", "--max-num-batched-tokens", "64")
_REFUSALS = {"server_overloaded", "overloaded", "no_blocks"}


@pytest.fixture(scope="module")
def small(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory, running_cluster: Any) -> Iterator[Any]:
    with running_cluster(tmp_path_factory.mktemp("small"), tiny_model(), 1, 1, _BLOCKS) as cluster:
        yield cluster


class Reply:
    """What became of one request."""

    def __init__(self) -> None:
        self.status = 0
        self.code: str | None = None
        self.token_ids: list[int] = []
        self.finish_reasons: list[str] = []
        self.request_id = ""
        self.has_begun = asyncio.Event()  # its head is there
        self.is_decoding = asyncio.Event()  # a token of the decode node is there

    @property
    def num_terminal(self) -> int:
        return len(self.finish_reasons) + (self.code is not None)


async def _ask(
    session: aiohttp.ClientSession,
    seed: int,
    max_tokens: int,
    stream: bool = True,
    answer: Reply | None = None,
    **headers: str,
) -> Reply:
    body = {
        "model": "test",
        "prompt": [*_PROMPT, seed % 190],
        "max_tokens": max_tokens,
        "temperature": 1.0,
        "seed": seed,
        "stream": stream,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = answer or Reply()
    async with session.post("/v1/completions", json=body, headers=headers) as response:
        answer.status, answer.request_id = response.status, response.headers["X-Request-Id"]
        answer.has_begun.set()
        if response.status != 200 or not stream:
            _take(answer, await response.json())
            return answer
        async for line in response.content:
            data = line.removeprefix(b"data: ").strip()
            if data.startswith(b"{"):
                _take(answer, json.loads(data))
    return answer


def _take(answer: Reply, event: dict[str, Any]) -> None:
    if "error" in event:
        answer.code = event["error"]["code"]
        return
    for choice in event["choices"]:
        answer.token_ids += choice.get("token_ids") or []
        if choice["finish_reason"]:
            answer.finish_reasons.append(choice["finish_reason"])
    if len(answer.token_ids) > 1:
        answer.is_decoding.set()


def _begin(
    session: aiohttp.ClientSession, count: int, max_tokens: int
) -> "tuple[list[Reply], list[asyncio.Task[Reply]]]":
    answers = [Reply() for _ in range(count)]
    asked = [_ask(session, seed, max_tokens, answer=answer) for seed, answer in enumerate(answers)]
    return answers, [asyncio.ensure_future(each) for each in asked]


async def _any_decodes(answers: list[Reply]) -> None:
    waiting = [asyncio.ensure_future(answer.is_decoding.wait()) for answer in answers]
    done, others = await asyncio.wait(waiting, timeout=60, return_when=asyncio.FIRST_COMPLETED)
    for each in others:
        each.cancel()
    assert done, "none is decoding"


async def _idle(cluster: Any, timeout_s: float = 60.0) -> None:
    await asyncio.to_thread(cluster.wait_idle, timeout_s)


async def _metrics(session: aiohttp.ClientSession) -> dict[str, float]:
    """Return every sample of /metrics, read with Prometheus' own parser."""
    async with session.get("/metrics") as response:
        page = await response.text()
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            samples[f"{sample.name}{sorted(sample.labels.items())}"] = sample.value
    assert samples and not any(value != value for value in samples.values())
    return samples


async def test_300_at_once_at_few_blocks_end_in_an_answer_or_a_refusal(small: Any) -> None:
    """C126, C161, C163: as many replies as requests, no 500, no redis_unavailable, all blocks back."""
    before = small.status()["requests"]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(small.url, connector=connector) as session, asyncio.TaskGroup() as group:
        asked = [group.create_task(_ask(session, seed, 8, stream=seed % 2 == 0)) for seed in range(300)]
        while not all(task.done() for task in asked):
            await _metrics(session)
            await asyncio.wait(asked, timeout=0.2)

    replies = [task.result() for task in asked]
    told = Counter((reply.status, reply.code) for reply in replies)
    assert all(reply.num_terminal == 1 for reply in replies)
    assert {code for _, code in told} <= {None, *_REFUSALS}, told
    assert {status for status, _ in told} <= {200, 503}, told
    assert told[200, None] > 100, told
    assert all(len(reply.token_ids) == 8 for reply in replies if reply.code is None)
    await _idle(small)
    after = small.status()["requests"]
    assert after["finished"] - before["finished"] == told[200, None]


async def test_the_same_request_id_is_a_label_and_each_answer_its_own(small: Any) -> None:
    """C119."""
    async with aiohttp.ClientSession(small.url) as session:
        alone = [await _ask(session, seed, 20) for seed in range(2)]
        same = {"X-Request-Id": "same"}
        leaving = asyncio.ensure_future(_ask(session, 9, 300, **same))
        both = await asyncio.gather(*(_ask(session, seed, 20, **same) for seed in range(2)))
        leaving.cancel()

    assert [reply.request_id for reply in both] == ["same", "same"]
    assert [reply.token_ids for reply in both] == [reply.token_ids for reply in alone]
    await _idle(small)


async def test_clients_that_leave_at_any_moment_leave_nothing_behind(small: Any) -> None:
    """C121 to C125, C142."""
    before = small.status()["requests"]["cancelled"]
    randomness = random.Random(1)
    async with aiohttp.ClientSession(small.url) as session:
        for _ in range(4):
            asked = [asyncio.ensure_future(_ask(session, seed, 300, stream=seed % 3 > 0)) for seed in range(8)]
            for task in asked:
                await asyncio.wait((task,), timeout=randomness.uniform(0, 0.06))
                task.cancel()
            await asyncio.wait(asked)
        stayed = await _ask(session, 1, 20)

        await asyncio.to_thread(small.wait_until, lambda: small.status()["open_requests"] == 0, "none is open", 20)
        await _idle(small)
        assert stayed.finish_reasons == ["length"]
    assert small.status()["requests"]["cancelled"] > before


async def test_a_gateway_that_is_killed_is_forgotten_by_its_nodes_and_another_serves_at_once(small: Any) -> None:
    async with aiohttp.ClientSession(small.url) as session:
        answers, asked = _begin(session, 4, 400)
        await _any_decodes(answers)
        small.processes["decode-0"].send_signal(signal.SIGSTOP)  # or an answer could be whole before the gateway ends
        try:
            small.kill("gateway")
        finally:
            small.processes["decode-0"].send_signal(signal.SIGCONT)
        await asyncio.wait(asked)
    assert all(task.exception() is not None for task in asked)

    small.start_gateway()
    await asyncio.to_thread(small.wait_ready)
    async with aiohttp.ClientSession(small.url) as session:
        assert (await _ask(session, 1, 8)).finish_reasons == ["length"]
    await _idle(small)


@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
async def test_a_node_that_hangs_for_a_while_costs_time_but_no_token(small: Any, name: str) -> None:
    """C158, C159: ready says so within seconds, the process lives on, what was streamed goes on without a seam."""
    max_tokens = 400 if name == "decode-0" else 20
    async with aiohttp.ClientSession(small.url) as session:
        alone = [await _ask(session, seed, max_tokens) for seed in range(3)]
        answers, asked = _begin(session, 3, max_tokens)
        if name == "decode-0":
            await _any_decodes(answers)
        small.processes[name].send_signal(signal.SIGSTOP)
        try:
            if name == "decode-0":
                await asyncio.to_thread(small.wait_until, lambda: small.get("/ready")[0] == 503, "not ready", 60)
            assert small.get("/health")[0] == 200
            if name == "prefill-0":
                await asyncio.wait(asked)
        finally:
            small.processes[name].send_signal(signal.SIGCONT)
        replies = await asyncio.gather(*asked)

    assert [reply.num_terminal for reply in replies] == [1, 1, 1]
    assert [reply.token_ids for reply in replies] == [reply.token_ids for reply in alone]
    await asyncio.to_thread(small.wait_ready)
    await _idle(small)


async def test_a_gateway_that_is_told_to_stop_ends_every_stream_with_a_word(small: Any) -> None:
    """C162. Runs last: the gateway is started again for whoever comes after."""
    async with aiohttp.ClientSession(small.url) as session:
        answers, asked = _begin(session, 10, 440)
        await _any_decodes(answers)
        async with asyncio.timeout(60):
            await asyncio.gather(*(answer.has_begun.wait() for answer in answers))
        exit_code = await asyncio.to_thread(small.kill, "gateway", signal.SIGTERM)
        replies = await asyncio.gather(*asked)

    assert exit_code == 0
    assert [reply.num_terminal for reply in replies] == [1] * 10
    assert {reply.code for reply in replies} <= {None, "draining"}
    small.start_gateway()
    await asyncio.to_thread(small.wait_ready)
    await _idle(small)
