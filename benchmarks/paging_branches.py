"""What sharing and copying on write save when a prompt has several outputs: parallel samples and beams, on the engine.

    .venv/bin/python benchmarks/paging_branches.py [--model NAME] [--prompt N] [--output N] [--json FILE]

Prints a Markdown table, and writes the same numbers as JSON. After every step the blocks in use are counted, and the
entries of all block tables: the blocks that the same sequences would hold if none were shared. The saving is one minus
the ratio of the sums over all steps (Kwon et al. 2023, PagedAttention, section 6.3, define it alike).
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from amounts import above_zero
from outputs import output_file

from pdserve.engine.beam_batch import run_beam_searches
from pdserve.engine.beam_search import BeamSearchParams
from pdserve.engine.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.engine.model_source import resolve_model
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.sequence import SequenceSpec
from pdserve.engine.step_output import StepOutput
from pdserve.engine.tokenizer import Tokenizer

_TEXT = """The harbour had been empty for years when the first of the boats came back. Nobody on the quay knew the man
at the helm, and he did not wave. He tied his boat to the ring under the steps, looked up at the windows of the customs
house, and began to unload crates that were marked in a language which none of the children could read. """
_BLOCK_SIZE = 16
_MAX_SEQS = 16


@dataclass(frozen=True, slots=True)
class Saving:
    """One row: blocks in use and entries of block tables, summed over the steps, and the largest use."""

    kind: str
    num_sequences: int
    num_prompt_tokens: int
    num_output_tokens: int
    blocks_in_use: int
    table_entries: int
    most_blocks: int

    @property
    def ratio(self) -> float:
        """The part of the blocks that sharing saves."""
        return 1 - self.blocks_in_use / self.table_entries


class WatchedEngine(Engine):
    """An engine whose blocks are counted after each step."""

    counts: list[tuple[int, int]]

    def step(self) -> list[StepOutput]:
        """Run one step and count."""
        outputs = super().step()
        self.counts.append((self.pool.usage().in_use, self.pool.num_table_entries))
        return outputs


def measure_samples(engine: WatchedEngine, prompt: tuple[int, ...], n: int, num_output: int) -> Saving:
    """Sample `n` outputs of one prompt."""
    sampling = SamplingParams(max_tokens=num_output, n=n, seed=1, ignore_eos=True)
    engine.counts = []
    engine.add_branches([SequenceSpec(f"sample-{i}", prompt, sampling.branch(i)) for i in range(n)])
    while engine.scheduler.has_work:
        engine.step()
    return _saving("n", n, len(prompt), num_output, engine)


def measure_beams(engine: WatchedEngine, prompt: tuple[int, ...], width: int, num_output: int) -> Saving:
    """Search with `width` beams."""
    engine.counts = []
    list(run_beam_searches(engine, [prompt], BeamSearchParams(width, num_output, ignore_eos=True), _MAX_SEQS))
    return _saving("beams", width, len(prompt), num_output, engine)


def _saving(kind: str, num_sequences: int, num_prompt: int, num_output: int, engine: WatchedEngine) -> Saving:
    in_use, entries = zip(*engine.counts, strict=True)
    return Saving(kind, num_sequences, num_prompt, num_output, sum(in_use), sum(entries), max(in_use))


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompt", type=above_zero(int), default=250, help="tokens of the prompt")
    parser.add_argument("--output", type=above_zero(int), default=64, help="tokens of each output")
    parser.add_argument("--json", type=output_file, help="where to write the numbers")
    options = parser.parse_args()
    rows = print_savings(resolve_model(options.model, progress=print), options.prompt, options.output)
    if options.json is not None:
        options.json.write_text(json.dumps([{**asdict(row), "saved": row.ratio} for row in rows], indent=2) + "\n")


def print_savings(model_dir: Path, num_prompt: int, num_output: int) -> list[Saving]:
    """Measure n and beams of 2, 4 and 8, print the table, and return its rows."""
    tokens = Tokenizer.load(model_dir).encode(_TEXT * (1 + num_prompt // 64))
    prompt = tuple(tokens[:num_prompt])
    config = EngineConfig(
        model_dir=model_dir,
        block_size=_BLOCK_SIZE,
        num_blocks=1024,
        max_num_seqs=_MAX_SEQS,
        enable_prefix_cache=False,
    )
    engine = WatchedEngine.load(config)
    measures = (measure_samples, measure_beams)
    rows = [measure(engine, prompt, n, num_output) for measure in measures for n in (2, 4, 8)]
    print(f"prompt {len(prompt)} tokens, output {num_output}, blocks of {_BLOCK_SIZE}\n")
    print("| | sequences | blocks in use, mean | without sharing | most in use | saved |\n|---|---|---|---|---|---|")
    for row in rows:
        mean, unshared = row.blocks_in_use / num_output, row.table_entries / num_output
        print(
            f"| {row.kind} | {row.num_sequences} | {mean:.1f} | {unshared:.1f} | {row.most_blocks} | {row.ratio:.1%} |"
        )
    return rows


if __name__ == "__main__":
    main()
