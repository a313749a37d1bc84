"""Readiness as a proven fact: a real token has lately passed the whole path, through nodes that still live."""

import asyncio
import logging
import secrets
import time
from typing import NoReturn

from pdserve.engine.errors import InvalidRequest
from pdserve.engine.sampling_params import SamplingParams
from pdserve.gateway.dispatch_config import CanaryConfig
from pdserve.gateway.dispatcher import Dispatcher
from pdserve.gateway.errors import AdmissionRefused, GenerationFailed
from pdserve.gateway.generation import GenerationRequest
from pdserve.gateway.node_pool import NodePool
from pdserve.gateway.path_proofs import Path, wanted_paths

logger = logging.getLogger(__name__)

_NUM_TOKENS = 2  # the first from the prefill node, the second from the decode node
# A node that is full or leaves, and a Redis that is away, say nothing about a path.
_SAYS_NOTHING = frozenset({"no_blocks", "overloaded", "draining", "no_nodes", "redis_unavailable"})


class Canary:
    """Sends tiny requests: through each pair of nodes that was never tried, again where one failed, and when no
    token has lately come from any decode node.
    """

    def __init__(
        self, dispatcher: Dispatcher, pool: NodePool, prompt_token_ids: tuple[int, ...], config: CanaryConfig
    ) -> None:
        self._dispatcher = dispatcher
        self._proofs = dispatcher.proofs
        self._pool = pool
        self._prompt_token_ids = prompt_token_ids
        self._config = config
        self._has_been_complete = config.expected_prefill_nodes + config.expected_decode_nodes == 0
        self._was_ready = False

    @property
    def ready(self) -> bool:
        """Whether a token can be produced now: a path is proven, its nodes live, Redis answers."""
        if not self._has_been_complete or not self._pool.redis.is_ok:
            return False
        views = self._pool.views()
        alive = frozenset(view.key for view in views if view.is_ready)
        return self._proofs.holds(wanted_paths(views), alive)

    def missing_nodes(self) -> str | None:
        """Return which of the nodes that are expected at start have not come yet, in words."""
        if self._has_been_complete:
            return None
        num_decode, num_prefill = self._num_ready()
        config = self._config
        if num_decode >= config.expected_decode_nodes and num_prefill >= config.expected_prefill_nodes:
            return None
        return (
            f"{num_prefill} of {config.expected_prefill_nodes} prefill nodes and "
            f"{num_decode} of {config.expected_decode_nodes} decode nodes are ready"
        )

    async def run(self) -> NoReturn:
        """Prove paths whenever that is due, until cancelled."""
        while True:
            views = self._pool.views()
            self._proofs.forget_all_but(frozenset(view.key for view in views))
            wanted = wanted_paths(views)
            config = self._config
            path = self._proofs.next_due(wanted, time.monotonic(), config.interval_s, config.retry_s)
            if path is not None:
                await self._prove(path)
            self._note_completeness()
            self._report()
            if path is None:
                is_urgent = not self.ready or self._proofs.has_failure(wanted)
                await self._pool.wait_for_change(config.retry_s if is_urgent else config.interval_s)

    async def _prove(self, path: Path) -> None:
        begun = time.monotonic()
        unique = secrets.token_hex(8)
        request = GenerationRequest(
            request_id=f"canary-{unique}",
            prompt_token_ids=self._prompt_token_ids,
            sampling=SamplingParams(max_tokens=_NUM_TOKENS, temperature=0.0, ignore_eos=True),
            cache_salt=unique,
            timeout_s=self._config.timeout_s,
        )
        try:
            async with await self._dispatcher.probe(request, path) as generation:
                async for _ in generation:
                    pass
        except (AdmissionRefused, GenerationFailed, InvalidRequest) as error:
            logger.debug("the canary failed on %s: %s", _names(path), error)
            if not isinstance(error, InvalidRequest) and error.code in _SAYS_NOTHING:
                await asyncio.sleep(self._config.retry_s)
                return
        if not self._proofs.is_proven_since(path, begun):
            self._proofs.note_failure(path, time.monotonic())

    def _num_ready(self) -> tuple[int, int]:
        are_decode = [view.is_decode for view in self._pool.views() if view.is_ready]
        return sum(are_decode), len(are_decode) - sum(are_decode)

    def _note_completeness(self) -> None:
        if self._has_been_complete or self.missing_nodes() is not None:
            return
        nodes = frozenset(key for path in wanted_paths(self._pool.views()) for key in path)
        self._has_been_complete = self._proofs.covers(nodes)

    def _report(self) -> None:
        if self.ready == self._was_ready:
            return
        self._was_ready = self.ready
        if self.ready:
            logger.info("ready: a token has passed the whole path")
        else:
            logger.warning("not ready: no token can be shown to pass the whole path")


def _names(path: Path) -> str:
    return " and ".join(key.node_id for key in path)
