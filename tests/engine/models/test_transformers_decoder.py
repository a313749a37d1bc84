"""Models that run through transformers' own code: the engine's features hold, and what cannot be right is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pdserve import LLM, SamplingParams
from pdserve.engine.config import EngineConfig
from pdserve.engine.errors import InvalidRequest, ModelError
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.models.model_dir import ModelDir

_GPT2 = {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 512}
_GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
_PROMPTS = [[5, 9, 23, 42, 7, 7, 100, 3, 8, 11, 64, 23, 19, 77, 150, 8, 31, 4, 90], [17, 4, 9]]


@pytest.fixture
def gpt2_dir(tiny_model: Any) -> Path:
    return Path(tiny_model("gpt2", **_GPT2))


def test_greedy_tokens_equal_transformers_whatever_the_blocks(gpt2_dir: Path) -> None:
    """Chunks of 5 tokens, a warm cache, and so few blocks that one of the two is preempted."""
    expected = [_reference(gpt2_dir, prompt) for prompt in _PROMPTS]
    options = [{"num_blocks": 64}, {"num_blocks": 64, "max_num_batched_tokens": 5}, {"num_blocks": 10}]

    for each in options:
        llm = LLM(gpt2_dir, block_size=4, **each)
        for _ in range(2):
            outputs = llm.generate(_PROMPTS, _GREEDY, use_tqdm=False)
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected, each
        assert outputs[0].num_cached_tokens > 0


def test_prompt_logprobs_are_those_of_transformers(gpt2_dir: Path) -> None:
    llm = LLM(gpt2_dir, block_size=4, num_blocks=64, max_num_batched_tokens=7)
    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=0)

    [output] = llm.generate([_PROMPTS[0]], sampling, use_tqdm=False)

    model = AutoModelForCausalLM.from_pretrained(gpt2_dir).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([_PROMPTS[0]])).logits[0].log_softmax(-1)
    expected = [float(logits[index, token_id]) for index, token_id in enumerate(_PROMPTS[0][1:])]
    assert output.prompt_logprobs is not None
    ours = [score.logprob for score in output.prompt_logprobs[1:] if score is not None]
    assert ours == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("model_type", "overrides", "reason"),
    [
        ("bloom", {"n_layer": 3, "n_head": 4}, "takes no position_ids"),
        ("falcon", {}, "attend in their own code"),
        ("mamba", {}, "recurrent"),
        ("diffllama", {}, "its 3 layers attend 6 times"),
        ("gpt_oss", {"head_dim": 16, "num_local_experts": 4}, "needs s_aux"),
    ],
)
def test_what_attends_in_another_way_is_refused_by_name(
    model_type: str, overrides: dict[str, Any], reason: str, tiny_model: Any
) -> None:
    model_dir = tiny_model(model_type, **overrides)

    with pytest.raises(ModelError, match=rf"'{model_type}' is not supported.*{reason}"):
        _load(model_dir)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "'t5'.*encoder-decoder"),
        ({"model_type": "whatever"}, "'whatever'.*no causal language model of this type"),
        ({"model_type": "whatever", "auto_map": {"AutoModelForCausalLM": "x.Y"}}, "'whatever'.*trust_remote_code"),
        ({"model_type": "whatever", "vision_config": {"x": 1}}, "'whatever'.*multimodal"),
        ({"model_type": "whatever", "audio_encoder_config": {"x": 1}}, "'whatever'.*multimodal"),
        ({"quantization_config": {"bits": 4}}, "'gpt2'.*quantization_config"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'gpt2'.*rope type dynamic"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "longrope"}, "sliding_attention": {}}},
            "'gpt2'.*rope type longrope",
        ),
        ({"text_config": {"rope_scaling": {"type": "dynamic"}}}, "'gpt2'.*rope type dynamic"),
        ({"attention_chunk_size": 64}, "'gpt2'.*chunks"),
        ({"sliding_window": 8}, "'gpt2'.*layer 0 should look back 8 tokens, but its code asks for all"),
    ],
)
def test_what_a_config_says_against_itself_is_refused(
    changes: dict[str, Any], reason: str, gpt2_dir: Path, tmp_path: Path
) -> None:
    own = _changed(gpt2_dir, tmp_path, changes)

    with pytest.raises(ModelError, match=reason):
        _load(own)


def test_a_checkpoint_that_lacks_a_parameter_is_refused(gpt2_dir: Path, tmp_path: Path) -> None:
    own = _changed(gpt2_dir, tmp_path, {})
    tensors = load_file(own / "model.safetensors")
    del tensors["transformer.h.1.attn.c_attn.weight"]
    save_file(tensors, own / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ModelError, match=r"gpt2 checkpoint: parameters missing.*h\.1\.attn\.c_attn\.weight"):
        _load(own)


def test_the_code_can_be_chosen(gpt2_dir: Path, tiny_model: Any) -> None:
    own, adapted = (LLM(tiny_model(), num_blocks=16, model_impl=impl) for impl in ("own", "transformers"))

    assert [_tokens(own), _tokens(own)] == [_tokens(adapted), _tokens(adapted)]
    with pytest.raises(ModelError, match="'gpt2' is not supported"):
        LLM(gpt2_dir, num_blocks=16, model_impl="own")
    with pytest.raises(InvalidRequest, match="model_impl"):
        EngineConfig(model_dir=gpt2_dir, model_impl="other")


def _tokens(llm: LLM) -> tuple[int, ...]:
    return llm.generate([_PROMPTS[0]], _GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def _load(model_dir: Path) -> ModelRunner:
    config = EngineConfig(model_dir=model_dir, num_blocks=4, model_impl="transformers")
    return ModelRunner.load(config, ModelDir.open(model_dir))


def _changed(model_dir: Path, target: Path, changes: dict[str, Any]) -> Path:
    own = Path(shutil.copytree(model_dir, target / "own"))
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps({**config, **changes}))
    return own


def _reference(model_dir: Path, prompt: list[int]) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    generated = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=12,
        min_new_tokens=12,
        eos_token_id=None,
        pad_token_id=0,
    )
    return list(generated[0, len(prompt) :].tolist())
