"""What blocks are good for, measured on the engine: memory used rather than reserved, and tokens not computed again.

    .venv/bin/python benchmarks/paging.py [--requests N] [--context N] [--slots N] [--lengths FILE]

Prints three Markdown tables. The first runs requests with the lengths of a public trace through the engine and
counts, at every step, the tokens that are held against the slots of the blocks in use, and against what the same
requests would have reserved as runs of `--context` tokens. The second generates n tokens with the KV cache and by
computing the whole sequence again for each token, and counts keys and values that were computed. Their model is
random and tiny: memory and counts do not depend on weights. The third is that of `paging_branches.py`: blocks saved
by copy-on-write for n and beams, on the demo model. `--lengths` takes any CSV file with two columns, tokens of prompt
and of output, such as the traces of AzurePublicDataset with their timestamps cut off.
"""

import argparse
import csv
import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from amounts import above_zero
from paging_branches import print_savings
from safetensors.torch import save_file

from pdserve.engine.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.engine.model_source import resolve_model
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.sequence import SequenceSpec

_LENGTHS = Path(__file__).parent / "data" / "azure_conversation_2023_lengths.csv"
_BLOCK_SIZE = 16
_VOCAB, _HIDDEN, _INNER, _HEADS = 128, 32, 64, 2


@dataclass(slots=True)
class Held:
    """Sums over all steps of a run."""

    num_steps: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    num_slots: int = 0
    num_reserved: int = 0

    def add(self, num_sequences: int, num_tokens: int, num_slots: int, context: int) -> None:
        """Count what is held after a step."""
        self.num_steps += 1
        self.num_sequences += num_sequences
        self.num_tokens += num_tokens
        self.num_slots += num_slots
        self.num_reserved += num_sequences * context


def measure_memory(model_dir: Path, lengths: Sequence[tuple[int, int]], context: int, num_slots: int) -> Held:
    """Run requests of these (prompt, output) lengths, all waiting from the start, in `num_slots` slots of KV."""
    engine = _engine(model_dir, num_slots // _BLOCK_SIZE, context)
    generator, held = random.Random(0), Held()
    computed: dict[str, int] = {}
    for index, (num_prompt, num_output) in enumerate(lengths):
        prompt = tuple(generator.randrange(_VOCAB) for _ in range(num_prompt))
        engine.add(SequenceSpec(str(index), prompt, _sampling(num_output)))
    while engine.scheduler.has_work:
        for output in engine.step():
            computed[output.seq_id] = output.num_computed_tokens
            if output.finish_reason is not None:
                del computed[output.seq_id]
        running = {seq_id: num for seq_id, num in computed.items() if engine.scheduler.block_table(seq_id)}
        held.add(len(running), sum(running.values()), engine.pool.usage().in_use * _BLOCK_SIZE, context)
    return held


def count_computed(model_dir: Path, num_tokens: int, has_cache: bool) -> tuple[int, float]:
    """Return how many key and value vectors a layer computed for `num_tokens` after one of prompt, and the seconds."""
    engine = _engine(model_dir, 256, 2048)
    started, total = time.perf_counter(), 0
    if has_cache:
        total = 2 * _run(engine, (1,), num_tokens)[0]
    else:
        sequence: tuple[int, ...] = (1,)
        for _ in range(num_tokens):
            num_computed, token_ids = _run(engine, sequence, 1)
            total += 2 * num_computed
            sequence += token_ids
    return total, time.perf_counter() - started


def _run(engine: Engine, prompt: tuple[int, ...], num_output: int) -> tuple[int, tuple[int, ...]]:
    engine.add(SequenceSpec("one", prompt, _sampling(num_output)))
    num_computed, token_ids = 0, []
    while engine.scheduler.has_work:
        for output in engine.step():
            num_computed = output.num_computed_tokens
            if output.token is not None and output.token.token_id is not None:
                token_ids.append(output.token.token_id)
    return num_computed, tuple(token_ids)


def _engine(model_dir: Path, num_blocks: int, context: int) -> Engine:
    config = EngineConfig(
        model_dir=model_dir,
        block_size=_BLOCK_SIZE,
        num_blocks=num_blocks,
        max_model_len=context,
        max_num_seqs=256,
        enable_prefix_cache=False,
    )
    return Engine.load(config)


def _sampling(num_output: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True, seed=0)


def tiny_checkpoint(folder: Path, context: int) -> Path:
    """Write a Llama of one layer with random weights."""
    config = {
        "model_type": "llama",
        "vocab_size": _VOCAB,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": 1,
        "max_position_embeddings": context,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator, size = torch.Generator().manual_seed(0), _HIDDEN // _HEADS
    layer = {
        "self_attn.q_proj": (_HIDDEN, _HIDDEN),
        "self_attn.k_proj": (size, _HIDDEN),
        "self_attn.v_proj": (size, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, _HIDDEN),
        "mlp.gate_proj": (_INNER, _HIDDEN),
        "mlp.up_proj": (_INNER, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, _INNER),
    }
    shapes = {"model.embed_tokens.weight": (_VOCAB, _HIDDEN)}
    shapes |= {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}
    tensors = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    norms = ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm")
    tensors |= {f"model.{name}.weight": torch.ones(_HIDDEN) for name in norms}
    save_file(tensors, folder / "model.safetensors")
    return folder


def read_lengths(path: Path) -> Iterator[tuple[int, int]]:
    """Yield (prompt, output) lengths; lines that do not begin with a number are passed over."""
    with path.open() as file:
        for row in csv.reader(file):
            if row and row[0].isdigit():
                yield int(row[0]), int(row[1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=above_zero(int), default=200)
    parser.add_argument(
        "--context", type=above_zero(int), default=8192, help="tokens that preallocation reserves for each request"
    )
    parser.add_argument("--slots", type=above_zero(int), default=32_768, help="tokens for which there is memory")
    parser.add_argument("--lengths", type=Path, default=_LENGTHS)
    options = parser.parse_args()
    lengths = [each for each in read_lengths(options.lengths) if sum(each) <= options.context][: options.requests]
    with tempfile.TemporaryDirectory() as folder:
        model_dir = tiny_checkpoint(Path(folder), options.context)
        held = measure_memory(model_dir, lengths, options.context, options.slots)
        print_memory(held, len(lengths), options.context, options.slots)
        print("\n| tokens | K and V computed with the cache | without | times as many | times as long |")
        print("|---|---|---|---|---|")
        for num_tokens in (16, 64, 256):
            (cached, cached_s), (repeated, repeated_s) = (
                count_computed(model_dir, num_tokens, has) for has in (True, False)
            )
            print(
                f"| {num_tokens} | {cached:,} | {repeated:,} | {repeated / cached:.1f} | {repeated_s / cached_s:.1f} |"
            )
    print()
    print_savings(resolve_model("demo", progress=print), num_prompt=250, num_output=64)


def print_memory(held: Held, num_requests: int, context: int, num_slots: int) -> None:
    """Print the table of memory."""
    print(f"{num_requests} requests in {num_slots:,} slots, {held.num_steps:,} steps\n")
    print("| | memory in use that holds tokens | requests at a time |\n|---|---|---|")
    reserved = held.num_tokens / held.num_reserved
    print(f"| {context:,} reserved for each request | {reserved:.1%} | {num_slots // context} |")
    average = held.num_sequences / held.num_steps
    print(f"| blocks of {_BLOCK_SIZE} | {held.num_tokens / held.num_slots:.1%} | {average:.1f} on average |")


if __name__ == "__main__":
    main()
