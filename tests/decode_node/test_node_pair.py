"""A prefill and a decode worker over real sockets in one process, with a tiny model: hand-over and conservation."""

import asyncio
import random
import secrets
import threading
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import zmq.asyncio

from pdserve.control.channel import ControlClient, ControlServer
from pdserve.control.messages import (
    CancelTask,
    DecodeTask,
    Fork,
    GenerationTask,
    NodeInfo,
    NodeRole,
    Ping,
    PrefillTask,
    TaskFailed,
    TokenBatch,
    TokenChunk,
)
from pdserve.control.node_config import NodeConfig
from pdserve.control.node_host import HostLimits, NodeHost, RunTask
from pdserve.control.node_reports import kv_layout, node_info, node_load
from pdserve.decode_node.config import DecodeNodeConfig
from pdserve.decode_node.decode_worker import DecodeWorker
from pdserve.engine.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.engine.engine_thread import EngineThread
from pdserve.engine.model_input import ModelInput
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.sequence import SequenceSpec
from pdserve.kvtransfer.config import ReceiverConfig, SenderConfig
from pdserve.kvtransfer.curve_keys import CurveKeys, generate_keys
from pdserve.kvtransfer.receiver import BlockReceiver
from pdserve.kvtransfer.sender import BlockSender
from pdserve.prefill_node.prefill_worker import PrefillWorker

_NODE = NodeConfig(node_id="node", redis_url="redis://unused")
_LIMITS = HostLimits(max_tasks=64, gateway_lease_s=30.0)
_BLOCK_SIZE = 4


class Ear:
    """A gateway's end of one channel that hears one thing at a time, chunks of tokens too."""

    def __init__(self, client: ControlClient) -> None:
        self.send = client.send
        self._client = client
        self._heard: deque[Any] = deque()

    async def recv(self) -> Any:
        if not self._heard:
            message = await self._client.recv()
            self._heard.extend(message.chunks if isinstance(message, TokenBatch) else (message,))
        return self._heard.popleft()


@dataclass
class Pair:
    """Both nodes and a gateway's end of the channel to each."""

    prefill: EngineThread
    decode: EngineThread
    sender: BlockSender
    receiver: BlockReceiver
    decode_info: NodeInfo
    to_prefill: Ear
    to_decode: Ear

    def prefill_task(self, task: GenerationTask, transfer_id: str) -> PrefillTask:
        info = self.decode_info
        assert info.transfer_endpoint is not None
        return PrefillTask(task, transfer_id, info.transfer_endpoint, info.node_id, info.incarnation)

    async def held(self) -> dict[str, int]:
        """Everything that must return to zero."""
        counts = {"sending": self.sender.counts().open, "receiving": self.receiver.counts().open}
        for name, thread in (("prefill", self.prefill), ("decode", self.decode)):
            usage = await thread.call(lambda engine: engine.pool.usage())
            counts |= {f"{name} in use": usage.in_use, f"{name} in flight": usage.in_flight}
            counts[f"{name} sequences"] = await thread.call(lambda engine: engine.scheduler.num_sequences)
            await thread.call(lambda engine: engine.scheduler.check_integrity())
        return {name: count for name, count in counts.items() if count}

    async def wait_nothing_held(self) -> None:
        held: dict[str, int] = {}
        try:
            async with asyncio.timeout(60):
                while held := await self.held():  # each look is a round trip through both device threads
                    pass
        except TimeoutError:
            raise AssertionError(f"still held: {held}") from None


@pytest.fixture
async def pair(tiny_model: Any) -> AsyncIterator[Pair]:
    async with _pair(tiny_model) as running:
        yield running


