"""Branches of one prompt: its leader computes it, its followers wait and then share its blocks. Pure.

A fork copies nothing. All blocks of the prompt are shared, the partial last one too; whoever writes into that one
while others hold it gets a copy first (`SequenceBlocks.extend`).
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from pdserve.engine.sequence import Sequence, SequenceStatus
from pdserve.engine.sequence_blocks import SequenceBlocks


def follow(leader: Sequence, followers: Iterable[Sequence]) -> None:
    """Let `followers`, which have the same tokens, wait for the prompt that `leader` computes."""
    for follower in followers:
        follower.status = SequenceStatus.FORKING
        follower.leader = leader
        leader.followers.append(follower)


def set_late(sequence: Sequence, *, is_late: bool) -> None:
    """Rank a sequence that is in no queue, and who follows it, as late or by arrival alone."""
    for branch in (sequence, *sequence.followers):
        branch.rank = branch.rank._replace(is_late=is_late)


def leave(follower: Sequence) -> None:
    """Let a follower wait no longer: it has ended before its prompt was computed."""
    if follower.leader is not None:
        follower.leader.followers.remove(follower)
        follower.leader = None


def fork(leader: Sequence, blocks: SequenceBlocks, *, shares: bool = True) -> list[Sequence]:
    """Give each follower what `leader` has computed, and return them: they follow no more, and are in no queue.

    With `shares` each holds the computed blocks too; without, they stay the leader's alone.
    """
    followers, leader.followers = leader.followers, []
    computed = leader.block_table[: blocks.num_for(leader.num_computed_tokens)]
    for follower in followers:
        follower.leader = None
        if shares:
            blocks.pool.share(computed)
            follower.block_table = list(computed)
        _take_progress(follower, leader)
        follower.prompt_scores = list(leader.prompt_scores)
    return followers


def hand_on(leader: Sequence) -> Sequence:
    """Make the first follower the leader of the others, with all that `leader` has and holds; return it.

    `leader` holds nothing afterwards. The caller puts the heir where `leader` stood.
    """
    heir, *others = leader.followers
    leader.followers = []
    heir.leader = None
    follow(heir, others)
    heir.status, leader.status = leader.status, SequenceStatus.FINISHED
    heir.block_table, leader.block_table = leader.block_table, []
    heir.prompt_scores, leader.prompt_scores = leader.prompt_scores, []
    heir.swapped, leader.swapped = leader.swapped, None
    _take_progress(heir, leader)
    return heir


def regrow(beams: SequenceOf[Sequence], chosen: SequenceOf[tuple[str, int]], blocks: SequenceBlocks) -> list[Sequence]:
    """Return the sequences that go on with `chosen` (beam, next token), in that order.

    The first choice of a beam continues it in place; each further one is a new sequence, in no queue yet, that shares
    what the beam has computed. Beams that were not chosen are left as they are.
    """
    by_id = {beam.seq_id: beam for beam in beams}
    length = beams[0].num_tokens
    root = beams[0].seq_id.partition("/")[0]
    grown: list[Sequence] = []
    for position, (seq_id, token_id) in enumerate(chosen):
        beam = by_id[seq_id]
        if beam.num_tokens > length:  # continued already
            beam = _copy(beam, f"{root}/{length}.{position}", blocks)
        beam.token_ids[length:] = [token_id]
        grown.append(beam)
    return grown


def _copy(beam: Sequence, seq_id: str, blocks: SequenceBlocks) -> Sequence:
    twin = Sequence(replace(beam.spec, seq_id=seq_id), beam.rank)
    twin.token_ids = list(beam.token_ids)
    if beam.block_table:  # else it was preempted, and its twin too has to be computed again
        twin.block_table = beam.block_table[: blocks.num_for(beam.num_computed_tokens)]
        blocks.pool.share(twin.block_table)
        _take_progress(twin, beam)
    return twin


def _take_progress(sequence: Sequence, other: Sequence) -> None:
    sequence.num_computed_tokens = other.num_computed_tokens
    sequence.num_inserted_tokens = other.num_inserted_tokens
    sequence.num_cached_tokens = other.num_cached_tokens
    sequence.num_reached_tokens = other.num_reached_tokens
    sequence.waiting_since, sequence.queue_s = other.waiting_since, other.queue_s
