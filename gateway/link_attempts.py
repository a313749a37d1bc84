"""The attempts that this gateway has on one node, held against what the node says it holds. Pure."""

from dataclasses import dataclass

from pdserve.control.messages import NodeRole, StageReport, TaskFailed, TokenChunk
from pdserve.gateway.attempt_inbox import AttemptEvent, AttemptInbox, NodeLost
from pdserve.gateway.node_view import AttemptCost, NodeKey


@dataclass(slots=True)
class _Attached:
    """`unseen_cost` until the node's own load shows it; `is_answered` when the node has said its last word."""

    inbox: AttemptInbox
    unseen_cost: AttemptCost | None
    is_answered: bool = False
    missing_since: float | None = None


class LinkAttempts:
    """Owns the inboxes of one link.

    A node that does not hold an attempt for `forget_s`, without having ended it, has forgotten it; what it holds
    for `forget_s` without being asked to is a stray, whose cancellation was lost.
    """

    def __init__(self, key: NodeKey, role: NodeRole, forget_s: float) -> None:
        self._key = key
        self._is_prefill = role is NodeRole.PREFILL
        self._forget_s = forget_s
        self._attached: dict[str, _Attached] = {}
        self._stray_since: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._attached)

    def pending(self) -> AttemptCost:
        """Return what was sent since the node last spoke of its load."""
        costs = [each.unseen_cost for each in self._attached.values() if each.unseen_cost is not None]
        return AttemptCost(sum(cost.num_tokens for cost in costs), sum(cost.num_blocks for cost in costs))

    def attach(self, inbox: AttemptInbox, cost: AttemptCost) -> None:
        """Deliver to `inbox` what the node says of its attempt."""
        self._attached[inbox.attempt_id] = _Attached(inbox, cost)

    def detach(self, attempt_id: str) -> None:
        """Deliver nothing more about `attempt_id`."""
        self._attached.pop(attempt_id, None)

    def deliver(self, message: TokenChunk | StageReport | TaskFailed) -> bool:
        """Put `message` where it belongs; return whether anybody waits for it."""
        attached = self._attached.get(message.attempt_id)
        if attached is None:
            return False
        if not isinstance(message, TokenChunk):
            attached.is_answered |= isinstance(message, TaskFailed)
        elif self._is_prefill or message.finish_reason is not None:
            # After the first token a prefill node only ships blocks, and the decode node sees whether they come.
            attached.is_answered = True
        attached.inbox.put(AttemptEvent(self._key, message))
        return True

    def lose_all(self, reason: str) -> None:
        """Tell every attempt that the node is lost."""
        lost, self._attached = self._attached, {}  # whoever hears of it detaches what is attached
        for attached in lost.values():
            attached.inbox.put(AttemptEvent(self._key, NodeLost(reason)))

    def reconcile(self, held_ids: tuple[str, ...], now: float) -> tuple[str, ...]:
        """Take in what the node holds: tell the attempts that it has forgotten; return the ids of strays."""
        held = frozenset(held_ids)
        forgotten = []
        for attempt_id, attached in self._attached.items():
            attached.unseen_cost = None
            if attempt_id in held or attached.is_answered:
                attached.missing_since = None
            elif attached.missing_since is None:
                attached.missing_since = now
            elif now - attached.missing_since >= self._forget_s:
                forgotten.append(attempt_id)
        for attempt_id in forgotten:
            reason = "it holds nothing of this attempt any more"
            if (left := self._attached.pop(attempt_id, None)) is not None:
                left.inbox.put(AttemptEvent(self._key, NodeLost(reason)))
        strays = held - self._attached.keys()
        self._stray_since = {attempt_id: self._stray_since.get(attempt_id, now) for attempt_id in strays}
        return tuple(each for each, since in self._stray_since.items() if now - since >= self._forget_s)
