"""Scheduler, model and sampler in one loop step: `schedule` -> `run` -> `sample` -> `update`."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import xxhash
from torch import Tensor

from pdserve.engine.available_cores import num_available_cores
from pdserve.engine.block_pool import BlockId, BlockPool, BlockUsage
from pdserve.engine.block_tiers import BlockTiers, tier_limits
from pdserve.engine.config import EngineConfig
from pdserve.engine.device import on_device
from pdserve.engine.errors import GrammarFailed, InvalidRequest
from pdserve.engine.grammar_compiler import GrammarCompiler
from pdserve.engine.grammar_masks import GrammarMasks
from pdserve.engine.layer_progress import LayerWatch
from pdserve.engine.model_input import ModelInput, ScoredRows
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.models.model_dir import ModelDir
from pdserve.engine.prefix_tree import PrefixTree
from pdserve.engine.sampler import Sampler
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.scheduled_batch import ScheduledBatch
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.sequence import SequenceSpec
from pdserve.engine.speculator import SpeculationCounts, Speculator, make_speculator
from pdserve.engine.step_output import StepOutput, TokenScore
from pdserve.engine.swap_rule import SwapRule
from pdserve.engine.tier_moves import TierUsage
from pdserve.engine.tokenizer import Tokenizer
from pdserve.engine.verification import VerifiedStep, sample_verified
from pdserve.engine.weight_dtype import with_weight_dtype
from pdserve.kernels.cpu_sampling import choose_row_sampler

_LEAST_MEASURED_TOKENS = 32  # of a step, for the prefill rate


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What others need to know of the loaded model: shape of a block, limits and identity."""

    name: str
    digest: str
    tokenizer_digest: str
    revision: str | None  # of the hub's snapshot that it was loaded from
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    kv_dtype: str
    max_model_len: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A snapshot of how busy an engine is."""

    num_running: int
    num_waiting: int
    num_uncomputed_tokens: int
    num_preemptions: int
    prefill_tokens_per_s: float | None
    blocks: BlockUsage
    tiers: tuple[TierUsage, ...]
    num_swaps: int
    speculation: SpeculationCounts | None = None  # None where the engine never speculates


class Engine:
    """One model on one device, driven step by step by its owner; not thread-safe."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        sampler: Sampler,
        grammars: GrammarMasks,
        facts: ModelFacts,
        tiers: BlockTiers,
        speculator: Speculator | None = None,
    ) -> None:
        self._runner = runner
        self._grammars = grammars
        self._sampler = sampler
        self._speculator = speculator
        self.scheduler = scheduler
        self.facts = facts
        self.tiers = tiers
        self.pool: BlockPool = scheduler.pool
        self.layer_watch: LayerWatch | None = None  # set by who ships blocks while a step runs
        self._prefill_rate: float | None = None

    @classmethod
    def load(cls, config: EngineConfig, on_progress: Callable[[int, int], None] | None = None) -> "Engine":
        """Load the model of `config.model_dir` and set up an empty engine.

        Raises:
            ModelError: the model cannot be served; the text says why.
        """
        model_dir = ModelDir.open(config.model_dir)
        config = with_weight_dtype(on_device(config), model_dir.config)
        runner = ModelRunner.load(config, model_dir, on_progress)
        eos_ids = model_dir.eos_token_ids()
        pool = BlockPool(runner.num_blocks)
        limits = config.scheduling(runner.max_model_len)
        block_bytes = runner.kv_cache.block_size_bytes
        below = tier_limits(config, block_bytes)
        shape = runner.shape
        layout = (
            config.dtype,
            config.resolved_kv_dtype,
            config.block_size,
            shape.num_layers,
            shape.num_kv_heads,
            shape.head_dim,
        )
        digest = model_dir.digest()  # reads all weights once
        identity = "|".join(map(str, (digest, *layout)))
        tree = PrefixTree(pool, config.block_size, below, identity, logs=config.logs_cache_changes)
        scheduler = Scheduler(limits, pool, tree, config.block_size, eos_ids)
        scheduler.blocks.swap_rule = SwapRule(config.preemption_mode, block_bytes)
        tiers = BlockTiers.open(scheduler.blocks, runner.kv_cache, config, below, identity)
        facts = ModelFacts(
            name=model_dir.name,
            digest=_identity(digest, config.dtype),
            tokenizer_digest=model_dir.tokenizer_digest(),
            revision=model_dir.revision(),
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=config.block_size,
            dtype=config.dtype,
            kv_dtype=config.resolved_kv_dtype,
            max_model_len=scheduler.max_len,
            vocab_size=shape.vocab_size,
        )
        num_token_ids = min(model_dir.num_token_ids(), shape.vocab_size)
        grammars = GrammarMasks(
            lambda: GrammarCompiler(Tokenizer.load(config.model_dir), eos_ids), num_token_ids, eos_ids
        )
        answer = choose_row_sampler(config.num_threads or num_available_cores(), use_cpu_kernels=config.use_cpu_kernels)
        answer = runner.row_sampler(answer)
        sampler = Sampler(shape.vocab_size, num_token_ids, eos_ids, grammars, answer)
        speculator = make_speculator(config, scheduler)
        return cls(runner, scheduler, sampler, grammars, facts, tiers, speculator)

    def check(self, spec: SequenceSpec) -> None:
        """Check what `add` or the first sampling would refuse, and add nothing.

        Raises:
            InvalidRequest: it could never be computed here.
        """
        self.scheduler.check(self._admissible(spec))
        if spec.sampling.structured_outputs is not None:
            try:
                self._grammars.check(spec.sampling.structured_outputs)
            except GrammarFailed as error:
                raise InvalidRequest("structured_outputs", str(error)) from error

    def add(self, spec: SequenceSpec) -> None:
        """Queue a sequence to be computed here.

        Raises:
            InvalidRequest: it could never be computed here.
        """
        self.scheduler.add(self._admissible(spec), time.monotonic())

    def add_branches(self, specs: Sequence[SequenceSpec]) -> None:
        """Queue the branches of one prompt, which is computed once (see `Scheduler.add_branches`).

        Raises:
            InvalidRequest: one of them could never be computed here; none was added.
        """
        self.scheduler.add_branches([self._admissible(spec) for spec in specs], time.monotonic())

    def add_import(self, *specs: SequenceSpec) -> None:
        """Queue the branches of a prompt that arrives as blocks (see `Scheduler.add_import`).

        Raises:
            InvalidRequest: one of them could never be computed here; none was added.
        """
        self.scheduler.add_import(*(self._admissible(spec) for spec in specs))

    def land(self, seq_id: str, blocks: Sequence[tuple[int, memoryview]], start: int = 0) -> None:
        """Copy arrived blocks, by their index in the prompt, into the slots reserved for `seq_id`, from their byte
        `start` on."""
        table = self.scheduler.block_table(seq_id)
        if table is None:
            return
        self._runner.kv_cache.write_blocks([(table[index], payload) for index, payload in blocks], start)

    def land_heads(self, seq_id: str, heads: range, blocks: Sequence[tuple[int, memoryview]], start: int) -> None:
        """Copy some heads of arrived blocks to their places, as `land` does whole blocks; `start` is a byte of a block
        of these heads."""
        table = self.scheduler.block_table(seq_id)
        if table is not None:
            self._runner.kv_cache.write_heads([(table[index], payload) for index, payload in blocks], heads, start)

    def block_bytes(self, block_id: BlockId, num_blocks: int = 1) -> memoryview:
        """Return the memory of blocks with successive ids that the caller's sequence holds; full ones never change."""
        return self._runner.kv_cache.block_bytes(block_id, num_blocks)

    def block_runs(self, block_ids: Sequence[BlockId]) -> Iterator[tuple[int, memoryview]]:
        """Yield such blocks as (index of the first, memory) of each run that lies together; on a GPU as copies."""
        return self._runner.kv_cache.runs(block_ids)

    def step(self) -> list[StepOutput]:
        """Run one step and return the progress of every sequence in it: an output for each token.

        Sequences that waited too long end with it.
        """
        overdue = self.scheduler.expire(time.monotonic())
        batch = self._next_batch()
        if not batch.spans:
            return overdue
        started = time.monotonic()
        if batch.block_copies:
            self._runner.kv_cache.copy_blocks([(copy.source, copy.target) for copy in batch.block_copies])
        if self._speculator is not None:
            batch = self._speculator.with_drafts(batch)
            self.tiers.flush()  # room for drafts may have come from the cache
        verified, scores = self._compute(batch)
        seconds = time.monotonic() - started
        self._measure(batch, seconds)
        outputs = self.scheduler.update(verified.batch, verified.tokens, scores)
        self._forget_grammars(batch, outputs)
        if self._speculator is not None:
            self._speculator.settle(batch, verified, seconds)
        return overdue + outputs

    def commit_ahead(self, *, is_quiet: bool = True) -> bool:
        """Take a piece of the memory that the next blocks need; False when there is enough, of which half will do where
        it is not quiet. For idle moments."""
        next_block = self.pool.next_block
        return next_block is not None and self._runner.kv_cache.commit_ahead(next_block, is_quiet=is_quiet)

    def check_integrity(self) -> None:
        """Prove that blocks, tables and what speculation keeps agree.

        Raises:
            RuntimeError: something leaked, is owned twice, or belongs to nobody.
        """
        self.scheduler.check_integrity()
        if self._speculator is not None:
            self._speculator.check_integrity()

    def grant_imports(self) -> list[tuple[str, tuple[int, ...]]]:
        """Reserve blocks for queued imports (see `Scheduler.grant_imports`); what the tiers have is not missing."""
        granted: list[tuple[str, tuple[int, ...]]] = []
        deadline = self.tiers.disk_deadline()
        while (wanted := self.scheduler.next_import()) is not None:
            self.tiers.bring_back([wanted])
            more = self.scheduler.grant_imports(max_grants=1)
            self.tiers.flush()
            granted += more
            if not more and (self.scheduler.num_running or not self.tiers.wait_for_disk(deadline)):
                break
        return granted

    def close(self) -> None:
        """End what the engine has beside its owner's thread; it must not be stepped again."""
        self.tiers.close()

    def seconds_to_expiry(self) -> float | None:
        """Return when `step` has something to end because it waited too long; None if nothing waits with a limit."""
        expiry = self.scheduler.next_expiry()
        return None if expiry is None else max(0.0, expiry - time.monotonic())

    def interrupt(self) -> None:
        """Give up the running step, if any, at its next layer; nothing can be computed after. From any thread."""
        self._runner.interrupt()
        if self._speculator is not None:
            self._speculator.interrupt()

    def load_now(self) -> EngineLoad:
        """Return how busy the engine is."""
        scheduler = self.scheduler
        return EngineLoad(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_uncomputed_tokens=scheduler.num_uncomputed_tokens,
            num_preemptions=scheduler.num_preemptions,
            prefill_tokens_per_s=self._prefill_rate,
            blocks=self.pool.usage(),
            tiers=self.tiers.usage(),
            num_swaps=scheduler.blocks.num_swaps,
            speculation=None if self._speculator is None else self._speculator.counts,
        )

    def _admissible(self, spec: SequenceSpec) -> SequenceSpec:
        _check_ids("prompt", spec.prompt_token_ids, self.facts.vocab_size)
        _check_sampling_ids(spec.sampling, self.facts.vocab_size)
        if spec.sampling.seed is None:
            raise InvalidRequest("seed", "must be drawn before a sequence is added")
        if spec.sampling.num_branches != 1:
            raise InvalidRequest("n", "each branch is a sequence of its own")
        if spec.sampling.bad_words:
            raise InvalidRequest("bad_words", "must be token ids before a sequence is added")
        if spec.sampling.structured_outputs is not None:
            self._grammars.prepare(spec.sampling.structured_outputs)
        rope_salt = self._runner.cache_salt(len(spec.prompt_token_ids))
        return replace(spec, salt=f"{len(spec.salt)}:{spec.salt}{rope_salt}")

    def _next_batch(self) -> ScheduledBatch:
        """Decide a step, what it needs from the tiers in its place; wait for the disk if nothing else can be done."""
        scheduler = self.scheduler
        rule, copy_rate = scheduler.blocks.swap_rule, self.tiers.copy_bytes_per_s
        if rule.prefill_tokens_per_s != self._prefill_rate or rule.copy_bytes_per_s != copy_rate:
            scheduler.blocks.swap_rule = replace(
                rule, prefill_tokens_per_s=self._prefill_rate, copy_bytes_per_s=copy_rate
            )
        deadline = self.tiers.disk_deadline()
        while True:
            self.tiers.bring_back(scheduler.next_admissions())
            batch = scheduler.schedule(time.monotonic())
            self.tiers.flush()
            if batch.spans or not self.tiers.wait_for_disk(deadline):
                return batch

    def _compute(self, batch: ScheduledBatch) -> tuple[VerifiedStep, dict[str, list[TokenScore]]]:
        scores: dict[str, list[TokenScore]] = {}

        def on_scored(rows: ScoredRows, logits: Tensor) -> None:
            scores.setdefault(rows.seq_id, []).extend(self._sampler.score(logits, rows.token_ids, rows.num_top))

        self._grammars.start(batch.spans)
        watch = None if self._runner.kv_cache.is_staged else self.layer_watch
        on_layer = None if watch is None else watch.of(batch)
        logits = self._runner.run(ModelInput.build(batch, self.facts.block_size), on_scored, on_layer)
        return sample_verified(self._sampler, logits, batch), scores

    def _forget_grammars(self, batch: ScheduledBatch, outputs: Sequence[StepOutput]) -> None:
        ended = {output.seq_id for output in outputs if output.finish_reason is not None}
        if ended:
            for span in batch.spans:
                if span.seq_id in ended and span.sampling and span.sampling.structured_outputs:
                    self._grammars.forget(span.seq_id)

    def _measure(self, batch: ScheduledBatch, seconds: float) -> None:
        """Follow the prefill rate from steps that are mostly prompt (a moving average over about five of them).

        Of a few tokens, such as a canary's, the time says nothing: one that the system kept waiting would have every
        longer prompt refused.
        """
        self.scheduler.observe(batch, seconds)
        num_tokens = batch.num_tokens
        if num_tokens < max(_LEAST_MEASURED_TOKENS, 4 * len(batch.spans)) or seconds <= 0:
            return
        rate = num_tokens / seconds
        self._prefill_rate = rate if self._prefill_rate is None else 0.8 * self._prefill_rate + 0.2 * rate


def _identity(digest: str, dtype: str) -> str:
    """Return what names the weights as they compute: what other rounding made is another model's."""
    return digest if dtype == "float32" else xxhash.xxh3_128(f"{digest}:{dtype}".encode()).hexdigest()


def _check_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(field, f"token id {token_id} is outside the vocabulary [0, {vocab_size})")


def _check_sampling_ids(sampling: SamplingParams, vocab_size: int) -> None:
    _check_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
    _check_ids("logit_bias", [token_id for token_id, _ in sampling.logit_bias], vocab_size)
    _check_ids("allowed_token_ids", sampling.allowed_token_ids or (), vocab_size)
    for token_ids in sampling.bad_words_ids:
        _check_ids("bad_words", token_ids, vocab_size)


def with_seed(sampling: SamplingParams, seed: int) -> SamplingParams:
    """Return the sampling with its seed, or with `seed` if it has none."""
    return sampling if sampling.seed is not None else replace(sampling, seed=seed)
