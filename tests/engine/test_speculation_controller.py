"""Whether speculation pays, decided on synthetic costs."""

import pytest

from pdserve.engine.speculation_controller import DraftLength, SpeculationController, StepCost

_COST_WITHOUT = 0.010


def _run(controller: SpeculationController, num_steps: int, cost_with: float, num_sequences: int = 1) -> int:
    """Run steps at given seconds a token; return how many had drafts."""
    num_speculated = 0
    for _ in range(num_steps):
        had_drafts = controller.should_speculate(num_sequences)
        seconds = (cost_with if had_drafts else _COST_WITHOUT) * num_sequences
        controller.record(StepCost(num_sequences, num_sequences, seconds), had_drafts=had_drafts)
        num_speculated += had_drafts
    return num_speculated


def test_speculation_that_pays_stays_on() -> None:
    assert _run(SpeculationController(), 1000, cost_with=0.005) > 960


def test_speculation_that_costs_is_turned_off_and_tried_again_rarely() -> None:
    controller = SpeculationController()
    _run(controller, 100, cost_with=0.012)

    num_first, num_later = (_run(controller, 1000, cost_with=0.012) for _ in range(2))

    assert 0 < num_first < 20
    assert num_later < num_first


def test_a_change_of_costs_is_noticed_both_ways() -> None:
    controller = SpeculationController()
    _run(controller, 200, cost_with=0.012)

    _run(controller, 400, cost_with=0.004)
    assert _run(controller, 100, cost_with=0.004) > 90

    _run(controller, 400, cost_with=0.020)
    assert _run(controller, 100, cost_with=0.020) < 10


def test_a_slow_first_step_does_not_decide() -> None:
    controller = SpeculationController()
    controller.record(StepCost(1, 1, 0.030), had_drafts=True)

    _run(controller, 100, cost_with=0.003)

    assert _run(controller, 100, cost_with=0.003) > 90


def test_batch_sizes_are_judged_apart() -> None:
    controller = SpeculationController()

    for _ in range(20):
        _run(controller, 10, cost_with=0.005, num_sequences=1)
        _run(controller, 10, cost_with=0.020, num_sequences=16)

    assert _run(controller, 100, cost_with=0.005, num_sequences=1) > 90
    assert _run(controller, 100, cost_with=0.020, num_sequences=16) < 10


def test_steps_without_matches_count_as_steps_without_drafts() -> None:
    """N-gram lookup that finds nothing is neither praised nor blamed, and is asked again in the next step."""
    controller = SpeculationController()

    for _ in range(500):
        assert controller.should_speculate(1)
        controller.record(StepCost(1, 1, _COST_WITHOUT), had_drafts=False)


@pytest.mark.parametrize("accepted", [4, 0], ids=["all", "none"])
def test_length_follows_acceptance(accepted: int) -> None:
    length = DraftLength(4)
    drafted = []
    for _ in range(200):
        limit = length.next()
        drafted.append(limit)
        if limit:
            length.record(limit, min(accepted, limit))

    if accepted:
        assert drafted == [4] * 200
    else:
        assert drafted[:3] == [4, 2, 1]
        assert sum(drafted) < 20
        assert 1 in drafted[100:], "it is tried again, rarely"


def test_length_recovers_after_a_hit() -> None:
    length = DraftLength(8)
    for _ in range(3):
        length.record(length.next(), 0)
    assert length.next() == 1

    for _ in range(3):
        length.record(length.next(), length.next())

    assert length.next() == 8


def test_partial_acceptance_keeps_what_was_accepted() -> None:
    length = DraftLength(8)

    length.record(8, 5)

    assert length.next() == 5
