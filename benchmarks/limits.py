"""How near the offline engine comes to what the machine can do: decode to the memory, prefill to the multipliers.

    .venv/bin/python benchmarks/limits.py [--model demo] [--dtype int8] [--kv-cache-dtype float32] [--threads N]

In every round, one after the other: the bandwidth of reading (the maximum of a tensor much larger than the caches), the
rate of the matrix products alone (512 rows through the model's own shapes), one stream that decodes, and a prompt. The
limit of a decoded token is all weights and its keys and values over the bandwidth, that of a prompt all its operations
over the rate of the products. Printed as a Markdown table of medians; the aim is 60 %.
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from amounts import above_zero

from pdserve.engine.llm import LLM
from pdserve.engine.memory_estimate import VALUE_BYTES
from pdserve.engine.model_source import resolve_model
from pdserve.engine.models.decoder_config import DecoderConfig
from pdserve.engine.models.model_dir import ModelDir
from pdserve.engine.sampling_params import SamplingParams
from pdserve.kernels.cpu import CpuKernels

_READ_BYTES = 512 * 2**20
_GEMM_ROWS = 512
_DECODED = 64
_FEWEST_PROMPT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Work:
    """What a model reads for a token and multiplies for a prompt, by its shape."""

    config: DecoderConfig
    weight_bytes: int  # of one weight
    kv_bytes: int  # of one value of the cache

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """[out_features, in_features] of the matrices of one layer."""
        c = self.config
        heads = c.num_heads * c.head_dim
        qkv = heads + 2 * c.num_kv_heads * c.head_dim
        return [
            (qkv, c.hidden_size),
            (c.hidden_size, heads),
            (2 * c.intermediate_size, c.hidden_size),
            (c.hidden_size, c.intermediate_size),
        ]

    @property
    def layer_weights(self) -> int:
        """Weights of all layers."""
        return self.config.num_layers * sum(rows * columns for rows, columns in self.matrices)

    def token_bytes(self, context_len: int) -> int:
        """Read for one decoded token: each weight once, with those of the output head, and the keys and values."""
        c = self.config
        kv_values = 2 * c.num_layers * c.num_kv_heads * c.head_dim * context_len
        return (self.layer_weights + c.vocab_size * c.hidden_size) * self.weight_bytes + kv_values * self.kv_bytes

    def prompt_operations(self, num_tokens: int) -> int:
        """Multiplications and additions for a prompt: matrices, causal attention, one row of logits."""
        c = self.config
        pairs = num_tokens * (num_tokens + 1) // 2
        attention = 4 * c.num_layers * c.num_heads * c.head_dim * pairs
        return 2 * self.layer_weights * num_tokens + attention + 2 * c.vocab_size * c.hidden_size


@dataclass(frozen=True, slots=True)
class Round:
    """What one round measured."""

    bandwidth: float  # bytes/s
    gemm_rate: float  # operations/s
    decode_rate: float  # tokens/s
    prefill_rate: float  # tokens/s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="int8", choices=["int8", "float32"])
    parser.add_argument("--kv-cache-dtype", choices=list(VALUE_BYTES))
    parser.add_argument("--threads", type=above_zero(int), default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=above_zero(int), default=3)
    parser.add_argument("--prompt-tokens", type=above_zero(int), default=1024)
    arguments = parser.parse_args()
    if arguments.prompt_tokens < _FEWEST_PROMPT_TOKENS:
        parser.error(f"--prompt-tokens: at least {_FEWEST_PROMPT_TOKENS}: an eighth of it is the stream's prompt")
    is_int8 = arguments.dtype == "int8"
    kernels = CpuKernels.load(arguments.threads, is_int8=is_int8)
    if kernels is None:
        raise SystemExit("the CPU kernels are not built: install a C++ compiler, then make setup")
    model_dir = ModelDir.open(resolve_model(arguments.model, progress=print))
    kv_dtype = arguments.kv_cache_dtype or ("bfloat16" if is_int8 else "float32")  # as auto has it
    work = Work(DecoderConfig.from_config(model_dir.config), 1 if is_int8 else 4, VALUE_BYTES[kv_dtype])
    options = {"dtype": arguments.dtype, "kv_cache_dtype": kv_dtype, "num_threads": arguments.threads}
    llm = LLM(arguments.model, enable_prefix_cache=False, **options)
    multiply = _gemm(kernels, work)
    memory = torch.ones(_READ_BYTES // 4)
    _generate(llm, arguments.prompt_tokens, 2)  # the first pass commits memory
    rounds = [
        _measure(llm, memory, multiply, arguments.prompt_tokens, arguments.threads) for _ in range(arguments.rounds)
    ]
    _print(rounds, work, arguments.prompt_tokens)
    print(f"\n{kernels.description}; {Path(arguments.model).name}, {arguments.dtype}, {arguments.rounds} rounds")


def _gemm(kernels: CpuKernels, work: Work) -> Callable[[], int]:
    """Return what multiplies rows by one layer's matrices and says how many operations that is."""
    layer = [(kernels.pack(torch.randn(shape)), 2 * torch.rand(_GEMM_ROWS, shape[1]) - 1) for shape in work.matrices]

    def multiply() -> int:
        for weight, rows in layer:
            kernels.linear(rows, weight, None)
        return 2 * _GEMM_ROWS * work.layer_weights // work.config.num_layers

    return multiply


