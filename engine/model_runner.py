"""Weights, device and KV cache: runs one batch. Knows no requests."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pdserve.engine.available_cores import num_available_cores
from pdserve.engine.block_pool import BlockId
from pdserve.engine.config import EngineConfig
from pdserve.engine.device import DeviceMemory, Place, block_memory
from pdserve.engine.errors import ModelError
from pdserve.engine.kv_cache import KVCache
from pdserve.engine.model_input import ModelInput, ScoredRows
from pdserve.engine.models.architectures import ARCHITECTURES
from pdserve.engine.models.decoder import Decoder, build_rotary
from pdserve.engine.models.decoder_config import DecoderConfig
from pdserve.engine.models.model_dir import ModelDir
from pdserve.engine.models.transformers_checks import AdaptedShape
from pdserve.engine.models.transformers_decoder import TransformersDecoder
from pdserve.engine.models.weights import WeightFiles, load_decoder_weights
from pdserve.engine.warm_up import largest_step, mixed_step
from pdserve.kernels.kv_rows import kv_torch_dtype
from pdserve.kernels.logit_edits import LogitEdits
from pdserve.kernels.operations import Operations, choose_operations
from pdserve.kernels.sampling import RowRequest, RowSampler, sample_rows

if TYPE_CHECKING:  # needs triton, which is installed beside GPUs only
    from pdserve.engine.cuda_graphs import DecodeGraphs

logger = logging.getLogger(__name__)

_DEFAULT_KV_MEMORY_BYTES = 2 * 2**30  # on a CPU
_GRAPH_BYTES = 2**28  # a decode step's activations, and the graphs
_INVARIANT_PART = 512  # tokens
_MAX_SCORED_ROWS = 64  # 64 MiB of logits at 256k tokens of vocabulary


class ModelRunner:
    """Owns the decoder and the KV cache of one device."""

    def __init__(
        self,
        decoder: Decoder | TransformersDecoder,
        kv_cache: KVCache,
        num_blocks: int,
        max_model_len: int,
        place: Place,
    ) -> None:
        self._decoder = decoder
        self._place = place
        self._graphs: DecodeGraphs | None = None
        self.kv_cache = kv_cache
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len

    @classmethod
    def load(
        cls, config: EngineConfig, model_dir: ModelDir, on_progress: Callable[[int, int], None] | None = None
    ) -> "ModelRunner":
        """Read the weights and reserve the KV cache.

        Raises:
            InvalidRequest: there is no such device here.
            ModelError: the model is not supported, damaged, or its blocks do not fit the memory given.
        """
        place = Place.of(config.device)
        operations = choose_operations(
            config.dtype,
            config.num_threads or num_available_cores(),
            use_cpu_kernels=config.use_cpu_kernels,
            triton_device=place.device if place.uses_triton else None,
            is_batch_invariant=config.batch_invariant,
        )
        with _weights_fit(model_dir.name, place.device):
            decoder = _load_decoder(config, model_dir, place, operations, on_progress)
        shape = decoder.config
        max_model_len = min(config.max_model_len or shape.context_len, shape.context_len)
        cache_of = partial(_allocate, config, shape, place)
        num_blocks = config.num_blocks
        if num_blocks is None:
            smallest = cls(decoder, cache_of(1), 1, max_model_len, place)
            num_blocks = _num_blocks(config, smallest)
        runner = cls(decoder, cache_of(num_blocks), num_blocks, max_model_len, place)
        if place.is_gpu:
            runner.warm_up(config)
        if place.uses_triton and not config.enforce_eager:
            runner.capture_graphs(config)
        logger.info(
            "loaded %s as %s on %s, %d KV blocks of %s, %s",
            shape.model_type,
            config.dtype,
            place.device,
            num_blocks,
            config.resolved_kv_dtype,
            operations.description,
        )
        return runner

    @property
    def shape(self) -> DecoderConfig | AdaptedShape:
        """The decoder's shape."""
        return self._decoder.config

    def cache_salt(self, num_prompt_tokens: int) -> str:
        """Return what prefix sharing must be keyed by besides tokens and tenant."""
        return self._decoder.cache_salt(num_prompt_tokens)

    def interrupt(self) -> None:
        """Let a running step, and every later one, end at its next layer with StepInterrupted. From any thread."""
        self._decoder.is_interrupted = True

    @property
    def samples_on_device(self) -> bool:
        """Whether rows are sampled, and edited before, where the logits lie."""
        return self._place.uses_triton

    def row_sampler(self, on_host: RowSampler) -> RowSampler:
        """Return who samples from the logits; `on_host` does what can be done there only."""
        if not self.samples_on_device:
            return on_host
        from pdserve.kernels.triton.row_sampler import DeviceRowSampler

        return DeviceRowSampler(on_host)

    @property
    def is_on_gpu(self) -> bool:
        """Whether weights and cache lie in the memory of a GPU."""
        return self._place.is_gpu

    def measured_block_memory(self, config: EngineConfig) -> int:
        """Return the bytes that are left for KV blocks beside weights and the largest step, which is run to know.

        Raises:
            ModelError: there are none.
        """
        memory = DeviceMemory.measure(self._place.device, lambda: self.warm_up(config))
        reserved = _draft_bytes(config)
        if isinstance(self.shape, DecoderConfig) and not config.enforce_eager:
            reserved += graph_bytes(config, self.shape, self.max_model_len)
        return block_memory(config, memory, reserved)

    def warm_up(self, config: EngineConfig) -> None:
        """Run the largest step and sample from it, decode beside a chunk and copy a block, so that kernels are compiled
        and memory is had before the first request.

        It writes to block 0, which nobody holds yet.
        """
        num_tokens = min(config.max_num_batched_tokens, self.max_model_len)
        logits = self.run(largest_step(num_tokens, config.max_num_seqs, config.block_size))
        if self.samples_on_device:
            sample = self.row_sampler(sample_rows)
            for edits in (None, LogitEdits()):  # compiled apart
                sample(logits[:1], [RowRequest(edits=edits)])
        if self.max_model_len > 1:
            self.run(mixed_step(config.block_size))
        self.kv_cache.copy_blocks([(BlockId(0), BlockId(0))])

    def capture_graphs(self, config: EngineConfig) -> None:
        """Capture decode steps by size, where the decoder computes them without asking the device in between."""
        from pdserve.engine.cuda_graphs import DecodeGraphs, all_buckets, graph_capture, without_capture

        decoder, device = self._decoder, self._place.device
        if not isinstance(decoder, Decoder) or decoder.config.experts is not None:
            return
        buckets = all_buckets(config.max_num_seqs, self.max_model_len)
        with self._place.current(), torch.inference_mode():
            capture = graph_capture(device) if self._place.is_gpu else without_capture
            self._graphs = DecodeGraphs(decoder, self.kv_cache, buckets, config.block_size, device, capture)
            if self._place.is_gpu:
                self._graphs.capture_all()

    def run(
        self,
        model_input: ModelInput,
        on_scored: Callable[[ScoredRows, Tensor], None] | None = None,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:  # [num_sampled, vocab_size] float32, on the device
        """Compute all tokens, store their keys and values, return logits for the rows that are sampled.

        They are the caller's until the next step.

        `on_scored` is given the logits of scored rows, a few rows at a time: those of a whole prompt chunk over a large
        vocabulary would be as large as a model. `on_layer` is told how many layers have stored their keys and values.
        """
        with self._place.current(), torch.inference_mode():
            logits = None
            if self._graphs is not None and on_layer is None:
                logits = self._graphs.run(model_input)
            if logits is None:
                logits = self._run(model_input.to(self._place.device), on_scored, on_layer)
            self._place.settle()  # what is measured, sent or written next counts on the step being over
            return logits

    def _run(
        self,
        model_input: ModelInput,
        on_scored: Callable[[ScoredRows, Tensor], None] | None,
        on_layer: Callable[[int], None] | None,
    ) -> Tensor:
        hidden = self._decoder.forward(model_input, self.kv_cache, on_layer)
        if on_scored is not None:
            for part in (part for scored in model_input.scored_rows for part in scored.parts(_MAX_SCORED_ROWS)):
                rows = hidden[part.first_row : part.first_row + len(part.token_ids)]
                on_scored(part, self._decoder.logits(rows).cpu())
        return self._decoder.logits(hidden.index_select(0, model_input.sample_rows))


def has_own_decoder(model_impl: str, config: Mapping[str, Any]) -> bool:
    """Return whether pdserve's own decoder computes this model; transformers' code does otherwise."""
    return model_impl == "own" or (model_impl == "auto" and config.get("model_type") in ARCHITECTURES)


@contextmanager
def _weights_fit(name: str, device: torch.device) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:  # of a GPU
        raise ModelError(f"{name} does not fit the memory of {device}: {error}") from error


def _load_decoder(
    config: EngineConfig,
    model_dir: ModelDir,
    place: Place,
    operations: Operations,
    on_progress: Callable[[int, int], None] | None,
) -> Decoder | TransformersDecoder:
    dtype: torch.dtype = getattr(torch, config.compute_dtype)
    num_threads = config.num_threads or num_available_cores()
    if not has_own_decoder(config.model_impl, model_dir.config):
        if config.dtype == "int8":
            raise ModelError(f"int8 weights need pdserve's own decoder, which {model_dir.name} does not run through")
        torch.set_num_threads(num_threads)
        return TransformersDecoder.load(model_dir, dtype, operations, on_progress, place.device)
    # What compiled kernels leave to torch is small, and a second pool of threads would fight for the cores.
    torch.set_num_threads(1 if operations.has_own_threads else num_threads)
    shape = DecoderConfig.from_config(model_dir.config)
    files = WeightFiles.open(model_dir.path)
    weights = load_decoder_weights(files, shape, dtype, on_progress, operations, place.device)
    max_model_len = min(config.max_model_len or shape.context_len, shape.context_len)
    return Decoder(shape, weights, build_rotary(shape, max_model_len, place.device), operations)


def _allocate(config: EngineConfig, shape: DecoderConfig | AdaptedShape, place: Place, num_blocks: int) -> KVCache:
    size = (num_blocks, shape.num_layers, shape.num_kv_heads, config.block_size, shape.head_dim)
    dtype = kv_torch_dtype(config.resolved_kv_dtype)
    if not place.uses_triton:
        return KVCache.allocate(*size, dtype)
    try:
        return KVCache.allocate_on(place.device, *size, dtype)
    except RuntimeError as error:
        raise ModelError(f"{num_blocks} KV blocks do not fit the memory of {place.device}: {error}") from error


def _num_blocks(config: EngineConfig, runner: ModelRunner) -> int:
    """Return how many blocks the memory holds that is given, or that a GPU has left beside the largest step."""
    memory = config.kv_memory_bytes
    if memory is None:
        memory = runner.measured_block_memory(config) if runner.is_on_gpu else _DEFAULT_KV_MEMORY_BYTES
    block_bytes = runner.kv_cache.block_size_bytes
    num_blocks = memory // block_bytes
    if num_blocks < 1:
        raise ModelError(f"kv_memory_bytes={memory} holds no block: one block of this model is {block_bytes} bytes")
    return num_blocks


def graph_bytes(config: EngineConfig, shape: DecoderConfig, max_model_len: int) -> int:
    """Return about what captured decode steps keep: logits, a step's activations, and the parts of long contexts, of
    which there are many where they are of a fixed size."""
    logits = 4 * config.max_num_seqs * shape.vocab_size
    num_parts = -(-max_model_len // _INVARIANT_PART) if config.batch_invariant else 0
    return _GRAPH_BYTES + logits + 4 * config.max_num_seqs * num_parts * shape.num_heads * 2 * shape.head_dim


def _draft_bytes(config: EngineConfig) -> int:
    """Return what a draft model will take: its files and its blocks."""
    speculative = config.speculative_config
    if speculative is None or speculative.model is None:
        return 0
    files = WeightFiles.open(Path(speculative.model)).paths
    return speculative.draft_kv_memory_bytes + sum(path.stat().st_size for path in files)
