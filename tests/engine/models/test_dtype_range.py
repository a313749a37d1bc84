"""Activations that fit float32 and not float16: served right by default, and never as a stream of token 0."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pdserve import LLM, SamplingParams

_PROMPT = [5, 9, 23, 42, 7, 7, 100]
_GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def large_activations(tiny_model: Any, tmp_path: Path) -> Path:
    """A checkpoint whose feed-forward blocks reach 1e6, far above float16's 65,504."""
    own = Path(shutil.copytree(tiny_model(), tmp_path / "own"))
    tensors = load_file(own / "model.safetensors")
    for name in tensors:
        if name.endswith(("up_proj.weight", "gate_proj.weight")):
            tensors[name] = tensors[name] * 1000
    save_file(tensors, own / "model.safetensors", metadata={"format": "pt"})
    return own


@pytest.mark.parametrize("dtype", [{}, {"dtype": "auto"}, {"dtype": "float32"}])
def test_nothing_is_narrowed_by_default(dtype: dict[str, str], large_activations: Path) -> None:
    """C157."""
    model = AutoModelForCausalLM.from_pretrained(large_activations, dtype=torch.float32).eval()
    generated = model.generate(
        torch.tensor([_PROMPT]),
        attention_mask=torch.ones(1, len(_PROMPT), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=6,
        min_new_tokens=6,
        eos_token_id=None,
        pad_token_id=0,
    )

    [output] = LLM(large_activations, num_blocks=16, **dtype).generate([_PROMPT], _GREEDY, use_tqdm=False)

    assert list(output.outputs[0].token_ids) == generated[0, len(_PROMPT) :].tolist()


def test_an_overflow_is_an_error_and_not_a_stream_of_token_0(large_activations: Path) -> None:
    """C157."""
    llm = LLM(large_activations, num_blocks=16, dtype="float16")

    with pytest.raises(RuntimeError, match=r"finite"):
        llm.generate([_PROMPT], _GREEDY, use_tqdm=False)
