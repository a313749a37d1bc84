"""Perplexity of a model on a public-domain text, for each dtype of the weights and of the cache, in one table.

    .venv/bin/python benchmarks/perplexity.py [--model demo] [--dtypes float32,bfloat16] [--kv-dtypes model,int8]

The text (tests/data/alice.txt: Lewis Carroll, Alice's Adventures in Wonderland, chapters I to IV) is cut into
windows of --window tokens, each scored on its own through the engine that serves. `model` as a KV dtype is what
the weights imply. The last column is the ratio to the first row, which should be float32.
"""

import argparse
import gc
import math
from pathlib import Path
from typing import Any

from amounts import above_zero

from pdserve.engine.llm import LLM
from pdserve.engine.sampling_params import SamplingParams

TEXT = Path(__file__).parents[1] / "tests" / "data" / "alice.txt"


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtypes", default="float32,bfloat16,float16,int8")
    parser.add_argument("--kv-dtypes", default="float32,bfloat16,float16,int8")
    parser.add_argument("--window", type=above_zero(int), default=1024)
    parser.add_argument(
        "--max-tokens", type=above_zero(int), default=1 << 30, help="score no more of the text than this"
    )
    parser.add_argument("--threads", type=above_zero(int))
    arguments = parser.parse_args()
    if min(arguments.window, arguments.max_tokens) < 2:
        parser.error("--window and --max-tokens: at least 2: the first token of a window is not scored")
    print("| weights | KV | perplexity | to the first row |\n|---|---|---|---|", flush=True)
    first: float | None = None
    for dtype in arguments.dtypes.split(","):
        for kv_dtype in arguments.kv_dtypes.split(","):
            kv_option = {} if kv_dtype == "model" else {"kv_cache_dtype": kv_dtype}
            llm = LLM(arguments.model, dtype=dtype, num_threads=arguments.threads, **kv_option)
            found = perplexity(llm, TEXT.read_text(), arguments.window, arguments.max_tokens)
            del llm
            gc.collect()
            first = found if first is None else first
            print(f"| {dtype} | {kv_dtype} | {found:.4f} | {found / first - 1:+.3%} |", flush=True)


def perplexity(llm: LLM, text: str, window: int, max_tokens: int) -> float:
    """Return exp of the mean negative log-likelihood of each token after the first of its window."""
    token_ids = llm.tokenizer.encode(text)[:max_tokens]
    windows = [token_ids[start : start + window] for start in range(0, len(token_ids), window)]
    scored = SamplingParams(max_tokens=0, temperature=0, prompt_logprobs=0)
    outputs: list[Any] = llm.generate(windows, scored, use_tqdm=False)
    if not all(output.finished for output in outputs):
        raise KeyboardInterrupt  # that of a part of the text is another figure
    logprobs = [score.logprob for output in outputs for score in (output.prompt_logprobs or ())[1:]]
    return math.exp(-sum(logprobs) / len(logprobs))


if __name__ == "__main__":
    main()
