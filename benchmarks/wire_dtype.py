"""What the dtype in which KV blocks travel does to logits, and what zstd makes of the blocks: two tables.

    .venv/bin/python benchmarks/wire_dtype.py [MODEL_DIR] [--prompt 512] [--output 32] [--texts 4]

Stretches of tests/data/alice.txt go through transformers in float32: a prompt fills a cache, its keys and values travel
in each dtype (there and back, by kvtransfer's own conversion), and what follows is scored on that cache. The second
table compresses them in blocks of 16 tokens, and says below which rate of a link `--wire-compression auto` does so.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from amounts import above_zero
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from pdserve.engine.model_source import resolve_model
from pdserve.kvtransfer.encoding import compress
from pdserve.kvtransfer.rows import convert_rows

TEXT = Path(__file__).parents[1] / "tests" / "data" / "alice.txt"
DTYPES = ("float32", "bfloat16", "float16", "int8")
BLOCK_SIZE = 16
Layers = list[tuple[torch.Tensor, torch.Tensor]]  # K, V [1, num_kv_heads, num_tokens, head_dim]


def main() -> None:
    """Measure and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a model directory; default: the demo model")
    parser.add_argument("--prompt", type=above_zero(int), default=512)
    parser.add_argument("--output", type=above_zero(int), default=32)
    parser.add_argument("--texts", type=above_zero(int), default=4)
    arguments = parser.parse_args()
    model_dir = resolve_model(arguments.model, progress=print)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    length = arguments.prompt + arguments.output
    token_ids = AutoTokenizer.from_pretrained(model_dir).encode(TEXT.read_text())[: arguments.texts * length]
    texts = torch.tensor(token_ids).reshape(-1, 1, length)
    with torch.inference_mode():
        layers = [_prompt_cache(model, text[:, : arguments.prompt]) for text in texts]
        scored = {
            dtype: torch.cat(
                [
                    _logits(model, cache, text[:, arguments.prompt :], dtype)
                    for cache, text in zip(layers, texts, strict=True)
                ]
            )
            for dtype in DTYPES
        }
    _print_logits(scored)
    _print_compression(layers[0])


def _prompt_cache(model: Any, prompt: torch.Tensor) -> Layers:
    cache = model(prompt, past_key_values=DynamicCache(), use_cache=True).past_key_values
    return [(layer.keys, layer.values) for layer in cache.layers]


def _logits(model: Any, layers: Layers, output: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return the logits of each token of the output on a prompt that travelled in a dtype."""
    cache = DynamicCache()
    for number, (keys, values) in enumerate(layers):
        cache.update(_travelled(keys, dtype), _travelled(values, dtype), number)
    logits: torch.Tensor = model(output, past_key_values=cache).logits[0]
    return logits


def _travelled(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    return torch.from_numpy(convert_rows(_rows(tensor, dtype), dtype, "float32").view("<f4"))


def _rows(tensor: torch.Tensor, dtype: str) -> Any:
    return convert_rows(np.ascontiguousarray(tensor.numpy()).view(np.uint8), "float32", dtype)


def _print_logits(scored: dict[str, torch.Tensor]) -> None:
    exact = scored["float32"]
    spread = exact.std(dim=1).mean().item()
    print(f"{len(exact)} tokens scored; the standard deviation of a token's logits is {spread:.2f}\n")
    print(
        "| on the wire | largest change of a logit | mean | mean KL divergence | same greedy token |\n"
        "|---|---|---|---|---|"
    )
    for dtype, logits in scored.items():
        change = (logits - exact).abs()
        divergence = torch.nn.functional.kl_div(
            logits.log_softmax(1), exact.log_softmax(1), log_target=True, reduction="batchmean"
        )
        same = (logits.argmax(1) == exact.argmax(1)).float().mean().item()
        print(f"| {dtype} | {change.max():.4f} | {change.mean():.5f} | {abs(divergence):.2e} | {same:.1%} |")


def _print_compression(layers: Layers) -> None:
    print("\n| dtype | zstd leaves | MB a CPU second | auto below MB/s of link |\n|---|---|---|---|")
    stacked = torch.stack([torch.cat(pair) for pair in layers])  # [num_layers, 2, num_kv_heads, num_tokens, head_dim]
    for dtype in DTYPES:
        rows = _rows(stacked, dtype)
        blocks = [
            memoryview(rows[:, :, :, start : start + BLOCK_SIZE].tobytes())
            for start in range(0, rows.shape[3], BLOCK_SIZE)
        ]
        started_at = time.process_time()
        num_bytes = sum(compress(block).nbytes for block in blocks)
        speed = rows.nbytes / (time.process_time() - started_at)
        ratio = num_bytes / rows.nbytes
        border = max(0.0, (0.9 - ratio) * speed)  # kvtransfer/compression.py: link / compressor + ratio < 0.9
        print(f"| {dtype} | {ratio:.1%} | {speed / 1e6:.0f} | {f'{border / 1e6:.0f}' if border else 'never'} |")


if __name__ == "__main__":
    main()
