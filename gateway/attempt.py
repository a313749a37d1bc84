"""One dispatch of a request to a decode node and, unless it prefills by itself, a prefill node."""

import secrets
from dataclasses import replace

from pdserve.control.errors import ChannelLost, MessageError
from pdserve.control.messages import CancelTask, DecodeTask, GenerationTask, PrefillTask
from pdserve.control.request_state import RequestStatus
from pdserve.gateway.attempt_inbox import AttemptInbox
from pdserve.gateway.node_pool import NodePool
from pdserve.gateway.node_view import AttemptCost, NodeKey, num_blocks_for
from pdserve.gateway.router import RoutePlan

_STAGES = (RequestStatus.PREFILLING, RequestStatus.TRANSFERRING, RequestStatus.DECODING)
_NUM_STAGES = len(_STAGES)
_SPARE_MESSAGES = 64


class Attempt:
    """Owns the inbox of an attempt id and knows how far it came; closing it frees the nodes."""

    def __init__(self, pool: NodePool, plan: RoutePlan, inbox: AttemptInbox) -> None:
        self._pool = pool
        self._num_stages_reached = 0
        self.is_decoding = False  # the last stage is reached; asked for every token
        self._is_open = True
        self.plan = plan
        self.nodes = plan.nodes
        self.decode_key = self.nodes[0]
        self.inbox = inbox

    @classmethod
    def begin(cls, pool: NodePool, plan: RoutePlan, task: GenerationTask, max_tokens: int) -> "list[Attempt]":
        """Open an inbox for each branch and send the tasks, the prefill node's first; return the branches in order.

        Raises:
            ChannelLost: a node is gone; nothing is left open.
            MessageError: the task is more than any node accepts; nothing is left open.
        """
        capacity = max_tokens - len(task.output_token_ids) + _SPARE_MESSAGES
        costs = [_costs(plan, task), *[_fork_costs(plan)] * len(task.forks)]
        attempts = [
            cls(pool, plan, pool.open_inbox(attempt_id, cost, capacity))
            for attempt_id, cost in zip(task.attempt_ids, costs, strict=True)
        ]
        try:
            attempts[0]._send(task)
        except (ChannelLost, MessageError):
            for attempt in attempts:
                attempt.cancel("the task was not sent")
            raise
        return attempts

    def has_reached(self, stage: RequestStatus) -> bool:
        """Whether this attempt came as far as `stage`, or further."""
        return _STAGES.index(stage) < self._num_stages_reached

    def reach(self, stage: RequestStatus) -> bool:
        """Note that `stage` is reached; False if that is no news (reports overtake each other)."""
        if self.is_decoding or self.has_reached(stage):
            return False
        self._num_stages_reached = _STAGES.index(stage) + 1
        self.is_decoding = self._num_stages_reached == _NUM_STAGES
        return True

    def finish(self) -> None:
        """Close after the last token. The nodes have freed what they held, except that a decode node which
        has not taken the sequence over may not have heard of the end yet.
        """
        is_handed_over = self.plan.prefill is None or self.is_decoding
        self._close(() if is_handed_over else (self.decode_key,), "finished")

    def cancel(self, reason: str) -> None:
        """Close and free everything on every node."""
        self._close(self.nodes, reason)

    def _close(self, nodes: tuple[NodeKey, ...], reason: str) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._pool.close_inbox(self.inbox)
        for key in nodes:
            try:
                self._pool.send(key, CancelTask(self.inbox.attempt_id, reason))
            except ChannelLost:
                continue  # a node that lost this gateway frees by itself what belonged to it

    def _send(self, task: GenerationTask) -> None:
        decode, prefill = self.plan.decode, self.plan.prefill
        if prefill is None or decode.transfer_endpoint is None:
            self._pool.send(self.decode_key, DecodeTask(task, None))
            return
        transfer_id = secrets.token_hex(16)
        prefill_task = PrefillTask(task, transfer_id, decode.transfer_endpoint, decode.node_id, decode.incarnation)
        # The first token waits for this one; what the decode node has to do first fits beside the computation.
        self._pool.send(self.nodes[1], prefill_task)
        self._pool.send(self.decode_key, DecodeTask(task, transfer_id))


def _costs(plan: RoutePlan, task: GenerationTask) -> dict[NodeKey, AttemptCost]:
    num_tokens = len(task.prompt_token_ids) + len(task.output_token_ids)
    cost = AttemptCost(num_tokens, num_blocks_for(num_tokens + 1, plan.decode.block_size))
    if plan.prefill is None:
        return {plan.nodes[0]: cost}
    return {plan.nodes[0]: replace(cost, num_tokens=0), plan.nodes[1]: cost}


def _fork_costs(plan: RoutePlan) -> dict[NodeKey, AttemptCost]:
    """A branch more: its prompt is computed and held with the first one's, its own tokens need a block."""
    return {key: AttemptCost(0, 1 if position == 0 else 0) for position, key in enumerate(plan.nodes)}
