"""The load generator against a gateway: what it counts is what was served."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from pdserve.cli.errors import CliError
from pdserve.cli.load_client import LoadClient, Target
from pdserve.cli.load_plan import Arrivals, Lengths, closed_loop, open_loop
from pdserve.cli.load_report import Objectives, report_of
from pdserve.gateway.errors import GenerationFailed


async def test_every_token_of_a_closed_loop_is_counted(start_gateway: Callable) -> None:
    gateway = await start_gateway()
    gateway.say_ids([500], is_endless=True)
    plan = closed_loop(7, Lengths(prompt=20, output=9), 1)

    async with LoadClient.open(Target(gateway.url)) as client:
        records = await client.run(plan, concurrency=3)

    report = report_of(records, Objectives())
    assert (report.num_requests, report.num_failed, report.errors) == (7, 0, ())
    assert (report.prompt_tokens, report.output_tokens) == (7 * 20, 7 * 9)
    assert [sum(count for _, count in record.events) for record in records] == [9] * 7
    asked = [generation.request.prompt_token_ids for generation in gateway.source.started]
    assert sorted(map(tuple, asked)) == sorted(one.prompt for one in plan)
    assert all(generation.request.sampling.ignore_eos for generation in gateway.source.started)


async def test_an_open_loop_sends_while_earlier_requests_are_open(start_gateway: Callable) -> None:
    gateway = await start_gateway()
    gateway.say_ids([500], is_endless=True, chunk=4)
    plan = open_loop(closed_loop(5, Lengths(prompt=3, output=8), 1), 1_000.0, Arrivals.CONSTANT, 1)

    async with LoadClient.open(Target(gateway.url)) as client:
        records = await client.run(plan)

    assert [record.error for record in records] == [None] * 5
    assert [record.num_output for record in records] == [8] * 5
    assert [later.sent_at - earlier.sent_at for earlier, later in pairwise(records)] == pytest.approx(
        [0.001] * 4, abs=1e-6
    )


async def test_a_short_answer_and_a_broken_stream_are_failures(start_gateway: Callable) -> None:
    gateway = await start_gateway()
    plan = closed_loop(1, Lengths(prompt=3, output=8), 1)

    async with LoadClient.open(Target(gateway.url)) as client:
        gateway.say_ids([500, 501])
        [short] = await client.run(plan, concurrency=1)
        gateway.say_ids([500], is_endless=True, fail_after=2, failure=GenerationFailed("node_lost", "gone", True))
        [broken] = await client.run(plan, concurrency=1)
        gateway.say_ids([500], refusal=GenerationFailed("overloaded", "no node", True))
        [refused] = await client.run(plan, concurrency=1)

    assert short.error is not None and "8 were asked for" in short.error
    assert broken.error is not None and broken.error.startswith("error in the stream")
    assert refused.error is not None and refused.error.startswith("5")


async def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(CliError, match=r"127\.0\.0\.1:1"):
        async with LoadClient.open(Target("http://127.0.0.1:1")):
            raise AssertionError("opened")
