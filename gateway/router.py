"""Where an attempt runs. Pure: from the last word of each node to a plan."""

from dataclasses import dataclass

from pdserve.control.messages import NodeInfo
from pdserve.gateway.dispatch_config import DispatchConfig
from pdserve.gateway.generation import Route
from pdserve.gateway.node_view import NodeKey, NodeView, num_blocks_for
from pdserve.gateway.prefix_affinity import PrefixAffinity, block_digests


@dataclass(frozen=True, slots=True)
class RouteFacts:
    """What routing has to know of an attempt.

    `model_digest` binds a migrated request to the weights it began with. `avoided` nodes failed this request
    before: such a decode node is chosen only if there is no other, such a prefill node not at all.
    """

    token_ids: tuple[int, ...]  # prompt and the output so far
    max_len: int  # tokens, prompt + longest output
    cache_salt: str
    model_digest: str | None = None
    avoided: frozenset[NodeKey] = frozenset()


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """Who decodes, and who prefills: None is the decode node itself."""

    decode: NodeInfo
    prefill: NodeInfo | None

    @property
    def nodes(self) -> tuple[NodeKey, ...]:
        """Return the nodes of the plan, the decode node first."""
        infos = (self.decode,) if self.prefill is None else (self.decode, self.prefill)
        return tuple(NodeKey(info.node_id, info.incarnation) for info in infos)

    @property
    def route(self) -> Route:
        """Return its name, as long as it is the first plan of its request."""
        return Route.LOCAL if self.prefill is None else Route.DISAGGREGATED


def choose(
    facts: RouteFacts, views: tuple[NodeView, ...], affinity: PrefixAffinity, config: DispatchConfig
) -> RoutePlan | None:
    """Return where to run, or None when no decode node can take it.

    The decode node comes first: one with room, then the one with the least to do, where a cached prefix is
    worth some running sequences. Then the prefill node of the same weights that would be done first.
    """
    ready = [view for view in views if view.is_ready and _fits(facts, view)]
    digests = {
        size: block_digests(facts.token_ids, size, facts.cache_salt)
        for size in {view.info.block_size for view in ready if view.is_decode}
    }

    def decode_cost(view: NodeView) -> tuple[bool, bool, float, NodeKey]:
        num_matched = affinity.num_matched(view.key, digests[view.info.block_size])
        cached_part = num_matched / max(1, len(digests[view.info.block_size]))
        has_no_room = view.num_available_blocks < num_blocks_for(len(facts.token_ids) + 1, view.info.block_size)
        load = view.num_sequences - config.affinity_weight * cached_part
        return view.key in facts.avoided, has_no_room, load, view.key

    decode = min((view for view in ready if view.is_decode), key=decode_cost, default=None)
    if decode is None:
        return None
    prefill = None
    if len(facts.token_ids) >= config.min_disaggregated_tokens:
        digest = decode.info.model_digest
        prefill = min(
            (view for view in ready if view.info.model_digest == digest and _may_prefill(facts, view)),
            key=lambda view: _prefill_cost(facts, view),
            default=None,
        )
    return RoutePlan(decode.info, prefill.info if prefill else None)


def _fits(facts: RouteFacts, view: NodeView) -> bool:
    # A prefill node holds the sequence up to its first sampled token only.
    info = view.info
    num_held = facts.max_len if view.is_decode else len(facts.token_ids)
    is_same_model = facts.model_digest in (None, info.model_digest)
    return (
        is_same_model
        and facts.max_len <= info.max_model_len
        and num_blocks_for(num_held, info.block_size) <= info.num_blocks
    )


def _may_prefill(facts: RouteFacts, view: NodeView) -> bool:
    # After one failure the decode node is the surer place: nothing has to travel.
    return not view.is_decode and view.key not in facts.avoided


def _prefill_cost(facts: RouteFacts, view: NodeView) -> tuple[float, int, NodeKey]:
    # A node that was never measured is taken to be idle: its first prompt measures it.
    wait_s = view.prefill_wait_s(len(facts.token_ids)) or 0.0
    return wait_s, view.num_open_attempts, view.key
