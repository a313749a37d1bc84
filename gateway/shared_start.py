"""The first attempt of all branches of one prompt, sent to the nodes as one task: one prefill, one transfer."""

from dataclasses import replace

from pdserve.control.messages import Fork, GenerationTask
from pdserve.gateway.attempt import Attempt
from pdserve.gateway.generation import GenerationRequest
from pdserve.gateway.node_pool import NodePool
from pdserve.gateway.router import RoutePlan


class SharedStart:
    """Owns the attempts that one branch has begun for the others until they take them.

    Only first attempts are shared. A branch that has to go on elsewhere does so by itself, as any request does.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, GenerationRequest] = {}  # by request id: branches whose first attempt is not begun
        self._begun: dict[str, Attempt] = {}

    def join(self, request: GenerationRequest) -> None:
        """Add a branch: alike in all but its id and its seed to those that are in."""
        self._waiting[request.request_id] = request

    def take(self, request_id: str) -> Attempt | None:
        """Return the attempt that another branch has begun for this one, which owns it from here."""
        return self._begun.pop(request_id, None)

    def begin(self, pool: NodePool, plan: RoutePlan, task: GenerationTask, max_tokens: int) -> Attempt:
        """Send `task` with every branch that waits as its forks; return the attempt of the task's own branch.

        Raises:
            ChannelLost: a node is gone; nothing is left open, and the other branches wait as before.
            MessageError: the task is more than any node accepts; the same.
        """
        del self._waiting[task.request_id]
        forks = tuple(
            Fork(first_attempt_id(request_id), _seed(request)) for request_id, request in self._waiting.items()
        )
        own, *others = Attempt.begin(pool, plan, replace(task, forks=forks), max_tokens)
        self._begun = dict(zip(self._waiting, others, strict=True))
        self._waiting.clear()
        return own

    def leave(self, request_id: str) -> None:
        """Note that a branch has ended without an attempt, and free the one that was begun for it. Idempotent."""
        self._waiting.pop(request_id, None)
        attempt = self._begun.pop(request_id, None)
        if attempt is not None:
            attempt.cancel("the branch has ended")


def first_attempt_id(request_id: str) -> str:
    """Return the id of the first attempt of a request."""
    return f"{request_id}:1"


def _seed(request: GenerationRequest) -> int:
    assert request.sampling.seed is not None
    return request.sampling.seed
