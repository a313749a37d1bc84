"""What a load generator will ask: prompts as token ids, lengths and arrivals, from a seed or a trace; no network."""

import csv
import json
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from itertools import islice
from pathlib import Path

from pdserve.cli.errors import SettingError

# Ordinary words in every common vocabulary; the first ids are bytes and control tokens.
TOKEN_IDS = range(1_000, 30_000)
# The prefix blocks of a Mooncake trace stand for so many tokens.
_MOONCAKE_BLOCK = 512


class Arrivals(StrEnum):
    """How requests of an open loop are spaced."""

    POISSON = "poisson"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request; `arrives_at_s` counts from the start of the run, None means as soon as there is a place for it."""

    prompt: tuple[int, ...]
    num_output: int
    arrives_at_s: float | None = None


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of every request: a prefix that all share, the rest of the prompt, the output."""

    prompt: int
    output: int
    shared_prefix: int = 0


@dataclass(frozen=True, slots=True)
class TraceScale:
    """How a trace is fitted to a machine: lengths divided, gaps between arrivals multiplied, nothing else changed."""

    lengths: float = 1.0
    time: float = 1.0
    max_prompt: int = 8_192
    max_output: int = 1_024


def closed_loop(num_requests: int, lengths: Lengths, seed: int) -> tuple[PlannedRequest, ...]:
    """Return requests without arrival times: each is sent when an earlier one has ended."""
    chance = random.Random(seed)
    prefix = _tokens(chance, min(lengths.shared_prefix, lengths.prompt))
    rest = lengths.prompt - len(prefix)
    return tuple(PlannedRequest(prefix + _tokens(chance, rest), lengths.output) for _ in range(num_requests))


def open_loop(
    requests: Sequence[PlannedRequest], rate_per_s: float, arrivals: Arrivals, seed: int
) -> tuple[PlannedRequest, ...]:
    """Return the requests with arrival times; the first arrives at 0."""
    chance = random.Random(f"arrivals {seed}")
    planned, now = [], 0.0
    for request in requests:
        planned.append(PlannedRequest(request.prompt, request.num_output, now))
        now += chance.expovariate(rate_per_s) if arrivals is Arrivals.POISSON else 1 / rate_per_s
    return tuple(planned)


def read_trace(path: Path, num_requests: int, scale: TraceScale, seed: int) -> tuple[PlannedRequest, ...]:
    """Return the first requests of a trace: CSV of the Azure form, or JSON lines of the Mooncake form.

    Mooncake's `hash_ids` become runs of tokens: prompts that share ids share a prefix.

    Raises:
        SettingError: the file is missing or of another form.
    """
    found: list[PlannedRequest] = []
    try:
        with path.open(encoding="utf-8-sig") as file:
            rows = (
                _mooncake(file, scale, seed) if path.suffix == ".jsonl" else _azure(csv.DictReader(file), scale, seed)
            )
            found.extend(islice(rows, num_requests))
    except (OSError, KeyError, TypeError, ValueError, OverflowError, csv.Error) as error:
        place = "" if isinstance(error, OSError) else f"row {len(found) + 1}: "
        raise SettingError(
            f"trace {path}: {place}{type(error).__name__}: {error}; it must be a CSV with TIMESTAMP, ContextTokens, "
            "GeneratedTokens, or .jsonl with timestamp, input_length, output_length, hash_ids"
        ) from error
    if not found:
        raise SettingError(f"trace {path} is empty")
    first = found[0].arrives_at_s or 0.0
    return tuple(
        PlannedRequest(one.prompt, one.num_output, ((one.arrives_at_s or 0.0) - first) * scale.time) for one in found
    )


def _azure(rows: Iterable[dict[str, str]], scale: TraceScale, seed: int) -> Iterator[PlannedRequest]:
    chance = random.Random(seed)
    for row in rows:
        arrived = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        num_prompt = _scaled(int(row["ContextTokens"]), scale.lengths, scale.max_prompt)
        num_output = _scaled(int(row["GeneratedTokens"]), scale.lengths, scale.max_output)
        yield PlannedRequest(_tokens(chance, num_prompt), num_output, arrived)


def _mooncake(lines: Iterable[str], scale: TraceScale, seed: int) -> Iterator[PlannedRequest]:
    block = max(1, round(_MOONCAKE_BLOCK / scale.lengths))
    for row in map(json.loads, filter(str.strip, lines)):
        num_prompt = _scaled(int(row["input_length"]), scale.lengths, scale.max_prompt)
        num_output = _scaled(int(row["output_length"]), scale.lengths, scale.max_output)
        prompt: tuple[int, ...] = ()
        for hash_id in row["hash_ids"]:
            prompt += _tokens(random.Random(f"{seed} {hash_id}"), block)
        prompt += _tokens(random.Random(f"{seed} rest {row['hash_ids']}"), max(0, num_prompt - len(prompt)))
        arrives_at_s = float(row["timestamp"]) / 1e3
        if not math.isfinite(arrives_at_s):
            raise ValueError(f"timestamp {arrives_at_s} is no time")
        yield PlannedRequest(prompt[:num_prompt], num_output, arrives_at_s)


def _scaled(num_tokens: int, divisor: float, limit: int) -> int:
    if num_tokens < 0:
        raise ValueError(f"{num_tokens} tokens")
    return min(limit, max(1, round(num_tokens / divisor)))


def _tokens(chance: random.Random, count: int) -> tuple[int, ...]:
    return tuple(chance.choices(TOKEN_IDS, k=count))
