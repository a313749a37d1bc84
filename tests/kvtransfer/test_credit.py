import asyncio

from hypothesis import given
from hypothesis import strategies as st

from pdserve.kvtransfer.credit import CreditGate, CreditLedger


async def test_claims_are_served_in_order_and_never_beyond_the_credit():
    gate = CreditGate()
    first, second = gate.claim(10, 3), gate.claim(10, 1)

    gate.give(9)
    assert not first.done()
    gate.give(12)

    assert first.result() == 2
    assert not second.done()
    gate.give(9)
    assert second.result() == 1


async def test_a_claim_that_is_withdrawn_makes_way():
    gate = CreditGate()
    first, second = gate.claim(10, 1), gate.claim(5, 1)
    gate.give(5)
    assert not second.done()

    gate.withdraw(first, 10)

    assert second.result() == 1


async def test_credit_of_a_withdrawn_claim_goes_to_the_next():
    gate = CreditGate()
    gate.give(10)
    first = gate.claim(10, 1)
    second = gate.claim(10, 1)
    assert first.done() and not second.done()

    gate.withdraw(first, 10)

    assert second.result() == 1


async def test_credit_that_is_kept_is_not_handed_out_until_it_is_let_go():
    gate = CreditGate()
    gate.keep(20)
    gate.give(30)
    first, second = gate.claim(10, 3), gate.claim(10, 3)

    assert first.result() == 1
    assert not second.done() and gate.is_awaited
    gate.keep(0)
    assert second.result() == 2 and not gate.is_awaited


async def test_a_claim_takes_no_crumbs_while_more_is_to_come_back():
    gate = CreditGate()
    gate.give(11)
    taken = [gate.claim(1, 5) for _ in range(3)]
    assert [claim.result() for claim in taken[:2]] == [5, 5]
    assert not taken[2].done(), "one of eleven is a crumb"

    gate.give(1)
    assert taken[2].result() == 2


async def test_the_last_of_a_transfer_takes_the_little_it_needs():
    gate = CreditGate()
    gate.give(11)
    gate.claim(1, 10)

    assert gate.claim(1, 1).result() == 1


@given(
    st.integers(1, 60),
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 40)), min_size=1, max_size=30),
    st.randoms(use_true_random=False),
)
def test_every_claim_that_the_window_holds_is_served_once_enough_comes_back(window, wanted, random):
    async def run():
        gate = CreditGate()
        gate.give(window)
        waiting = [(gate.claim(min(unit, window), most), min(unit, window)) for unit, most in wanted]
        under_way = []
        while waiting:
            while waiting and waiting[0][0].done():
                claim, unit = waiting.pop(0)
                under_way.append(claim.result() * unit)
            assert sum(under_way) <= window
            assert under_way or not waiting, "everything is here, and somebody waits"
            if waiting:
                gate.give(under_way.pop(random.randrange(len(under_way))))

    asyncio.run(run())


@given(st.lists(st.tuples(st.sampled_from(["give", "claim", "withdraw"]), st.integers(1, 9)), max_size=30))
def test_no_byte_of_credit_is_lost_or_made(steps):
    async def run():
        gate, given_bytes, claims = CreditGate(), 0, []
        for step, number in steps:
            if step == "give":
                gate.give(number)
                given_bytes += number
            elif step == "claim":
                claims.append((gate.claim(number, 2), number))
            elif claims:
                gate.withdraw(*claims.pop(number % len(claims)))
        taken = sum(claim.result() * unit for claim, unit in claims if claim.done())
        assert taken <= given_bytes
        for claim, unit in claims:
            gate.withdraw(claim, unit)
        rest = gate.claim(1, 1_000)
        assert (rest.result() if rest.done() else 0) == given_bytes

    asyncio.run(run())


def test_a_ledger_refuses_what_goes_beyond_the_window():
    ledger = CreditLedger(10)

    assert ledger.charge(6)
    assert not ledger.charge(5)
    ledger.hand_back(6)
    assert ledger.charge(10)
