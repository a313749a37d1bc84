"""Which tokens of which sequences are computed next, and who holds which blocks. Pure: no tensors, no clock, no I/O.

There is no prefill and no decode here: each step lets `num_computed_tokens` catch up with `num_tokens`.
"""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from types import MappingProxyType

from pdserve.engine.block_pool import BlockId, BlockPool
from pdserve.engine.end_rules import EndRules
from pdserve.engine.errors import InvalidRequest
from pdserve.engine.forks import follow, fork, hand_on, leave, regrow, set_late
from pdserve.engine.growth_reserve import GrowthReserve
from pdserve.engine.late_prompts import LatePrompts
from pdserve.engine.overtaking import Overtaking
from pdserve.engine.prefill_budget import PrefillBudget
from pdserve.engine.prefix_tree import PrefixTree
from pdserve.engine.room import Room
from pdserve.engine.scheduled_batch import ScheduledBatch, ScheduledSpan
from pdserve.engine.scheduler_config import SchedulerConfig
from pdserve.engine.scheduler_queues import SchedulerQueues
from pdserve.engine.sequence import Rank, Sequence, SequenceSpec, SequenceStatus
from pdserve.engine.sequence_blocks import SequenceBlocks
from pdserve.engine.sequence_check import check_spec
from pdserve.engine.step_output import FinishReason, SampledToken, StepOutput, TokenScore
from pdserve.engine.step_planner import StepPlanner