@asynccontextmanager
async def _pair(
    tiny_model: Any,
    prefill_keys: CurveKeys | None = None,
    decode_keys: CurveKeys | None = None,
    prefill_options: dict[str, Any] | None = None,
    wire_dtype: str = "auto",
    shared_memory: str = "auto",
    offer_timeout_s: float = 30.0,
    room_timeout_s: float = 30.0,
    **decode_options: Any,
) -> AsyncIterator[Pair]:
    context = zmq.asyncio.Context()
    try:
        async with (
            EngineThread.start(
                _engine(tiny_model, **{"max_num_batched_tokens": 8, **(prefill_options or {})})
            ) as prefill,
            EngineThread.start(_engine(tiny_model, **decode_options)) as decode,
        ):
            config = DecodeNodeConfig(
                node=_NODE, engine=_config(tiny_model), offer_timeout_s=offer_timeout_s, room_timeout_s=room_timeout_s
            )
            decoder = DecodeWorker(decode, config)
            identity = {"node_id": "node", "incarnation": "first"}
            incoming, outgoing = (
                ReceiverConfig(curve=decode_keys),
                SenderConfig(
                    curve=prefill_keys, wire_dtype=wire_dtype, shared_memory=shared_memory, handshake_timeout_s=30.0
                ),
            )
            sender_identity = {"node_id": "sender", "incarnation": "first"}
            async with (
                BlockReceiver.bind(
                    context, **identity, layout=kv_layout(decode), sink=decoder, config=incoming
                ) as receiver,
                BlockSender(context, **sender_identity, layout=kv_layout(prefill), config=outgoing) as sender,
                asyncio.TaskGroup() as group,
            ):
                prefiller = PrefillWorker(prefill, sender, 60.0)
                decode_server = ControlServer.bind(context, "tcp://127.0.0.1:0")
                prefill_server = ControlServer.bind(context, "tcp://127.0.0.1:0")
                info = node_info(
                    _NODE,
                    NodeRole.DECODE,
                    decode,
                    incarnation="first",
                    control_endpoint=decode_server.endpoint,
                    transfer_endpoint=receiver.endpoint,
                )
                tasks = [
                    group.create_task(_host(prefill_server, info, prefill, sender, prefiller.run).serve()),
                    group.create_task(
                        _host(
                            decode_server, info, decode, receiver, lambda task, out: decoder.run(task, out, receiver)
                        ).serve()
                    ),
                ]
                clients = [ControlClient.connect(context, s.endpoint) for s in (prefill_server, decode_server)]
                tasks += [group.create_task(client.watch()) for client in clients]
                yield Pair(prefill, decode, sender, receiver, info, *map(Ear, clients))
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                for closing in (*clients, prefill_server, decode_server):
                    closing.close()
    finally:
        context.destroy(linger=0)


def _config(tiny_model: Any, **options: Any) -> EngineConfig:
    defaults = {"block_size": _BLOCK_SIZE, "num_blocks": 64}
    return EngineConfig(model_dir=tiny_model(), **{**defaults, **options})


def _engine(tiny_model: Any, **options: Any) -> Engine:
    return Engine.load(_config(tiny_model, **options))


def _host(
    server: ControlServer, info: NodeInfo, engine: EngineThread, mover: BlockSender | BlockReceiver, run: RunTask
) -> NodeHost:
    return NodeHost(server, info, lambda draining: node_load(engine, mover.counts(), draining), run, _LIMITS)


def _task(attempt_id: str, num_prompt: int = 11, max_tokens: int = 6, salt: str = "") -> GenerationTask:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=3, ignore_eos=True)
    prompt = tuple(5 + (7 * index) % 150 for index in range(num_prompt))
    return GenerationTask(attempt_id, attempt_id, prompt, (), sampling, salt, 120.0)


async def _first_of(client: Ear, kind: type[Any], attempt_id: str) -> Any:
    async with asyncio.timeout(50):
        while True:
            message = await client.recv()
            if isinstance(message, kind) and message.attempt_id == attempt_id:
                return message


