"""Decode steps captured once and replayed: a launch of the whole step instead of hundreds of small ones.

A graph has fixed shapes and addresses. So a step of one token a sequence is padded to a bucket of sequences and of
context, its numbers are copied into the bucket's own tensors, and the graph of that bucket is replayed. Rows of padding
write nothing and attend to nothing. What fits no bucket is not replayed: the caller runs it as any other step.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.engine.kv_cache import KVCache
from pdserve.engine.model_input import ModelInput
from pdserve.engine.models.decoder import Decoder
from pdserve.kernels.decode_attention import DecodeBatch
from pdserve.kernels.triton.operations import SpanLayout

Compute = Callable[[], object]
_NOT_WRITTEN = -1  # the slot of a row of padding
_MOST_SEQS = 256  # above, a step computes long enough to hide its launches
_SHORTER_CONTEXTS = (2048, 16384)  # so that short ones are not split as if they were the longest


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """What a graph has room for."""

    context_len: int
    num_seqs: int


def all_buckets(max_num_seqs: int, max_model_len: int) -> tuple[Bucket, ...]:
    """Return every bucket, the smallest context first and in it the fewest sequences."""
    most = min(max_num_seqs, _MOST_SEQS)
    sizes = {1, 2, 4, *range(8, 65, 8), *range(80, _MOST_SEQS + 1, 16), most}
    contexts = {*_SHORTER_CONTEXTS, max_model_len}
    return tuple(
        Bucket(context_len, num_seqs)
        for context_len in sorted(contexts)
        if context_len <= max_model_len
        for num_seqs in sorted(sizes)
        if num_seqs <= most
    )


def bucket_of(model_input: ModelInput, buckets: tuple[Bucket, ...], rope_limit: int | None) -> Bucket | None:
    """Return the smallest bucket for a step; None if it is no plain decode step, or none is large enough.

    Beyond `rope_limit` tokens rotations depend on the length, which a graph cannot follow.
    """
    spans = model_input.spans
    if not spans or model_input.scored_rows or any(span.query_len != 1 for span in spans):
        return None
    if rope_limit is not None and int(model_input.rope_lengths.max()) > rope_limit:
        return None
    longest = max(span.context_len for span in spans)
    return next((each for each in buckets if each.context_len >= longest and each.num_seqs >= len(spans)), None)


class BucketInput:
    """The tensors that a bucket's graph reads, and their mirror on the host, from which they are filled."""

    def __init__(self, bucket: Bucket, block_size: int, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        most_blocks = -(-bucket.context_len // block_size)
        # token ids, positions, slots, context lengths
        self._host_rows = torch.zeros((4, bucket.num_seqs), dtype=torch.int64, pin_memory=is_gpu)
        self._host_tables = torch.zeros((bucket.num_seqs, most_blocks), dtype=torch.int32, pin_memory=is_gpu)
        self._rows = torch.zeros_like(self._host_rows, device=device)
        self._tables = torch.zeros_like(self._host_tables, device=device)
        self._rows[2] = self._host_rows[2] = _NOT_WRITTEN
        token_ids, positions, slots, context_lens = self._rows.unbind(0)
        self.model_input = ModelInput(
            token_ids=token_ids,
            positions=positions,
            rope_lengths=torch.ones(bucket.num_seqs, dtype=torch.int64),
            slot_mapping=slots,
            spans=(),
            sample_rows=torch.arange(bucket.num_seqs, device=device),
            layout=SpanLayout.of_decode(DecodeBatch(self._tables, context_lens, bucket.context_len)),
        )

    def fill(self, step: ModelInput) -> None:
        """Copy a step's numbers in; the rest becomes padding. The step is on the host; what was filled before is read
        no more."""
        num_seqs = len(step.spans)
        rows = self._host_rows
        rows[0, :num_seqs] = step.token_ids
        rows[1, :num_seqs] = step.positions
        rows[2, :num_seqs] = step.slot_mapping
        rows[3, :num_seqs] = torch.tensor([span.context_len for span in step.spans])
        rows[:, num_seqs:] = 0
        rows[2, num_seqs:] = _NOT_WRITTEN
        for index, span in enumerate(step.spans):
            self._host_tables[index, : len(span.block_table)] = span.block_table
        self._rows.copy_(rows, non_blocking=True)
        self._tables.copy_(self._host_tables, non_blocking=True)


class DecodeGraphs:
    """The graphs of one decoder over one cache; owns their inputs and the logits that they write."""

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        buckets: tuple[Bucket, ...],
        block_size: int,
        device: torch.device,
        capture: Callable[[Compute], Compute],
    ) -> None:
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._buckets = buckets
        self._block_size = block_size
        self._device = device
        self._capture = capture
        self._replays: dict[Bucket, tuple[BucketInput, Compute]] = {}
        most = max(bucket.num_seqs for bucket in buckets)
        self._logits = torch.zeros((most, decoder.config.vocab_size), device=device)

    def capture_all(self) -> None:
        """Capture every bucket, the largest first: what it takes of memory serves the others."""
        for bucket in reversed(self._buckets):
            self._captured(bucket)

    def run(self, step: ModelInput) -> Tensor | None:
        """Return the logits [num_sampled, vocab_size] of a step that is on the host; None if it fits no bucket.

        They are overwritten by the next step.
        """
        bucket = bucket_of(step, self._buckets, self._decoder.rotary.length_limit)
        if bucket is None or self._decoder.is_interrupted:
            return None
        bucket_input, replay = self._captured(bucket)
        bucket_input.fill(step)
        replay()
        num_seqs = len(step.spans)
        if len(step.sample_rows) == num_seqs and torch.equal(step.sample_rows, torch.arange(num_seqs)):
            return self._logits[:num_seqs]
        return self._logits[step.sample_rows.to(self._device)]

    def _captured(self, bucket: Bucket) -> tuple[BucketInput, Compute]:
        if bucket not in self._replays:
            bucket_input = BucketInput(bucket, self._block_size, self._device)

            def compute() -> None:
                hidden = self._decoder.forward(bucket_input.model_input, self._kv_cache)
                self._logits[: bucket.num_seqs] = self._decoder.logits(hidden)

            self._replays[bucket] = bucket_input, self._capture(compute)
        return self._replays[bucket]


def graph_capture(device: torch.device) -> Callable[[Compute], Compute]:
    """Return what captures a computation as a CUDA graph and returns its replay; all share one pool of memory.

    And one stream: torch keeps a workspace of cuBLAS's for each that has multiplied, 32 MiB on an H200, and a pool's
    memory is reused on the stream that it was taken on.
    """
    pool = torch.cuda.graph_pool_handle()
    beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # not annotated

    def capture(compute: Compute) -> Compute:
        beside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(beside):
            compute()  # kernels are compiled, and libraries set up, before anything is captured
        torch.cuda.current_stream(device).wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=beside):
            compute()
        return graph.replay

    return capture


def without_capture(compute: Compute) -> Compute:
    """Compute anew each time: what a replay does where there are no graphs."""
    return compute
