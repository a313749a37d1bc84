"""What a node holds against what the gateway asked of it: pure."""

import asyncio

import pytest

from pdserve.control.messages import FinishReason, NodeRole, Stage, StageReport, TaskFailed, TokenChunk
from pdserve.gateway.attempt_inbox import AttemptEvent, AttemptInbox, NodeLost
from pdserve.gateway.link_attempts import LinkAttempts
from pdserve.gateway.node_view import AttemptCost, NodeKey

KEY = NodeKey("n1", "i1")
COST = AttemptCost(10, 2)


def _attempts(role: NodeRole = NodeRole.DECODE) -> tuple[LinkAttempts, AttemptInbox]:
    attempts, inbox = LinkAttempts(KEY, role, forget_s=3.0), AttemptInbox("r:1", (KEY,), 8)
    attempts.attach(inbox, COST)
    return attempts, inbox


async def _next(inbox: AttemptInbox) -> AttemptEvent:
    events: list[AttemptEvent] = []

    def take(event: AttemptEvent) -> bool:
        events.append(event)
        return True

    await inbox.hear(0, take)
    return events[0]


async def test_an_attempt_that_a_node_does_not_hold_is_lost_after_a_while_and_once() -> None:
    attempts, inbox = _attempts()

    attempts.reconcile((), 0.0)
    attempts.reconcile((), 2.9)
    with pytest.raises(TimeoutError):
        await _next(inbox)
    attempts.reconcile((), 3.0)
    attempts.reconcile((), 9.0)

    assert isinstance((await _next(inbox)).message, NodeLost)
    with pytest.raises(TimeoutError):
        await _next(inbox)
    assert len(attempts) == 0


async def test_an_attempt_that_shows_up_again_was_only_under_way() -> None:
    attempts, inbox = _attempts()

    for now, held in ((0.0, ()), (2.0, ("r:1",)), (4.0, ()), (6.0, ())):
        attempts.reconcile(held, now)

    with pytest.raises(TimeoutError):
        await _next(inbox)


@pytest.mark.parametrize(
    ("role", "message", "is_last"),
    [
        (NodeRole.DECODE, TokenChunk("r:1", 0, (1,), None, None, None), False),
        (NodeRole.DECODE, TokenChunk("r:1", 0, (1,), None, FinishReason.LENGTH, None), True),
        (NodeRole.PREFILL, TokenChunk("r:1", 0, (1,), None, None, None), True),
        (NodeRole.PREFILL, StageReport("r:1", Stage.PREFILLING), False),
        (NodeRole.DECODE, TaskFailed("r:1", "no_blocks", "", True), True),
    ],
)
async def test_a_node_that_has_said_its_last_word_need_not_hold_the_attempt(role, message, is_last) -> None:
    attempts, inbox = _attempts(role)
    attempts.deliver(message)
    await _next(inbox)

    attempts.reconcile((), 0.0)
    attempts.reconcile((), 10.0)

    if is_last:
        with pytest.raises(TimeoutError):
            await _next(inbox)
    else:
        assert isinstance((await _next(inbox)).message, NodeLost)


def test_what_nobody_asked_for_is_a_stray_after_a_while() -> None:
    attempts, _ = _attempts()

    assert attempts.reconcile(("r:1", "old:1"), 0.0) == ()
    assert attempts.reconcile(("r:1", "old:1"), 2.0) == ()
    assert attempts.reconcile(("r:1", "old:1"), 3.0) == ("old:1",)
    assert attempts.reconcile(("r:1",), 4.0) == ()
    assert attempts.reconcile(("r:1", "old:1"), 5.0) == ()


def test_a_cost_is_pending_until_the_node_has_spoken() -> None:
    attempts, _ = _attempts()
    assert attempts.pending() == COST

    attempts.reconcile(("r:1",), 0.0)

    assert attempts.pending() == AttemptCost(0, 0)


async def test_all_are_told_of_a_loss_though_each_lets_go_at_once() -> None:
    attempts = LinkAttempts(KEY, NodeRole.DECODE, forget_s=3.0)
    inboxes = [AttemptInbox(f"r:{number}", (KEY,), 8) for number in range(3)]
    told: list[str] = []

    async def hear(inbox: AttemptInbox) -> None:
        def take(event: AttemptEvent) -> bool:
            told.append(inbox.attempt_id)
            for each in inboxes:  # as a request that ends closes its attempts
                attempts.detach(each.attempt_id)
            return True

        await inbox.hear(30, take)

    async with asyncio.TaskGroup() as tasks:
        for inbox in inboxes:
            attempts.attach(inbox, COST)
            tasks.create_task(hear(inbox), name=inbox.attempt_id)
        await asyncio.sleep(0)
        attempts.lose_all("as scripted")

    assert told == ["r:0", "r:1", "r:2"] and len(attempts) == 0