class Scheduler:
    """Owns every sequence of an engine from `add` to its last output, and through the block pool their blocks.

    What a step computes is decided by its `StepPlanner`. A preempted sequence's blocks are released and it is computed
    again later, prompt and outputs alike. A preempted stream keeps its priority and arrival.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        tree: PrefixTree,
        block_size: int,
        eos_ids: frozenset[int],
    ) -> None:
        self._config = config
        self._max_len = min(config.max_model_len, pool.num_blocks * block_size)
        self._blocks = SequenceBlocks(pool, tree, block_size, config.enable_prefix_cache)
        self._end_rules = EndRules(eos_ids, self._max_len)
        self._prefill_budget = PrefillBudget(config.tpot_target_s, config.max_num_batched_tokens)
        self._sequences: dict[str, Sequence] = {}
        self._queues = SchedulerQueues()
        growth = GrowthReserve(config.growth_reserve, block_size, self._max_len)
        self._room = Room(self._blocks, self._queues, growth, Overtaking(config.max_num_batched_tokens))
        self._late = LatePrompts(config.ttft_target_s, self._blocks, self._queues, self._sequences)
        self._num_arrived = 0
        self._planner = StepPlanner(config, self._blocks, self._queues, self._room, self._prefill_budget)

    def check(self, spec: SequenceSpec) -> None:
        """Check that a sequence can be computed here when it is alone.

        Raises:
            InvalidRequest: it never can.
        """
        if spec.seq_id in self._sequences:
            raise InvalidRequest("seq_id", f"{spec.seq_id} is running already")
        check_spec(spec, self._max_len, self._config.policy)

    def add(self, spec: SequenceSpec, now: float = 0.0) -> None:
        """Queue a sequence; `now` is in seconds on any clock, the same for all calls.

        Raises:
            InvalidRequest: it could never be computed here, whatever the load.
        """
        self.add_branches([spec], now)

    def add_branches(self, specs: SequenceOf[SequenceSpec], now: float = 0.0) -> None:
        """Queue sequences that begin with the same tokens, which are computed once, by the first.

        Each is a sequence of its own in everything else. With `is_export` only the first has blocks; the others end
        here with their first token.

        Raises:
            InvalidRequest: one of them could never be computed here; none was added.
        """
        leader = self._register(specs, now)
        self._queues.put(leader, SequenceStatus.WAITING)
        self._late.watch(leader)

    def add_import(self, *specs: SequenceSpec) -> None:
        """Queue the branches of a prompt that is computed elsewhere; `grant_imports` reserves its blocks in order.

        Until `commit_import` the first stands for all of them: the others are not to be left without it.
        """
        self._queues.put(self._register(specs), SequenceStatus.PENDING)

    def grant_imports(self, max_grants: int | None = None) -> list[tuple[str, tuple[int, ...]]]:
        """Reserve blocks for queued imports, in rank; return (seq_id, indexes of missing blocks).

        From here until `commit_import` or `abort` every block of the table belongs to the open transfer.
        """
        granted: list[tuple[str, tuple[int, ...]]] = []
        self._room.begin_pass()
        while (sequence := self._queues.pending_imports.first) is not None and len(granted) != max_grants:
            if sequence.is_fetching:
                break
            cached = self._blocks.match(sequence.token_ids, sequence.spec.salt)
            num_blocks = self._blocks.num_for(min(sequence.num_tokens + 1, self._max_len))
            table = self._room.reserve(sequence, cached, num_blocks, overtakes=True)
            if table is None:
                break
            self._blocks.pool.move_to_transfer(table)
            self._queues.move(sequence, SequenceStatus.IMPORTING)
            sequence.block_table = table
            sequence.num_cached_tokens = len(cached) * self._blocks.block_size
            num_prompt_blocks = self._blocks.num_for(sequence.num_tokens)
            granted.append((sequence.seq_id, tuple(range(len(cached), num_prompt_blocks))))
        return granted

    def commit_import(
        self,
        seq_id: str,
        sampled_token_ids: SequenceOf[int],
        of_followers: Mapping[str, SequenceOf[int]] = MappingProxyType({}),
    ) -> None:
        """Take the landed blocks over from the transfer: everything but the tokens sampled elsewhere is computed.

        `of_followers` has the sampled tokens of the other branches; a branch without a token has ended elsewhere.
        """
        sequence = self._sequences[seq_id]
        assert sequence.status is SequenceStatus.IMPORTING and sequence.block_table
        self._blocks.pool.move_to_sequence(sequence.block_table)
        sequence.num_computed_tokens = sequence.num_tokens
        self._queues.leave(sequence)
        self._blocks.remember_full(sequence)
        for branch in (sequence, *fork(sequence, self._blocks)):
            branch.token_ids.extend(sampled_token_ids if branch is sequence else of_followers.get(branch.seq_id, ()))
            self._queues.put(branch, SequenceStatus.LANDED)
            if branch.num_uncomputed_tokens == 0:
                self.abort(branch.seq_id)

    def regrow(self, seq_ids: SequenceOf[str], chosen: SequenceOf[tuple[str, int]]) -> list[str]:
        """Let beams go on with `chosen` (beam, next token); return the new beams in that order.

        A beam chosen several times is forked; one that was not chosen is freed.
        """
        grown = regrow([self._sequences[seq_id] for seq_id in seq_ids], chosen, self._blocks)
        beams = {sequence.seq_id: sequence for sequence in grown}
        for seq_id in seq_ids:
            if seq_id not in beams:
                self.abort(seq_id)
        for sequence in grown:
            if sequence.seq_id not in self._sequences:
                self._sequences[sequence.seq_id] = sequence
                sequence.rank = sequence.rank._replace(arrival=self._num_arrived)
                self._num_arrived += 1
                self._join(sequence)
        return list(beams)

    def release_export(self, seq_id: str) -> None:
        """Free a shipped sequence: the receiver has its blocks, or the transfer is over. Idempotent."""
        self.abort(seq_id)

    def abort(self, seq_id: str) -> bool:
        """Free everything a sequence holds, whatever its status; return whether it was known."""
        sequence = self._sequences.pop(seq_id, None)
        if sequence is None:
            return False
        if sequence.status is SequenceStatus.RUNNING:
            self._room.observe_end(sequence)
        leave(sequence)
        self._queues.leave(sequence)
        if sequence.followers:
            heir = hand_on(sequence)
            self._queues.put(heir, heir.status)
            self._late.watch(heir)
        self._blocks.release(sequence)
        sequence.status = SequenceStatus.FINISHED
        return True

    def next_import(self) -> tuple[Sequence, int] | None:
        """Return the import that is granted next, if any, and how many blocks it needs with the growth of others."""
        self._room.begin_pass()
        return self._room.next_import(self._max_len)

    def next_admissions(self) -> list[tuple[Sequence, int]]:
        """Return the sequences that may be admitted next, in order, and the blocks each needs with others' growth."""
        self._room.begin_pass()
        return self._room.next_admissions(max(0, self._config.max_num_seqs - len(self._queues.running)))

    @property
    def blocks(self) -> SequenceBlocks:
        """The blocks as this scheduler uses them."""
        return self._blocks

    @property
    def pool(self) -> BlockPool:
        """The allocator behind this scheduler."""
        return self._blocks.pool

    @property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end a sequence of this model."""
        return self._end_rules.eos_ids

    @property
    def max_len(self) -> int:
        """Tokens that one sequence can have here, prompt and output."""
        return self._max_len

    @property
    def has_work(self) -> bool:
        """Whether `schedule` may have tokens to compute."""
        return bool(self._queues.running or self._queues.landed or self._queues.waiting)

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self._queues.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a place in the batch, for blocks or for their leader."""
        queues = self._queues
        num_forking = sum(1 for sequence in self._sequences.values() if sequence.leader is not None)
        return len(queues.waiting) + len(queues.landed) + len(queues.pending_imports) + num_forking

    @property
    def num_preemptions(self) -> int:
        """Times that a sequence had to give its blocks away."""
        return self._planner.num_preemptions

    @property
    def num_sequences(self) -> int:
        """Sequences that hold or wait for anything, importing and exporting ones included."""
        return len(self._sequences)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens still to be computed here."""
        return self._queues.num_uncomputed_tokens

    def block_table(self, seq_id: str) -> tuple[BlockId, ...] | None:
        """The blocks of a sequence in token order; None when the sequence is gone."""
        sequence = self._sequences.get(seq_id)
        return None if sequence is None else tuple(sequence.block_table)

    def sequence(self, seq_id: str) -> Sequence | None:
        """The sequence itself, to be read and not changed; None when it is gone."""
        return self._sequences.get(seq_id)

    def with_drafts(self, span: ScheduledSpan, draft_token_ids: tuple[int, ...]) -> ScheduledSpan:
        """Return the last span of a running sequence with as many drafts as get blocks without anybody giving way.

        What verification leaves unused goes back with `release_drafts`.
        """
        sequence = self._sequences[span.seq_id]
        end = span.start + len(span.token_ids)
        drafts = draft_token_ids[: self._blocks.reach(sequence, end + len(draft_token_ids)) - end]
        block_table = tuple(sequence.block_table[: self._blocks.num_for(end + len(drafts))])
        return replace(span, draft_token_ids=drafts, block_table=block_table)

    def release_drafts(self, seq_id: str) -> None:
        """Free the blocks of a sequence, if it still runs, in which none of its tokens belongs."""
        sequence = self._sequences.get(seq_id)
        if sequence is not None and sequence.status is SequenceStatus.RUNNING:
            self._blocks.trim(sequence)

    def schedule(self, now: float = 0.0) -> ScheduledBatch:
        """Decide one step; an empty batch means that nothing can run now."""
        self._late.sort(now)
        batch = self._planner.plan(now)
        self._late.note(batch, now)
        return batch

    def observe(self, batch: ScheduledBatch, seconds: float) -> None:
        """Learn from how long a step took, for the prompt tokens of the next ones."""
        if not self._prefill_budget.has_target:
            return
        num_prompt_tokens = sum(len(span.token_ids) for span in batch.spans if span.start < span.num_prompt_tokens)
        num_streams = sum(1 for span in batch.spans if span.start >= span.num_prompt_tokens)
        self._prefill_budget.observe(num_prompt_tokens, num_streams, seconds)

    def expire(self, now: float) -> list[StepOutput]:
        """End the sequences that have waited too long, and return what they are told."""
        limit_s = self._config.max_waiting_s
        ended: list[StepOutput] = []
        waiting = self._queues.waiting
        # Again when some have ended: those who followed one of them have waited as long.
        while limit_s is not None and (overdue := [each for each in waiting if now - each.waiting_since >= limit_s]):
            for sequence in overdue:
                self.abort(sequence.seq_id)
                ended.append(StepOutput.overdue(sequence.seq_id, sequence.num_output_tokens, limit_s))
        return ended

    def next_expiry(self) -> float | None:
        """Return when `expire` has something to end, on the clock of `now`; None if nothing waits with a limit."""
        limit_s = self._config.max_waiting_s
        if limit_s is None:
            return None
        return min((sequence.waiting_since + limit_s for sequence in self._queues.waiting), default=None)

    def update(
        self,
        batch: ScheduledBatch,
        sampled: SequenceOf[SampledToken | None],
        scores: Mapping[str, SequenceOf[TokenScore]] | None = None,
    ) -> list[StepOutput]:
        """Apply a computed step; `sampled` has one entry a span, None where nothing was to be sampled.

        `scores` are those of the scored prompt tokens, by sequence. A sequence that was aborted while the step ran is
        passed over.
        """
        outputs = []
        for span, token in zip(batch.spans, sampled, strict=True):
            sequence = self._sequences.get(span.seq_id)
            if sequence is not None and _is_computed(sequence, span):
                if scores and span.seq_id in scores:
                    sequence.prompt_scores.extend(scores[span.seq_id])
                outputs.append(self._advance(sequence, span, token))
        return outputs

    def check_integrity(self) -> None:
        """Prove that blocks held and blocks counted agree, and that an empty scheduler holds nothing.

        Raises:
            RuntimeError: a block leaked, is owned twice, or belongs to nobody.
        """
        self._blocks.check_integrity(self._sequences.values())

    def _register(self, specs: SequenceOf[SequenceSpec], now: float = 0.0) -> Sequence:
        """Check all specs and make sequences of them; return the one that leads the others."""
        for spec in specs:
            self.check(spec)
        ranks = (Rank(spec.sampling.priority, False, self._num_arrived + index) for index, spec in enumerate(specs))
        leader, *followers = (Sequence(spec, rank, now) for spec, rank in zip(specs, ranks, strict=True))
        self._num_arrived += len(specs)
        follow(leader, followers)
        self._sequences.update((sequence.seq_id, sequence) for sequence in (leader, *followers))
        return leader

    def _fork(self, leader: Sequence) -> None:
        for follower in fork(leader, self._blocks, shares=not leader.spec.is_export):
            if not follower.spec.is_export:
                self._join(follower)

    def _join(self, sequence: Sequence) -> None:
        """Let a forked sequence run at once if the batch has a place."""
        set_late(sequence, is_late=False)
        has_place = len(self._queues.running) < self._config.max_num_seqs
        self._queues.put(sequence, SequenceStatus.RUNNING if has_place else SequenceStatus.LANDED)

    def _advance(self, sequence: Sequence, span: ScheduledSpan, token: SampledToken | None) -> StepOutput:
        spec, num_tokens = sequence.spec, len(sequence.token_ids)
        num_computed_tokens = sequence.num_computed_tokens = span.start + len(span.token_ids)
        self._blocks.remember_full(sequence)
        output_position = num_tokens - sequence.num_prompt_tokens
        finish_reason: FinishReason | None = None
        scores: tuple[TokenScore, ...] | None = None
        is_at_end = num_computed_tokens == num_tokens
        if is_at_end and sequence.followers:
            self._fork(sequence)
        if is_at_end and spec.sampling.prompt_logprobs is not None and sequence.is_prompt_scored:
            scores = tuple(sequence.prompt_scores)
            sequence.prompt_scores.clear()
        if token is not None and token.token_id is not None:
            sequence.token_ids.append(token.token_id)
            finish_reason = self._end_rules.finish_reason(sequence, token.completes_grammar)
        elif is_at_end and spec.sampling.max_tokens == 0:
            finish_reason = FinishReason.LENGTH
        exported_blocks = tuple(sequence.block_table) if spec.is_export else ()
        failure = token.failure if token is not None else None
        if failure is not None or (finish_reason is not None and not spec.is_export):
            self.abort(sequence.seq_id)
        elif is_at_end and spec.is_export and not sequence.block_table:
            self.abort(sequence.seq_id)  # a branch: it travels with its leader's blocks
        elif is_at_end and spec.is_export:
            self._blocks.pool.move_to_transfer(sequence.block_table)
            self._queues.move(sequence, SequenceStatus.EXPORTING)
        return StepOutput(
            seq_id=sequence.seq_id,
            output_position=output_position,
            token=token,
            finish_reason=finish_reason,
            num_computed_tokens=num_computed_tokens,
            num_cached_tokens=sequence.num_cached_tokens or 0,
            failure=failure,
            exported_blocks=exported_blocks,
            prompt_scores=scores,
            queue_s=sequence.queue_s if output_position == len(spec.output_token_ids) else None,
        )


def _is_computed(sequence: Sequence, span: ScheduledSpan) -> bool:
    """Whether `span` tells something of `sequence` as it is now: it may have been aborted or have a new leader."""
    if span.token_ids:
        return sequence.status is SequenceStatus.RUNNING
    return sequence.leader is None and sequence.num_computed_tokens == span.start
