"""Routing, affinity and admission: pure decisions over scripted facts."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.control.messages import BlockCounts, NodeInfo, NodeLoad, NodeRole, TransferCounts
from pdserve.engine.errors import InvalidRequest
from pdserve.engine.sampling_params import SamplingParams
from pdserve.gateway.admission import GatewayLoad, admit, estimate_ttft_s, output_limit
from pdserve.gateway.dispatch_config import DispatchConfig
from pdserve.gateway.errors import AdmissionRefused
from pdserve.gateway.generation import GenerationRequest
from pdserve.gateway.node_view import AttemptCost, NodeKey, NodeView
from pdserve.gateway.prefix_affinity import PrefixAffinity, block_digests
from pdserve.gateway.router import RouteFacts, choose

CONFIG = DispatchConfig()
PROMPT = tuple(range(20))
FACTS = RouteFacts(token_ids=PROMPT, max_len=30, cache_salt="")


def node(
    node_id: str,
    role: NodeRole = NodeRole.DECODE,
    *,
    running: int = 0,
    waiting_tokens: int = 0,
    rate: float | None = None,
    free: int = 64,
    is_ready: bool = True,
    digest: str = "abc",
    max_model_len: int = 128,
    num_blocks: int = 64,
    pending: AttemptCost = AttemptCost(0, 0),  # noqa: B008 - frozen
    num_open_attempts: int = 0,
) -> NodeView:
    info = NodeInfo(node_id, role, "one", "tcp://h:1", "tcp://h:2", "tiny", digest, max_model_len, 4, num_blocks, "0")
    blocks = BlockCounts(num_blocks, free, 0, num_blocks - free, 0)
    load = NodeLoad(is_ready, running, 0, waiting_tokens, rate, 0.0, blocks, TransferCounts(0, 0, 0, 0, 0))
    return NodeView(info, load, is_ready, 0.0, num_open_attempts, pending)


def prefill(node_id: str, **facts: object) -> NodeView:
    return node(node_id, NodeRole.PREFILL, **facts)


def route(*views: NodeView, facts: RouteFacts = FACTS, affinity: PrefixAffinity | None = None):
    plan = choose(facts, views, affinity or PrefixAffinity(), CONFIG)
    return plan and (plan.decode.node_id, plan.prefill and plan.prefill.node_id)


def test_without_a_decode_node_there_is_no_plan() -> None:
    assert route(prefill("p")) is None
    assert route(prefill("p"), node("d", is_ready=False)) is None


def test_a_ready_prefill_node_is_used_else_the_decode_node_does_it() -> None:
    assert route(node("d"), prefill("p")) == ("d", "p")
    assert route(node("d"), prefill("p", is_ready=False)) == ("d", None)


def test_a_short_prompt_may_be_configured_to_stay_local() -> None:
    config = DispatchConfig(min_disaggregated_tokens=21)

    plan = choose(FACTS, (node("d"), prefill("p")), PrefixAffinity(), config)

    assert plan is not None and plan.prefill is None


def test_room_comes_before_few_sequences() -> None:
    assert route(node("a", running=0, free=2), node("b", running=9)) == ("b", None)


def test_what_was_just_sent_counts_as_taken() -> None:
    taken = node("a", pending=AttemptCost(0, 62), num_open_attempts=1)

    assert route(taken, node("b", running=1)) == ("b", None)


def test_the_least_busy_decode_node_is_chosen() -> None:
    assert route(node("a", running=3), node("b", running=1)) == ("b", None)
    assert route(node("a", num_open_attempts=3), node("b", running=1)) == ("b", None)


def test_a_cached_prefix_outweighs_some_sequences_but_not_many() -> None:
    affinity = PrefixAffinity()
    affinity.record(NodeKey("b", "one"), block_digests(PROMPT, 4, ""))

    assert route(node("a"), node("b", running=3), affinity=affinity) == ("b", None)
    assert route(node("a"), node("b", running=5), affinity=affinity) == ("a", None)


def test_the_prefill_node_that_would_be_done_first_is_chosen() -> None:
    slow = prefill("p1", waiting_tokens=100, rate=10.0)
    fast = prefill("p2", waiting_tokens=1000, rate=1000.0)

    assert route(node("d"), slow, fast) == ("d", "p2")
    assert route(node("d"), slow, fast, prefill("p3")) == ("d", "p3")


def test_both_ends_have_the_same_weights() -> None:
    assert route(node("d"), prefill("p", digest="other")) == ("d", None)


def test_a_migrated_request_stays_with_its_weights() -> None:
    facts = dataclasses.replace(FACTS, model_digest="other")

    assert route(node("a"), node("b", digest="other", running=9), facts=facts) == ("b", None)
    assert route(node("a"), facts=facts) is None


def test_a_node_that_failed_the_request_is_the_last_choice_to_decode_and_none_to_prefill() -> None:
    facts = dataclasses.replace(FACTS, avoided=frozenset({NodeKey("a", "one"), NodeKey("p1", "one")}))

    views = (node("a"), node("b", running=9), prefill("p1"), prefill("p2", waiting_tokens=99, rate=1.0))

    assert route(*views, facts=facts) == ("b", "p2")
    assert route(views[0], views[2], facts=facts) == ("a", None)


def test_a_node_too_small_for_the_request_is_not_chosen() -> None:
    assert route(node("a", num_blocks=7, free=7), node("b", running=9)) == ("b", None)
    assert route(node("a", max_model_len=29)) is None


@given(
    st.lists(
        st.builds(
            node,
            node_id=st.sampled_from("abcdef"),
            role=st.sampled_from(NodeRole),
            running=st.integers(0, 9),
            free=st.integers(0, 64),
            rate=st.none() | st.floats(0, 1e4),
            is_ready=st.booleans(),
            digest=st.sampled_from(["abc", "other"]),
        ),
        max_size=8,
    )
)
def test_a_plan_is_made_of_ready_nodes_that_agree(views: list[NodeView]) -> None:
    plan = choose(FACTS, tuple(views), PrefixAffinity(), CONFIG)

    ready = [view for view in views if view.is_ready]
    if plan is None:
        assert not any(view.is_decode for view in ready)
        return
    assert any(view.info is plan.decode and view.is_decode for view in ready)
    partners = [view for view in ready if not view.is_decode and view.info.model_digest == plan.decode.model_digest]
    assert (plan.prefill is None) == (not partners)
    assert plan.prefill is None or any(view.info is plan.prefill for view in partners)


def test_a_digest_covers_salt_and_everything_before_it() -> None:
    plain = block_digests((1, 2, 3, 4, 5), 2, "")

    assert len(plain) == 2
    assert block_digests((1, 2, 3, 4), 2, "") == plain
    assert block_digests((9, 2, 3, 4), 2, "")[1] != plain[1]
    assert not set(block_digests((1, 2, 3, 4), 2, "tenant")) & set(plain)


def test_affinity_is_bounded_and_forgets_lost_nodes() -> None:
    affinity = PrefixAffinity(max_digests_per_node=3)
    key = NodeKey("a", "one")
    old, new = block_digests(PROMPT[:8], 4, "old"), block_digests(PROMPT[:8], 4, "new")
    affinity.record(key, old)
    affinity.record(key, new)

    assert affinity.num_matched(key, new) == 2
    assert affinity.num_matched(key, old) == 0

    affinity.keep(frozenset())
    assert affinity.num_matched(key, new) == 0


IDLE = GatewayLoad(num_inflight=0, mean_duration_s=None, is_draining=False)


def refusal(num_tokens: int, *views: NodeView, load: GatewayLoad = IDLE) -> AdmissionRefused:
    with pytest.raises(AdmissionRefused) as caught:
        admit(num_tokens, views, load, CONFIG)
    return caught.value


def test_an_idle_gateway_admits() -> None:
    admit(20, (node("d"), prefill("p", rate=100.0)), IDLE, CONFIG)


def test_too_many_in_flight_is_refused_with_the_time_until_one_ends() -> None:
    load = GatewayLoad(num_inflight=256, mean_duration_s=2560.0, is_draining=False)

    error = refusal(20, node("d"), load=load)

    assert (error.code, error.retry_after_s) == ("server_overloaded", 10.0)


def test_a_first_token_too_far_away_is_refused_with_the_time_until_it_is_not() -> None:
    busy = prefill("p", waiting_tokens=900, rate=10.0)

    error = refusal(100, node("d"), busy)

    assert (error.code, error.retry_after_s) == ("server_overloaded", 40.0)


def test_a_node_with_nothing_to_do_takes_a_prompt_however_slow_it_was() -> None:
    busy, idle = prefill("p1", waiting_tokens=900, rate=10.0), prefill("p2", rate=0.1)

    admit(100, (node("d"), idle), IDLE, CONFIG)
    admit(100, (node("d"), busy, idle), IDLE, CONFIG)

    assert refusal(100, node("d"), busy).retry_after_s == 40.0


def test_an_unmeasured_node_is_no_reason_to_refuse() -> None:
    busy = prefill("p1", waiting_tokens=900, rate=10.0)

    assert estimate_ttft_s(100, (node("d"), busy)) == 100.0
    assert estimate_ttft_s(100, (node("d"), busy, prefill("p2"))) is None


def _request(num_prompt: int, max_tokens: int | None) -> GenerationRequest:
    return GenerationRequest("r", (1,) * num_prompt, SamplingParams(max_tokens=max_tokens))


def test_the_output_limit_is_what_was_asked_or_what_fits() -> None:
    views = (node("d", max_model_len=100), prefill("p", max_model_len=50), node("e", num_blocks=10, free=10))

    assert output_limit(_request(20, 30), views) == 30
    assert output_limit(_request(20, None), views) == 30
    assert output_limit(_request(20, None), (node("e", num_blocks=10, free=10),)) == 20
    with pytest.raises(InvalidRequest, match="max_tokens"):
        output_limit(_request(20, 31), views)
    with pytest.raises(InvalidRequest, match="prompt"):
        output_limit(_request(50, None), views)


def test_without_a_decode_node_the_limit_is_unknown() -> None:
    with pytest.raises(AdmissionRefused) as caught:
        output_limit(_request(1, 1), (prefill("p"),))
    assert caught.value.code == "no_nodes"
