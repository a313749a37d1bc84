"""`LLM`: what it takes for a model, the arguments of quick-start scripts, the model's defaults, prompt logprobs."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pdserve import LLM, SamplingParams
from pdserve.engine.environment import default_models_dir
from pdserve.engine.errors import InvalidRequest, ModelError
from pdserve.engine.step_output import FinishReason

_PROMPT = [5, 9, 23, 42, 7, 7, 100]
_GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def _tokens(llm: LLM, sampling: SamplingParams | None = None, prompt: list[int] = _PROMPT) -> tuple[int, ...]:
    [output] = llm.generate([prompt], sampling, use_tqdm=False)
    return output.outputs[0].token_ids


@pytest.fixture
def own_model(tiny_model: Any, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(tiny_model(), tmp_path / "own"))


def test_a_model_is_found_by_every_name_it_has(
    own_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"GGUF")
    converted = default_models_dir() / f"tiny-{hashlib.sha256(b'GGUF').hexdigest()[:12]}"
    shutil.copytree(own_model, converted)
    expected = _tokens(LLM(own_model, num_blocks=16), _GREEDY)

    for name in (str(own_model), "~/own", str(gguf)):
        assert _tokens(LLM(model=name, num_blocks=16), _GREEDY) == expected


@pytest.mark.parametrize("model", ["/no/such/model", "~/no-such-model"])
def test_a_model_that_is_not_there_says_what_can_be_given(model: str) -> None:
    with pytest.raises(ModelError, match=r"no such directory or file.*a \.gguf file, a hub id"):
        LLM(model)


def test_quick_start_scripts_run_as_they_are(tiny_model: Any) -> None:
    llm = LLM(model=str(tiny_model()), tensor_parallel_size=1, max_model_len=64, gpu_memory_utilization=0.9)

    [output] = llm.generate([_PROMPT], SamplingParams(temperature=0.7, max_tokens=4, ignore_eos=True), use_tqdm=False)

    assert len(output.outputs[0].token_ids) == 4
    assert isinstance(output.outputs[0].text, str)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("tensor_parallel_size", {"tensor_parallel_size": 2}),
        ("gpu_memory_utilization", {"gpu_memory_utilization": 1.5}),
        ("generation_config", {"generation_config": "auto"}),
        ("max_model_len", {"max_model_len": 512, "num_blocks": 4}),
    ],
)
def test_arguments_that_cannot_be_kept_are_refused_by_name(
    tiny_model: Any, field: str, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        LLM(tiny_model(), **options)

    assert caught.value.field == field


def test_the_models_recommendation_is_the_default(own_model: Path) -> None:
    (own_model / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "top_k": 7, "eos_token_id": 2}))

    recommended, plain = LLM(own_model, num_blocks=16), LLM(own_model, num_blocks=16, generation_config="none")

    assert recommended.get_default_sampling_params() == SamplingParams(temperature=0.0, top_k=7)
    assert plain.get_default_sampling_params() == SamplingParams()
    assert _tokens(recommended) == _tokens(recommended), "greedy"


@pytest.mark.parametrize("content", ['{"temperature": 7}', '{"top_k": "many"}', "[]", "{"])
def test_a_recommendation_that_nobody_may_ask_for_is_named(own_model: Path, content: str) -> None:
    (own_model / "generation_config.json").write_text(content)

    with pytest.raises(ModelError, match=r"generation_config\.json"):
        LLM(own_model, num_blocks=16)


def test_prompt_logprobs_have_an_entry_for_each_prompt_token(tiny_model: Any) -> None:
    """C063, C076."""
    llm = LLM(tiny_model(), num_blocks=16)

    for max_tokens in (0, 2):
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=3)
        [output] = llm.generate([_PROMPT], sampling, use_tqdm=False)

        assert output.prompt_logprobs is not None
        first, *rest = output.prompt_logprobs
        assert first is None and len(rest) == len(_PROMPT) - 1
        assert all(score is not None and len(score.top_logprobs) == 3 for score in rest)
        assert len(output.outputs[0].token_ids) == max_tokens
        assert output.outputs[0].finish_reason is FinishReason.LENGTH


def test_a_request_that_bans_every_token_is_the_callers_mistake(tiny_model: Any) -> None:
    """C062."""
    llm = LLM(tiny_model(), num_blocks=16)
    impossible = SamplingParams(max_tokens=3, min_tokens=2, stop_token_ids=(7,), allowed_token_ids=(7,))

    with pytest.raises(InvalidRequest, match="no token that could be sampled"):
        _tokens(llm, impossible)
    assert len(_tokens(llm, _GREEDY)) == 6, "the engine goes on"


def test_penalties_of_one_request_are_not_anothers(tiny_model: Any) -> None:
    """C051, C052: neither another's tokens nor any padding is counted, whatever the lengths beside each other."""
    llm = LLM(tiny_model(), num_blocks=64)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, 199, (length,), generator=generator).tolist() for length in (9, 2, 31, 5, 14)]
    penalties: list[dict[str, float]] = [
        {},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 1.05},
        {"presence_penalty": -2.0},
        {"repetition_penalty": 1.8},
    ]
    params = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, seed=0, **each) for each in penalties]  # type: ignore[arg-type]  # all are numbers

    together = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]

    assert together == [_tokens(llm, one, prompt) for prompt, one in zip(prompts, params, strict=True)]
    model = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32).eval()
    ids = torch.tensor([prompts[4]])
    [expected] = model.generate(
        ids, do_sample=False, max_new_tokens=12, min_new_tokens=12, eos_token_id=None, repetition_penalty=1.8
    )
    assert list(together[4]) == expected[14:].tolist()


def test_words_are_banned_and_text_is_made_as_scripts_for_vllm_ask_for_it(tiny_model: Any) -> None:
    llm = LLM(tiny_model(), num_blocks=64)
    plain = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, stop=None, logit_bias=None)  # type: ignore[arg-type]  # vLLM's own defaults are None
    first = llm.generate([_PROMPT], plain, use_tqdm=False)[0].outputs[0].text.split()

    banned = replace(plain, bad_words=(first[0], first[2]))
    stopped = replace(plain, stop=(first[3],), include_stop_str_in_output=True)
    [without], [until] = (llm.generate([_PROMPT], each, use_tqdm=False) for each in (banned, stopped))

    assert not {first[0], first[2]} & set(without.outputs[0].text.split())
    assert until.outputs[0].text.split() == first[:4]
    assert until.outputs[0].stop_reason == first[3]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("half", "float16"), ("float", "float32"), ("auto", "float32"), (torch.bfloat16, "bfloat16")],
)
def test_dtypes_have_the_names_that_vllm_gives_them(tiny_model: Any, dtype: Any, expected: str) -> None:
    assert LLM(tiny_model(), num_blocks=8, dtype=dtype)._engine.facts.dtype == expected
