"""Windows and a warm prefix cache: cached blocks give what computing them again gives."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pdserve.engine.llm import LLM
from pdserve.engine.sampling_params import SamplingParams

_WINDOW = 8
_PROMPT_LENS = (_WINDOW - 1, _WINDOW, _WINDOW + 1, 2 * _WINDOW, 4 * _WINDOW, 6 * _WINDOW + 3)
_SAMPLING = SamplingParams(max_tokens=4 * _WINDOW, temperature=0.0, ignore_eos=True, seed=0)

_SHAPES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": _WINDOW},
    "gemma2": {"head_dim": 16, "sliding_window": _WINDOW},
    "gemma3_text": {"head_dim": 16, "sliding_window": _WINDOW, "sliding_window_pattern": 2},
    "mixtral": {"num_local_experts": 4, "sliding_window": _WINDOW},
}


@pytest.mark.parametrize("model_type", list(_SHAPES))
def test_greedy_tokens_equal_transformers_cold_and_warm(model_type: str, tiny_model: Any) -> None:
    """C154."""
    model_dir = tiny_model(model_type, **_SHAPES[model_type])
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 199, (length,), generator=generator).tolist() for length in _PROMPT_LENS]
    llm = LLM(model_dir, block_size=4, num_blocks=256, max_num_batched_tokens=16)
    expected = _reference(model_dir, prompts)

    cold = llm.generate(prompts, _SAMPLING, use_tqdm=False)
    warm = llm.generate(prompts, _SAMPLING, use_tqdm=False)

    assert [list(output.outputs[0].token_ids) for output in cold] == expected
    assert [list(output.outputs[0].token_ids) for output in warm] == expected
    assert warm[-1].num_cached_tokens > 5 * _WINDOW


def _reference(model_dir: Path, prompts: list[list[int]]) -> list[list[int]]:
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    continued = []
    for prompt in prompts:
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=_SAMPLING.max_tokens,
            min_new_tokens=_SAMPLING.max_tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        continued.append(ids[0, len(prompt) :].tolist())
    return continued
