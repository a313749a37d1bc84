"""What a load asks is decided by the seed and the trace alone."""

import json
from pathlib import Path

import pytest

from pdserve.cli.errors import SettingError
from pdserve.cli.load_plan import Arrivals, Lengths, TraceScale, closed_loop, open_loop, read_trace


def test_the_seed_decides_every_token() -> None:
    lengths = Lengths(prompt=12, output=3)

    assert closed_loop(5, lengths, 1) == closed_loop(5, lengths, 1)
    assert closed_loop(5, lengths, 1) != closed_loop(5, lengths, 2)
    assert len({one.prompt for one in closed_loop(5, lengths, 1)}) == 5


def test_a_shared_prefix_is_all_that_prompts_share() -> None:
    plan = closed_loop(6, Lengths(prompt=40, output=1, shared_prefix=30), 3)

    assert len({one.prompt[:30] for one in plan}) == 1
    assert len({one.prompt[30:] for one in plan}) == 6
    assert {len(one.prompt) for one in plan} == {40}


def test_poisson_arrivals_have_the_rate_and_constant_ones_the_distance() -> None:
    requests = closed_loop(2_000, Lengths(1, 1), 0)

    poisson = [one.arrives_at_s for one in open_loop(requests, 4.0, Arrivals.POISSON, 7)]
    constant = [one.arrives_at_s for one in open_loop(requests, 4.0, Arrivals.CONSTANT, 7)]

    assert poisson == sorted(poisson, key=lambda at: at or 0.0)
    assert poisson[-1] == pytest.approx(2_000 / 4, rel=0.1)
    assert constant[:3] == [0.0, 0.25, 0.5]


def test_an_azure_trace_keeps_its_shape_when_scaled(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:04.4799600,80,8\n"
        "2023-11-16 18:17:09.9799600,16,1\n"
    )

    plan = read_trace(path, 2, TraceScale(lengths=8, time=10), 1)

    assert [(len(one.prompt), one.num_output) for one in plan] == [(601, 1), (10, 1)]
    assert [one.arrives_at_s for one in plan] == pytest.approx([0.0, 5.0], abs=1e-4)


def test_prompts_of_a_mooncake_trace_share_what_their_ids_share(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 1400, "output_length": 64, "hash_ids": [0, 1, 2]},
        {"timestamp": 1500, "input_length": 1400, "output_length": 64, "hash_ids": [0, 1, 3]},
        {"timestamp": 3000, "input_length": 512, "output_length": 128, "hash_ids": [9]},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))

    first, second, third = read_trace(path, 10, TraceScale(lengths=64), 1)

    assert len(first.prompt) == 22
    assert first.prompt[:16] == second.prompt[:16]
    assert first.prompt[16:] != second.prompt[16:]
    assert first.prompt[:8] != third.prompt
    assert (third.num_output, third.arrives_at_s) == (2, 3.0)


@pytest.mark.parametrize("content", ["", "a,b\n1,2\n", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n"])
def test_a_file_that_is_no_trace_is_refused_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.csv"
    path.write_text(content)

    with pytest.raises(SettingError, match=r"other\.csv"):
        read_trace(path, 1, TraceScale(), 1)


@pytest.mark.parametrize(
    ("name", "row", "said"),
    [
        ("bad.csv", "2023-11-16 18:15:47.0,ten,10", "row 2: ValueError"),
        ("bad.csv", "2023-11-16 18:15:47.0,-1,10", "row 2: ValueError: -1 tokens"),
        ("bad.csv", "2023-11-16 18:15:47.0", "row 2: TypeError"),
        ("bad.jsonl", '{"timestamp": 1,', "row 2: JSONDecodeError"),
        (
            "bad.jsonl",
            '{"timestamp": 1e999, "input_length": 5, "output_length": 5, "hash_ids": []}',
            "row 2: ValueError",
        ),
        ("bad.jsonl", '{"timestamp": 1, "input_length": 1e999, "output_length": 5, "hash_ids": []}', "row 2: Overflow"),
    ],
)
def test_a_row_that_cannot_be_asked_is_named(tmp_path: Path, name: str, row: str, said: str) -> None:
    good = {
        "bad.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,100,10",
        "bad.jsonl": '{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": []}',
    }[name]
    path = tmp_path / name
    path.write_text(f"{good}\n{row}\n")

    with pytest.raises(SettingError, match=said):
        read_trace(path, 2, TraceScale(), 1)


def test_an_empty_line_of_a_trace_is_no_row(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": []}\n\n')

    assert len(read_trace(path, 2, TraceScale(), 1)) == 1