async def _tokens(client: Ear, attempt_id: str) -> list[int]:
    token_ids: list[int] = []
    while True:
        chunk: TokenChunk = await _first_of(client, TokenChunk, attempt_id)
        token_ids += chunk.token_ids
        if chunk.finish_reason is not None:
            return token_ids


async def _alone(pair: Pair, task: GenerationTask) -> list[int]:
    """The tokens of the decode node's own engine, computed from scratch."""
    token_ids = []
    spec = SequenceSpec("alone", task.prompt_token_ids, task.sampling, salt=secrets.token_hex(4))
    async with pair.decode.computing(spec) as (stream,):
        while True:
            output = await stream.next()
            if output.token is not None:
                token_ids.append(output.token.token_id)
            if output.finish_reason is not None:
                return [token_id for token_id in token_ids if token_id is not None]


@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 8, 29])
@pytest.mark.parametrize("offer_first", [True, False])
async def test_hand_over_in_either_order(pair: Pair, num_prompt: int, offer_first: bool) -> None:
    task = _task("a", num_prompt)
    sends = [
        lambda: pair.to_prefill.send(pair.prefill_task(task, "t")),
        lambda: pair.to_decode.send(DecodeTask(task, "t")),
    ]
    for send in sends if offer_first else reversed(sends):
        send()

    first: TokenChunk = await _first_of(pair.to_prefill, TokenChunk, "a")
    rest = await _tokens(pair.to_decode, "a")

    assert (first.start, first.num_cached_tokens) == (0, 0)
    assert [*first.token_ids, *rest] == await _alone(pair, task)
    await pair.wait_nothing_held()


def _forked(attempt_id: str, count: int, **fields: Any) -> GenerationTask:
    task = _task(attempt_id, **fields)
    return replace(task, forks=tuple(Fork(f"{attempt_id}{index}", 50 + index) for index in range(1, count)))


async def _outputs(pair: Pair, attempt_ids: tuple[str, ...]) -> dict[str, dict[int, int]]:
    """The tokens of each branch by position, whichever node says them, until each has ended."""
    outputs: dict[str, dict[int, int]] = {attempt_id: {} for attempt_id in attempt_ids}
    unfinished = set(attempt_ids)
    receiving = {asyncio.ensure_future(client.recv()): client for client in (pair.to_prefill, pair.to_decode)}
    async with asyncio.timeout(50):
        while unfinished:
            done, _ = await asyncio.wait(receiving, return_when=asyncio.FIRST_COMPLETED)
            for ready in done:
                client = receiving.pop(ready)
                receiving[asyncio.ensure_future(client.recv())] = client
                message = ready.result()
                assert not isinstance(message, TaskFailed), message
                if isinstance(message, TokenChunk) and message.attempt_id in outputs:
                    outputs[message.attempt_id].update(enumerate(message.token_ids, message.start))
                    if message.finish_reason is not None:
                        unfinished.discard(message.attempt_id)
    for waiting in receiving:
        waiting.cancel()
    await asyncio.gather(*receiving, return_exceptions=True)
    return outputs


async def _alone_each(pair: Pair, task: GenerationTask) -> dict[str, dict[int, int]]:
    seeds = {task.attempt_id: task.sampling.seed, **{fork.attempt_id: fork.seed for fork in task.forks}}
    return {
        attempt_id: dict(enumerate(await _alone(pair, replace(task, sampling=replace(task.sampling, seed=seed)))))
        for attempt_id, seed in seeds.items()
    }


