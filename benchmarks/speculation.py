"""Speculative decoding by prompt lookup on the demo model: tokens a second with and without, alternating, in one run.

    .venv/bin/python benchmarks/speculation.py [--threads N] [--rounds N] [--batch-sizes N,N]
        [--draft-model DIR]

Prints a Markdown table: for text that repeats what it was given and for text that does not, at several batch sizes,
medians over the rounds and their ratio (above 1: speculation is faster), the share of drafts accepted and the tokens
that a sequence gets a step. "adaptive" is as served, turned off where it does not pay; "always" is not. Both ways emit
the same tokens; the script stops if they do not.
"""

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from amounts import above_zero

from pdserve.engine.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.engine.model_source import resolve_model
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.sequence import SequenceSpec
from pdserve.engine.speculative_config import SpeculativeConfig
from pdserve.engine.tokenizer import Tokenizer

_CODE = '''def median(values: list[float]) -> float:
    """Return the middle value, or the mean of the two in the middle."""
    ordered = sorted(values)
    count = len(ordered)
    if count == 0:
        raise ValueError("no values")
    middle = count // 2
    if count % 2 == 1:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def spread(values: list[float]) -> float:
    """Return the difference of the largest and the smallest value."""
    if not values:
        raise ValueError("no values")
    return max(values) - min(values)


'''
_STORY = "Once upon a time, in a village at the foot of a mountain, there lived a clockmaker who"
_TEXTS = (("code to be repeated", _CODE * 2 + _CODE[:60], 0.0), ("a story, temperature 1", _STORY, 1.0))
_NUM_TOKENS = 96


@dataclass(frozen=True, slots=True)
class Measured:
    """One batch decoded: tokens after each sequence's first, seconds and steps they took."""

    token_ids: tuple[tuple[int, ...], ...]
    num_tokens: int
    num_steps: int
    seconds: float


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=above_zero(int), default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=above_zero(int), default=5)
    parser.add_argument("--batch-sizes", default="1,4,16")
    parser.add_argument("--draft-model", help="a directory: drafts by this model instead of prompt lookup")
    given = parser.parse_args()
    model_dir = resolve_model(None, progress=print)
    tokenizer = Tokenizer.load(model_dir)
    wanted: dict[str, object] = {"num_speculative_tokens": 4, "model": given.draft_model}
    print("| text | batch | drafts | tok/s without | tok/s with | with / without | accepted | tokens a step |")
    print("|---|---|---|---|---|---|---|---|")
    for is_adaptive in (True, False):
        speculative = SpeculativeConfig.from_mapping({**wanted, "adaptive": is_adaptive})
        config = EngineConfig(model_dir=model_dir, num_threads=given.threads, speculative_config=speculative)
        engine = Engine.load(config)
        for name, text, temperature in _TEXTS:
            prompt = tuple(tokenizer.encode(text))
            sampling = SamplingParams(max_tokens=_NUM_TOKENS, temperature=temperature, seed=0, ignore_eos=True)
            for batch_size in map(int, given.batch_sizes.split(",")):
                specs = [SequenceSpec(f"{index}", prompt, replace(sampling, seed=index)) for index in range(batch_size)]
                way = "adaptive" if is_adaptive else "always"
                _compare(engine, specs, given.rounds, f"| {name} | {batch_size} | {way} |")


def _compare(engine: Engine, specs: Sequence[SequenceSpec], num_rounds: int, beginning: str) -> None:
    plain = [replace(spec, sampling=replace(spec.sampling, speculative=False)) for spec in specs]
    _decode(engine, specs), _decode(engine, plain)  # fills the prefix cache; where adaptive, it learns
    before = engine.load_now().speculation
    pairs = [(_decode(engine, plain), _decode(engine, specs)) for _ in range(num_rounds)]
    after = engine.load_now().speculation
    assert before is not None and after is not None
    if any(without.token_ids != with_drafts.token_ids for without, with_drafts in pairs):
        raise SystemExit("speculation has changed the tokens: this is a defect")
    rates = [[measured.num_tokens / measured.seconds for measured in way] for way in zip(*pairs, strict=True)]
    ratio = statistics.median(fast / slow for slow, fast in zip(*rates, strict=True))
    num_drafted = after.num_drafted - before.num_drafted
    accepted = f"{(after.num_accepted - before.num_accepted) / num_drafted:.0%}" if num_drafted else "none drafted"
    last = pairs[-1][1]
    print(
        f"{beginning} {statistics.median(rates[0]):.0f} | {statistics.median(rates[1]):.0f} | {ratio:.2f} | {accepted} "
        f"| {last.num_tokens / last.num_steps / len(specs):.2f} |",
        flush=True,
    )


def _decode(engine: Engine, specs: Sequence[SequenceSpec]) -> Measured:
    token_ids: dict[str, list[int]] = {spec.seq_id: [] for spec in specs}
    for spec in specs:
        engine.add(spec)
    started, num_first, num_steps = time.monotonic(), 0, 0
    while engine.scheduler.has_work:
        for output in engine.step():
            if output.token is not None and output.token.token_id is not None:
                token_ids[output.seq_id].append(output.token.token_id)
        num_steps += 1
        if num_first == 0 and all(token_ids.values()):  # the prompts are behind us
            started, num_first, num_steps = time.monotonic(), sum(map(len, token_ids.values())), 0
    return Measured(
        tuple(map(tuple, token_ids.values())),
        sum(map(len, token_ids.values())) - num_first,
        num_steps,
        time.monotonic() - started,
    )


if __name__ == "__main__":
    main()
