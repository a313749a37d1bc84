"""A smaller model that drafts: it samples with the same noise as the model it drafts for, from its own keys and values.

Gumbel coupling: both models add the same noise to their logits, position by position, so that they agree as often as
their logits order the best candidates alike, also at high temperatures.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from pdserve.engine.available_cores import num_available_cores
from pdserve.engine.block_pool import BlockId, BlockPool
from pdserve.engine.config import EngineConfig
from pdserve.engine.drafts import DraftRequest, Drafts
from pdserve.engine.errors import ModelError
from pdserve.engine.model_input import ModelInput
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.models.model_dir import ModelDir
from pdserve.engine.sampler import Sampler
from pdserve.engine.scheduled_batch import ScheduledBatch, ScheduledSpan
from pdserve.engine.speculative_config import SpeculativeConfig, SpeculativeMethod
from pdserve.kernels.cpu_sampling import choose_row_sampler


class DraftedSequence:
    """What the draft model has computed of one sequence: the tokens whose keys and values lie in its own blocks.

    Those after the last verified token are guesses; `rewind` drops the wrong ones, whose slots are written again.
    """

    __slots__ = ("block_table", "num_verified", "token_ids")

    def __init__(self) -> None:
        self.block_table: list[BlockId] = []
        self.token_ids: list[int] = []
        self.num_verified = 0

    def rewind(self, token_ids: Sequence[int]) -> None:
        """Keep what agrees with `token_ids`, short of the last: that one is computed again for its logits."""
        end = min(len(self.token_ids), len(token_ids) - 1)
        num_kept = min(self.num_verified, end)
        while num_kept < end and self.token_ids[num_kept] == token_ids[num_kept]:
            num_kept += 1
        del self.token_ids[num_kept:]
        self.num_verified = num_kept


class DraftModelDrafter:
    """Owns the draft model and a pool of blocks for it, apart from the engine's and bounded on its own.

    A sequence that finds no block there gets no drafts, once those that are not in the batch have given theirs up.
    """

    method = SpeculativeMethod.DRAFT_MODEL.value

    def __init__(self, runner: ModelRunner, sampler: Sampler, block_size: int, step_budget: int) -> None:
        self._runner = runner
        self._sampler = sampler
        self._block_size = block_size
        self._step_budget = step_budget
        self._sequences: dict[str, DraftedSequence] = {}
        self.pool = BlockPool(runner.num_blocks)

    @classmethod
    def load(cls, config: EngineConfig, speculative: SpeculativeConfig) -> "DraftModelDrafter":
        """Load the draft model that `speculative` names, for the model of `config`.

        Raises:
            ModelError: it cannot be served, or has another vocabulary.
        """
        assert speculative.model is not None
        target_dir, draft_dir = ModelDir.open(config.model_dir), ModelDir.open(Path(speculative.model))
        if not draft_dir.has_vocabulary_of(target_dir):
            raise ModelError(
                f"{draft_dir.name} cannot draft for {target_dir.name}: their tokenizers give other ids to tokens; "
                "a draft model must share the vocabulary"
            )
        draft_config = replace(
            config,
            model_dir=draft_dir.path,
            kv_memory_bytes=speculative.draft_kv_memory_bytes,
            num_blocks=None,
            max_model_len=None,
            speculative_config=None,
        )
        runner = ModelRunner.load(draft_config, draft_dir)
        num_token_ids = target_dir.num_token_ids()
        if runner.shape.vocab_size < num_token_ids:
            raise ModelError(
                f"{draft_dir.name} cannot draft for {target_dir.name}: it knows {runner.shape.vocab_size} of "
                f"{num_token_ids} tokens"
            )
        answer = choose_row_sampler(config.num_threads or num_available_cores(), use_cpu_kernels=config.use_cpu_kernels)
        sampler = Sampler(
            runner.shape.vocab_size,
            num_token_ids,
            target_dir.eos_token_ids(),
            answer=runner.row_sampler(answer),
        )
        return cls(runner, sampler, config.block_size, config.max_num_batched_tokens)

    @property
    def seq_ids(self) -> Collection[str]:
        """The sequences for which keys and values are kept."""
        return self._sequences.keys()

    def propose(self, requests: Sequence[DraftRequest]) -> Drafts:
        """Compute what is missing of each sequence, at most a step's budget in all, then token by token together."""
        budget, num_missing, can_draft = self._step_budget, 0, []
        spans: list[ScheduledSpan] = []
        in_batch = {request.span.seq_id for request in requests}
        for index, request in enumerate(requests):
            sequence = self._prepare(request, in_batch)
            if sequence is None or budget == 0:
                continue
            start = len(sequence.token_ids)
            token_ids = tuple(request.token_ids[start : start + budget])
            budget -= len(token_ids)
            num_missing = max(num_missing, len(token_ids))
            is_complete = start + len(token_ids) == len(request.token_ids)
            spans.append(self._span(request, sequence, token_ids, () if is_complete else None))
            if is_complete:
                can_draft.append(index)
        drafts: dict[int, list[int]] = {index: [] for index in can_draft}
        while spans:
            spans = self._extend(requests, spans, drafts)
        token_ids_of = tuple(tuple(drafts.get(index, ())) for index in range(len(requests)))
        # One token more than it drafted last, where all was accepted, is the most that a step in the swing lacks.
        return Drafts(token_ids_of, is_catching_up=num_missing > 2)

    def forget(self, seq_id: str) -> None:
        """Free the blocks of a sequence that has ended."""
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None:
            self.pool.release(sequence.block_table)

    def interrupt(self) -> None:
        """End a running step at its next layer with StepInterrupted. From any thread."""
        self._runner.interrupt()

    def _extend(
        self, requests: Sequence[DraftRequest], spans: Sequence[ScheduledSpan], drafts: dict[int, list[int]]
    ) -> list[ScheduledSpan]:
        """Run `spans`, add a token to the drafts of those that sample, return what remains to be run."""
        logits = self._runner.run(ModelInput.build(ScheduledBatch(tuple(spans)), self._block_size))
        sampling = [span for span in spans if span.sampling is not None]
        sampled = {
            span.seq_id: token.token_id
            for span, token in zip(sampling, self._sampler.sample(logits, sampling), strict=True)
        }
        for span in spans:
            self._sequences[span.seq_id].token_ids.extend(span.token_ids)
        remaining = []
        for index, drafted in drafts.items():
            request = requests[index]
            token_id = sampled.get(request.span.seq_id)
            if token_id is None:
                continue
            drafted.append(token_id)
            if len(drafted) < request.limit:
                sequence = self._sequences[request.span.seq_id]
                remaining.append(self._span(request, sequence, (token_id,), drafted))
        return remaining

    def _prepare(self, request: DraftRequest, in_batch: Collection[str]) -> DraftedSequence | None:
        """Return the state of a sequence with blocks for all it may need in this step; None if it gets no drafts."""
        num_wanted = len(request.token_ids) + request.limit
        sequence = self._sequences.setdefault(request.span.seq_id, DraftedSequence())
        sequence.rewind(request.token_ids)
        unseen = request.token_ids[len(sequence.token_ids) :]
        if num_wanted > self._runner.max_model_len or max(unseen) >= self._runner.shape.vocab_size:
            return None
        needed = -(-num_wanted // self._block_size) - len(sequence.block_table)
        if needed > 0:
            if not self._make_room(needed, in_batch):
                return None
            sequence.block_table.extend(self.pool.allocate(needed))
        return sequence

    def _make_room(self, num_blocks: int, in_batch: Collection[str]) -> bool:
        for seq_id in [seq_id for seq_id in self._sequences if seq_id not in in_batch]:
            if self.pool.num_free >= num_blocks:
                break
            self.forget(seq_id)
        return self.pool.num_free >= num_blocks

    def _span(
        self,
        request: DraftRequest,
        sequence: DraftedSequence,
        token_ids: tuple[int, ...],
        drafted: Sequence[int] | None,  # None: the sequence is not complete yet, nothing is sampled
    ) -> ScheduledSpan:
        wanted, start = request.span, len(sequence.token_ids)
        num_blocks = -(-(start + len(token_ids)) // self._block_size)
        sampling = wanted.sampling
        needs_history = sampling is not None and sampling.needs_history
        if sampling is not None and sampling.logprobs is not None:  # nobody reads a draft's
            sampling = replace(sampling, logprobs=None)
        return replace(
            wanted,
            start=start,
            token_ids=token_ids,
            block_table=tuple(sequence.block_table[:num_blocks]),
            sampling=None if drafted is None else sampling,
            output_position=wanted.output_position + len(drafted or ()),
            output_history=(*wanted.output_history, *(drafted or ())) if needs_history else (),
            seen=wanted.seen.followed_by(drafted) if drafted and wanted.seen is not None else wanted.seen,
        )