def _measure(
    llm: LLM, memory: torch.Tensor, multiply: Callable[[], int], prompt_tokens: int, num_threads: int
) -> Round:
    torch.set_num_threads(num_threads)
    read_s = min(_seconds(memory.max) for _ in range(5))
    torch.set_num_threads(1)  # as the engine has it: the kernels have threads of their own
    num_operations = multiply()
    gemm_rate = num_operations / min(_seconds(multiply) for _ in range(5))
    prefill_s = _generate(llm, prompt_tokens, 1)
    first_s = _generate(llm, prompt_tokens // 8, 1)
    decode_s = _generate(llm, prompt_tokens // 8, 1 + _DECODED) - first_s
    return Round(memory.nbytes / read_s, gemm_rate, _DECODED / decode_s, prompt_tokens / prefill_s)


def _generate(llm: LLM, num_prompt_tokens: int, max_tokens: int) -> float:
    """Return the seconds that one request took, of random tokens so that nothing is cached."""
    prompt = [random.randrange(100, 1000) for _ in range(num_prompt_tokens)]
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    started = time.perf_counter()
    [output] = llm.generate([prompt], sampling, use_tqdm=False)
    if not output.finished:
        raise KeyboardInterrupt  # what was cut short would look fast
    return time.perf_counter() - started


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _print(rounds: list[Round], work: Work, prompt_tokens: int) -> None:
    context_len = prompt_tokens // 8 + _DECODED // 2
    token_bytes, operations = work.token_bytes(context_len), work.prompt_operations(prompt_tokens)
    decode = [each.decode_rate * token_bytes / each.bandwidth for each in rounds]
    prefill = [each.prefill_rate * operations / prompt_tokens / each.gemm_rate for each in rounds]
    print("| | of the machine | tokens/s | of the limit | each round |\n|---|---|---|---|---|")
    for name, unit, machine, rates, fractions in (
        ("decode, one stream", "GB/s read", [r.bandwidth for r in rounds], [r.decode_rate for r in rounds], decode),
        (
            f"prefill of {prompt_tokens:,}",
            "GOP/s of matrices",
            [r.gemm_rate for r in rounds],
            [r.prefill_rate for r in rounds],
            prefill,
        ),
    ):
        each = ", ".join(f"{fraction:.0%}" for fraction in fractions)
        print(
            f"| {name} | {statistics.median(machine) / 1e9:.1f} {unit} | {statistics.median(rates):.0f} |"
            f" {statistics.median(fractions):.0%} | {each} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
