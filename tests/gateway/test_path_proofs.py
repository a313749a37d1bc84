"""Readiness as facts about paths: pure."""

import dataclasses

import pytest

from pdserve.control.messages import BlockCounts, NodeInfo, NodeLoad, NodeRole, TransferCounts
from pdserve.gateway.node_view import AttemptCost, NodeKey, NodeView
from pdserve.gateway.path_proofs import PathProofs, wanted_paths

D1, D2, P1, P2 = (NodeKey(node_id, "i") for node_id in ("d1", "d2", "p1", "p2"))
LOAD = NodeLoad(True, 0, 0, 0, None, 0.0, BlockCounts(9, 9, 0, 0, 0), TransferCounts(0, 0, 0, 0, 0))


def _view(key: NodeKey, digest: str = "m", is_ready: bool = True) -> NodeView:
    role = NodeRole.DECODE if key.node_id.startswith("d") else NodeRole.PREFILL
    info = NodeInfo(key.node_id, role, key.incarnation, "tcp://h:1", None, "m", digest, 512, 16, 9, "0.1.0")
    return NodeView(info, LOAD, is_ready, 0.0, 0, AttemptCost(0, 0))


def test_every_pair_is_wanted_and_each_node_comes_early() -> None:
    paths = wanted_paths([_view(key) for key in (D1, D2, P1, P2)])

    assert set(paths) == {(D1, P1), (D1, P2), (D2, P1), (D2, P2)}
    assert {key for path in paths[:2] for key in path} == {D1, D2, P1, P2}


def test_a_decode_node_alone_is_wanted_only_where_no_prefill_node_of_its_model_is_ready() -> None:
    assert wanted_paths([_view(D1)]) == ((D1,),)
    assert wanted_paths([_view(D1), _view(P1, is_ready=False)]) == ((D1,),)
    assert wanted_paths([_view(D1), _view(P1, digest="other")]) == ((D1,),)
    assert wanted_paths([_view(P1)]) == ()


def test_a_local_proof_counts_until_the_disaggregated_path_has_been_tried() -> None:
    proofs = PathProofs()
    proofs.note_proof((D1,), 1.0)

    assert proofs.holds([(D1, P1)], frozenset({D1, P1}))
    proofs.note_failure((D1, P1), 2.0)
    assert not proofs.holds([(D1, P1)], frozenset({D1, P1}))
    proofs.note_proof((D1, P1), 3.0)
    assert proofs.holds([(D1, P1)], frozenset({D1, P1}))


def test_one_broken_pair_does_not_end_readiness_and_is_tried_again_with_a_pause() -> None:
    wanted = [(D1, P1), (D2, P1)]
    proofs = PathProofs()
    assert proofs.next_due(wanted, 0.0, 30.0, 0.5) == (D1, P1)
    proofs.note_failure((D1, P1), 0.0)
    assert proofs.next_due(wanted, 0.1, 30.0, 0.5) == (D2, P1)
    proofs.note_proof((D2, P1), 0.1)

    assert proofs.holds(wanted, frozenset({D1, D2, P1}))
    assert proofs.has_failure(wanted)
    assert proofs.next_due(wanted, 0.2, 30.0, 0.5) is None
    assert proofs.next_due(wanted, 0.6, 30.0, 0.5) == (D1, P1)


def test_the_oldest_path_is_tried_when_none_was_used_lately() -> None:
    wanted = [(D1, P1), (D2, P1)]
    proofs = PathProofs()
    proofs.note_proof((D1, P1), 10.0)
    proofs.note_proof((D2, P1), 0.0)

    assert proofs.next_due(wanted, 39.0, 30.0, 0.5) is None
    assert proofs.next_due(wanted, 40.0, 30.0, 0.5) == (D2, P1)


@pytest.mark.parametrize("lost", [D1, P1])
def test_what_a_lost_node_has_proven_is_forgotten(lost: NodeKey) -> None:
    proofs = PathProofs()
    proofs.note_proof((D1, P1), 0.0)
    assert proofs.covers(frozenset({D1, P1}))

    proofs.forget_all_but(frozenset({D1, P1} - {lost}))
    restarted = dataclasses.replace(_view(lost).info, incarnation="j")

    assert not proofs.covers(frozenset({D1}))
    assert not proofs.holds([(D1, P1)], frozenset({NodeKey(lost.node_id, restarted.incarnation)}))