@pytest.mark.parametrize("num_prompt", [8, 11])
async def test_branches_are_one_prompt_and_one_transfer(pair: Pair, num_prompt: int) -> None:
    task = _forked("a", 4, num_prompt=num_prompt)
    pair.to_decode.send(DecodeTask(task, "t"))
    pair.to_prefill.send(pair.prefill_task(task, "t"))

    outputs = await _outputs(pair, task.attempt_ids)

    assert outputs == await _alone_each(pair, task)
    counts = pair.receiver.counts()
    assert (counts.completed, pair.sender.counts().blocks_sent) == (1, -(-num_prompt // _BLOCK_SIZE))
    await pair.wait_nothing_held()


async def test_branches_of_a_local_task_share_their_prompt(pair: Pair) -> None:
    task = _forked("a", 3)
    pair.to_decode.send(DecodeTask(task, None))

    assert await _outputs(pair, task.attempt_ids) == await _alone_each(pair, task)
    await pair.wait_nothing_held()


@pytest.mark.parametrize("cancelled", [("a",), ("a1",), ("a", "a2")])
@pytest.mark.parametrize("is_late", [False, True])
async def test_cancelled_branch_leaves_the_others(pair: Pair, cancelled: tuple[str, ...], is_late: bool) -> None:
    task = _forked("a", 3, max_tokens=40)
    wanted = tuple(attempt_id for attempt_id in task.attempt_ids if attempt_id not in cancelled)
    pair.to_decode.send(DecodeTask(task, "t"))
    pair.to_prefill.send(pair.prefill_task(task, "t"))
    if is_late:
        await _first_of(pair.to_decode, TokenChunk, cancelled[0])
    for client in (pair.to_prefill, pair.to_decode):
        for attempt_id in cancelled:
            client.send(CancelTask(attempt_id, "test"))

    outputs = await _outputs(pair, wanted)

    alone = await _alone_each(pair, task)
    for attempt_id in wanted:
        assert outputs[attempt_id].items() <= alone[attempt_id].items()  # where it is late, some were heard above
        assert is_late or outputs[attempt_id] == alone[attempt_id]
        assert max(outputs[attempt_id]) == 39
    await pair.wait_nothing_held()


async def test_second_prompt_moves_only_what_is_missing(pair: Pair) -> None:
    for number, length in enumerate((16, 19)):
        task = _task(f"a{number}", length)
        pair.to_decode.send(DecodeTask(task, f"t{number}"))
        pair.to_prefill.send(pair.prefill_task(task, f"t{number}"))
        await _tokens(pair.to_decode, f"a{number}")

    counts = pair.sender.counts()
    assert (counts.blocks_sent, counts.blocks_skipped) == (4 + 1, 4)
    assert counts.bytes_sent == 5 * kv_layout(pair.prefill).block_size_bytes


async def _hand_over(pair: Pair, number: int, task: GenerationTask) -> list[int]:
    pair.to_decode.send(DecodeTask(task, f"t{number}"))
    pair.to_prefill.send(pair.prefill_task(task, f"t{number}"))
    first: TokenChunk = await _first_of(pair.to_prefill, TokenChunk, task.attempt_id)
    return [*first.token_ids, *await _tokens(pair.to_decode, task.attempt_id)]


async def test_a_prompt_mostly_shared_moves_what_is_new_and_a_part_of_a_block(pair: Pair) -> None:
    cold, warm = _task("a0", 80), _task("a1", 90)
    warm = replace(warm, prompt_token_ids=cold.prompt_token_ids[:72] + warm.prompt_token_ids[72:79])
    moved = [0]
    for number, task in enumerate((cold, warm)):
        token_ids = await _hand_over(pair, number, task)
        assert token_ids == await _alone(pair, task)
        moved.append(pair.sender.counts().bytes_sent)

    cold_bytes, warm_bytes = moved[1], moved[2] - moved[1]
    assert cold_bytes == 20 * kv_layout(pair.prefill).block_size_bytes
    assert 0 < warm_bytes <= 0.15 * cold_bytes


@pytest.mark.parametrize("num_prompt", [8, 30, 31])
async def test_no_token_of_a_prompt_is_computed_twice(pair: Pair, num_prompt: int) -> None:
    computed: dict[str, int] = {}
    for name, thread in (("prefill", pair.prefill), ("decode", pair.decode)):
        _count_computed(await thread.call(lambda engine: engine), name, computed)

    await _hand_over(pair, 0, _task("a", num_prompt, max_tokens=6))

    assert computed == {"prefill": num_prompt, "decode": 5}  # the last token sampled is never computed


def _count_computed(engine: Engine, name: str, computed: dict[str, int]) -> None:
    run = engine._runner.run

    def counting(model_input: ModelInput, *rest: Any) -> Any:
        computed[name] = computed.get(name, 0) + len(model_input.token_ids)
        return run(model_input, *rest)

    engine._runner.run = counting  # type: ignore[method-assign]  # the model still runs; it is watched


@pytest.mark.parametrize("num_prompt", [64, 62])
async def test_every_layer_of_a_chunk_arrives_before_its_step_has_ended(tiny_model: Any, num_prompt: int) -> None:
    async with _pair(tiny_model, prefill_options={"max_num_batched_tokens": 64}, shared_memory="never") as pair:
        engine = await pair.prefill.call(lambda engine: engine)
        have_arrived = threading.Event()
        run = engine._runner.run

        def wait_for_arrival(*arguments: Any) -> Any:
            logits = run(*arguments)
            assert have_arrived.wait(50), "the step would have to end first"
            return logits

        engine._runner.run = wait_for_arrival  # type: ignore[method-assign]  # the model still runs; it is watched
        task = _task("a", num_prompt)
        watching = asyncio.create_task(_watch_arrival(pair, 16, have_arrived))
        token_ids = await _hand_over(pair, 0, task)
        await watching

        counts = pair.receiver.counts()
        assert counts.bytes_received == 16 * kv_layout(pair.prefill).block_size_bytes
        assert counts.completed == 1
        assert token_ids == await _alone(pair, task)
        await pair.wait_nothing_held()


@pytest.mark.parametrize("num_prompt", [64, 62])
async def test_small_blocks_leave_whole_where_memory_is_shared(tiny_model: Any, num_prompt: int) -> None:
    async with _pair(tiny_model, prefill_options={"max_num_batched_tokens": 64}, shared_memory="always") as pair:
        engine = await pair.prefill.call(lambda engine: engine)
        nums_sent: list[int] = []
        run = engine._runner.run

        def note_sent(*arguments: Any) -> Any:
            logits = run(*arguments)
            nums_sent.append(pair.sender.counts().bytes_sent)
            return logits

        engine._runner.run = note_sent  # type: ignore[method-assign]  # the model still runs; it is watched
        task = _task("a", num_prompt)
        token_ids = await _hand_over(pair, 0, task)

        assert nums_sent == [0]
        num_bytes = 16 * kv_layout(pair.prefill).block_size_bytes
        assert (pair.receiver.counts().bytes_received, pair.receiver.counts().bytes_shared) == (num_bytes, num_bytes)
        assert token_ids == await _alone(pair, task)
        await pair.wait_nothing_held()


async def _watch_arrival(pair: Pair, num_blocks: int, have_arrived: threading.Event) -> None:
    async with asyncio.timeout(50):
        while pair.receiver.counts().bytes_received < num_blocks * kv_layout(pair.prefill).block_size_bytes:
            await pair.decode.call(lambda engine: None)  # a round trip through the thread that lands them
    have_arrived.set()


async def test_first_token_that_ends_the_sequence_involves_no_hand_over(pair: Pair) -> None:
    task = _task("a", max_tokens=1)
    pair.to_decode.send(DecodeTask(task, "t"))
    pair.to_prefill.send(pair.prefill_task(task, "t"))

    chunk: TokenChunk = await _first_of(pair.to_prefill, TokenChunk, "a")

    assert chunk.finish_reason is not None
    await pair.wait_nothing_held()
    assert pair.receiver.counts().completed == 0


@pytest.mark.parametrize("max_tokens", [0, 4])
async def test_scored_prompt_is_scored_where_it_is_computed(pair: Pair, max_tokens: int) -> None:
    """C063, C078: twice, so that the second finds both caches warm."""
    scores = []
    for number in range(2):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0, ignore_eos=True, prompt_logprobs=1)
        task = replace(_task(f"a{number}", 11), sampling=sampling)
        pair.to_decode.send(DecodeTask(task, f"t{number}"))
        pair.to_prefill.send(pair.prefill_task(task, f"t{number}"))

        first: TokenChunk = await _first_of(pair.to_prefill, TokenChunk, f"a{number}")
        rest = await _tokens(pair.to_decode, f"a{number}") if max_tokens else []

        assert len(first.token_ids) + len(rest) == max_tokens
        assert (first.finish_reason is not None) == (max_tokens == 0)
        assert first.prompt_logprobs is not None and len(first.prompt_logprobs) == 10
        scores.append([entry.logprob for entry in first.prompt_logprobs])
    assert scores[1] == pytest.approx(scores[0], abs=1e-4)
    await pair.wait_nothing_held()


async def test_request_that_bans_every_token_is_told_so(pair: Pair) -> None:
    """C062."""
    sampling = SamplingParams(max_tokens=4, min_tokens=2, seed=0, allowed_token_ids=(7,), stop_token_ids=(7,))
    task = replace(_task("a"), sampling=sampling)
    pair.to_decode.send(DecodeTask(task, "t"))
    pair.to_prefill.send(pair.prefill_task(task, "t"))

    failed: TaskFailed = await _first_of(pair.to_prefill, TaskFailed, "a")

    assert failed.code == "invalid_request" and not failed.retryable
    await pair.wait_nothing_held()


async def test_task_whose_offer_never_comes_fails_and_frees_its_slots(tiny_model: Any) -> None:
    async with _pair(tiny_model, offer_timeout_s=0.5) as pair:
        pair.to_decode.send(DecodeTask(_task("a"), "t"))

        failed: TaskFailed = await _first_of(pair.to_decode, TaskFailed, "a")

        assert (failed.code, failed.retryable) == ("transfer_failed", True)
        await pair.wait_nothing_held()


async def test_offer_whose_task_never_comes_is_refused_and_frees_the_prompt(tiny_model: Any) -> None:
    async with _pair(tiny_model, offer_timeout_s=0.5) as pair:
        pair.to_prefill.send(pair.prefill_task(_task("a"), "t"))

        failed: TaskFailed = await _first_of(pair.to_prefill, TaskFailed, "a")

        assert (failed.code, failed.retryable) == ("transfer_failed", True)
        await pair.wait_nothing_held()


async def test_offer_for_another_prompt_is_refused(pair: Pair) -> None:
    pair.to_decode.send(DecodeTask(_task("a", salt="tenant-1"), "t"))
    pair.to_prefill.send(pair.prefill_task(_task("a", salt="tenant-2"), "t"))

    failed: TaskFailed = await _first_of(pair.to_decode, TaskFailed, "a")

    assert failed.code == "transfer_failed" and "wrong_blocks" in failed.message
    await pair.wait_nothing_held()


async def test_prompt_that_never_fits_is_refused_by_both(pair: Pair) -> None:
    """C143: a prompt over the limit is an error of the request, not a decode of garbage."""
    task = _task("a", num_prompt=4 * 64)
    pair.to_decode.send(DecodeTask(task, "t"))
    pair.to_prefill.send(pair.prefill_task(task, "t"))

    for client in (pair.to_prefill, pair.to_decode):
        failed: TaskFailed = await _first_of(client, TaskFailed, "a")
        assert (failed.code, failed.retryable) == ("invalid_request", False)
    await pair.wait_nothing_held()


async def test_task_for_the_other_role_is_refused(pair: Pair) -> None:
    pair.to_decode.send(pair.prefill_task(_task("a"), "t"))

    failed: TaskFailed = await _first_of(pair.to_decode, TaskFailed, "a")

    assert failed.code == "invalid_request"


async def test_nodes_that_share_a_key_hand_over(tiny_model: Any) -> None:
    keys = generate_keys()
    async with _pair(tiny_model, keys, keys) as pair:
        task = _task("a")
        pair.to_decode.send(DecodeTask(task, "t"))
        pair.to_prefill.send(pair.prefill_task(task, "t"))

        first: TokenChunk = await _first_of(pair.to_prefill, TokenChunk, "a")
        rest = await _tokens(pair.to_decode, "a")

        assert [*first.token_ids, *rest] == await _alone(pair, task)
        await pair.wait_nothing_held()


@pytest.mark.parametrize(
    ("kv_dtype", "block_sizes"),
    [("float32", (4, 8)), ("int8", (4, 8)), ("int8", (8, 4)), ("int8", (12, 8)), ("bfloat16", (4, 16))],
    ids=str,
)
async def test_nodes_of_other_block_sizes_change_no_token(
    tiny_model: Any, kv_dtype: str, block_sizes: tuple[int, int]
) -> None:
    """Only what is missing travels, counted in the decode node's blocks: a prompt that another begins with."""
    prefill_options = {"kv_cache_dtype": kv_dtype, "block_size": block_sizes[0]}
    async with _pair(
        tiny_model, prefill_options=prefill_options, kv_cache_dtype=kv_dtype, block_size=block_sizes[1]
    ) as pair:
        for number, length in enumerate((33, 49)):
            task = _task(f"a{number}", length)
            pair.to_decode.send(DecodeTask(task, f"t{number}"))
            pair.to_prefill.send(pair.prefill_task(task, f"t{number}"))
            first: TokenChunk = await _first_of(pair.to_prefill, TokenChunk, f"a{number}")
            rest = await _tokens(pair.to_decode, f"a{number}")
            assert [*first.token_ids, *rest] == await _alone(pair, task)
        counts, size = pair.sender.counts(), block_sizes[1]
        await pair.wait_nothing_held()

    num_shared = 33 // size
    assert (counts.blocks_sent, counts.blocks_skipped) == (-(-33 // size) + -(-49 // size) - num_shared, num_shared)
    assert counts.blocks_converted == counts.blocks_sent


@pytest.mark.parametrize(("decode_dtype", "wire_dtype"), [("int8", "auto"), ("float32", "int8")])
async def test_float32_prefill_for_an_int8_cache_or_over_an_int8_wire(
    tiny_model: Any, decode_dtype: str, wire_dtype: str
) -> None:
    """The first token is the prefill node's own; the others see a prompt that was rounded once."""
    async with _pair(tiny_model, wire_dtype=wire_dtype, kv_cache_dtype=decode_dtype, block_size=8) as pair:
        task = _task("a", 33)
        pair.to_decode.send(DecodeTask(task, "t"))
        pair.to_prefill.send(pair.prefill_task(task, "t"))
        first: TokenChunk = await _first_of(pair.to_prefill, TokenChunk, "a")
        rest = await _tokens(pair.to_decode, "a")
        counts, layout = pair.sender.counts(), kv_layout(pair.decode)
        await pair.wait_nothing_held()

    assert len(first.token_ids) + len(rest) == 6
    assert counts.blocks_converted == counts.blocks_sent == 5
    assert counts.bytes_sent == 5 * replace(layout, dtype="int8").block_size_bytes


@pytest.mark.parametrize("who", ["prefill", "decode", "neither"])
async def test_nodes_that_do_not_share_a_key_fail_the_transfer_at_once(tiny_model: Any, who: str) -> None:
    ours = generate_keys()
    keys = {"prefill": (ours, None), "decode": (None, ours), "neither": (ours, generate_keys())}[who]
    async with _pair(tiny_model, *keys) as pair:
        pair.to_prefill.send(pair.prefill_task(_task("a"), "t"))

        failed: TaskFailed = await asyncio.wait_for(_first_of(pair.to_prefill, TaskFailed, "a"), 30)

        assert failed.code == "transfer_failed" and "keys" in failed.message
        await pair.wait_nothing_held()


async def test_random_cancels_leave_nothing_held(tiny_model: Any) -> None:
    """C141: sixty requests, each cancelled on one side, the other, both or neither, at a random moment."""
    chance = random.Random(11)
    # One side that is not cancelled waits in vain for the other, which here is to be over before any deadline.
    async with _pair(tiny_model, num_blocks=40, offer_timeout_s=4.0) as pair:

        async def run(number: int) -> None:
            task = _task(f"a{number}", chance.choice([1, 4, 9, 30]), chance.choice([1, 2, 12]))
            pair.to_decode.send(DecodeTask(task, f"t{number}"))
            pair.to_prefill.send(pair.prefill_task(task, f"t{number}"))
            await asyncio.sleep(chance.uniform(0, 0.2))
            for client in (pair.to_prefill, pair.to_decode):
                if chance.random() < 0.6:
                    client.send(CancelTask(task.attempt_id, "the test says so"))

        for start in range(0, 60, 12):
            await asyncio.gather(*(run(number) for number in range(start, start + 12)))
        await pair.wait_nothing_held()
        pair.to_decode.send(Ping("gateway", 1))
        usage = await pair.decode.call(lambda engine: engine.pool.usage())
        assert usage.free + usage.cached == usage.total
        assert "deadline" not in pair.sender.counts().failures | pair.receiver.counts().failures


async def test_a_cancel_while_the_reservation_waits_for_room_ends_the_transfer_at_once(tiny_model: Any) -> None:
    """C141: neither node holds anything until a deadline because the other one's task has gone."""
    async with _pair(tiny_model, num_blocks=8, room_timeout_s=60.0) as pair:
        filling = SequenceSpec("filling", tuple(range(5, 32)), SamplingParams(temperature=0.0, max_tokens=1, seed=1))
        async with pair.decode.importing(filling) as (stream,):
            await asyncio.wait_for(stream.granted, 30)  # its blocks never come: seven of eight are taken
            task = _task("a")
            pair.to_decode.send(DecodeTask(task, "t"))
            pair.to_prefill.send(pair.prefill_task(task, "t"))
            async with asyncio.timeout(30):
                while pair.receiver.counts().open == 0:
                    await pair.decode.call(lambda engine: engine.pool.usage())

            pair.to_decode.send(CancelTask(task.attempt_id, "the test says so"))

            failed: TaskFailed = await _first_of(pair.to_prefill, TaskFailed, task.attempt_id)
            assert "cancelled" in failed.message
        await pair.wait_nothing_held()
        assert "deadline" not in pair.sender.counts().failures | pair.receiver.counts().failures


async def test_the_first_token_counts_at_both_nodes(pair: Pair) -> None:
    """C138, C139: a minimum above the prefill node's one token, penalties over the hand-over, all logprobs."""
    sampling = replace(
        _task("a").sampling, min_tokens=6, ignore_eos=False, presence_penalty=1.5, frequency_penalty=0.5, logprobs=2
    )
    task = replace(_task("a"), sampling=sampling)
    pair.to_decode.send(DecodeTask(task, "t"))
    pair.to_prefill.send(pair.prefill_task(task, "t"))

    first: TokenChunk = await _first_of(pair.to_prefill, TokenChunk, "a")
    chunks: list[TokenChunk] = [first]
    while chunks[-1].finish_reason is None:
        chunks.append(await _first_of(pair.to_decode, TokenChunk, "a"))

    tokens = [token_id for chunk in chunks for token_id in chunk.token_ids]
    assert tokens == await _alone(pair, task) and len(tokens) == 6
    assert all(chunk.logprobs is not None and len(chunk.logprobs) == len(chunk.token_ids) for chunk in chunks)
    await pair.wait_nothing_held()
