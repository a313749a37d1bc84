"""Beam search over forked sequences: the sequences and scores of transformers, and nothing held afterwards."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pdserve.engine.beam_search import BeamSearchParams
from pdserve.engine.errors import InvalidRequest
from pdserve.engine.llm import LLM

_PROMPTS = [tuple(range(20, 33)), (7, 90, 41), tuple(range(100, 108))]
_WIDTH = 3


def _reference(
    model_dir: Any, prompt: tuple[int, ...], max_tokens: int, **options: Any
) -> list[tuple[list[int], float]]:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        num_beams=_WIDTH,
        num_return_sequences=_WIDTH,
        max_new_tokens=max_tokens,
        return_dict_in_generate=True,
        output_scores=True,
        pad_token_id=0,
        **options,
    )
    rows = found.sequences[:, len(prompt) :].tolist()
    return list(zip(rows, found.sequences_scores.tolist(), strict=True))


def _without_padding(token_ids: list[int], length: int, eos_id: int) -> list[int]:
    assert set(token_ids[length:]) <= {eos_id}, "what follows is padding"
    return token_ids[:length]


def _eos_id(model_dir: Any) -> int:
    """A token that the model likes, so that searches end in the middle."""
    (best, *_), *_ = _reference(model_dir, _PROMPTS[0], 4, eos_token_id=None)
    return int(best[2])


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -1.0])
def test_beams_equal_those_of_transformers(tiny_model: Any, early_stopping: Any, length_penalty: float) -> None:
    model_dir = tiny_model()
    eos_id = _eos_id(model_dir)
    llm = LLM(tiny_model(eos_token_id=eos_id), block_size=4, num_blocks=128)
    params = BeamSearchParams(_WIDTH, 14, length_penalty=length_penalty, early_stopping=early_stopping)

    outputs = llm.beam_search(_PROMPTS, params)

    options = {"length_penalty": length_penalty, "early_stopping": early_stopping, "eos_token_id": eos_id}
    for prompt, output in zip(_PROMPTS, outputs, strict=True):
        expected = _reference(model_dir, prompt, 14, **options)
        assert [sequence.score for sequence in output.sequences] == pytest.approx(
            [score for _, score in expected], rel=1e-5, abs=1e-5
        )
        for sequence, (token_ids, _) in zip(output.sequences, expected, strict=True):
            assert list(sequence.token_ids) == _without_padding(token_ids, len(sequence.token_ids), eos_id)
            assert sequence.tokens == prompt + sequence.token_ids
    assert llm._engine.scheduler.num_sequences == 0
    llm._engine.check_integrity()
    assert llm._engine.pool.usage().in_use == 0


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 5, "max_num_seqs": 3},
        {"enable_prefix_cache": False},
        {"block_size": 16, "num_blocks": 10},
    ],
    ids=["chunks, one search at a time", "no cache", "few blocks"],
)
def test_beams_do_not_depend_on_company(tiny_model: Any, options: dict[str, Any]) -> None:
    params = BeamSearchParams(_WIDTH, 12, ignore_eos=True)
    roomy = LLM(tiny_model(), block_size=4, num_blocks=256).beam_search(_PROMPTS, params)

    outputs = LLM(tiny_model(), **{"block_size": 4, "num_blocks": 128, **options}).beam_search(_PROMPTS, params)

    assert [[s.token_ids for s in output.sequences] for output in outputs] == [
        [s.token_ids for s in output.sequences] for output in roomy
    ]


def test_beams_share_their_prompt_and_what_they_have_in_common(tiny_model: Any) -> None:
    llm = LLM(tiny_model(), block_size=4, num_blocks=256, enable_prefix_cache=False)
    engine, most = llm._engine, 0
    step = engine.step

    def counted() -> Any:
        nonlocal most
        outputs = step()
        most = max(most, engine.pool.usage().in_use)
        return outputs

    engine.step = counted  # type: ignore[method-assign]  # the engine itself, watched
    prompt = tuple(range(20, 80))  # fifteen blocks
    llm.beam_search([prompt], BeamSearchParams(4, 8, ignore_eos=True))

    assert most <= 15 + 4 * 3
    assert engine.pool.usage().in_use == 0


def test_search_that_can_never_fit_is_refused_by_name(tiny_model: Any) -> None:
    llm = LLM(tiny_model(), block_size=4, num_blocks=16, max_num_seqs=4)

    for params in (BeamSearchParams(5, 2), BeamSearchParams(4, 20)):
        with pytest.raises(InvalidRequest, match="beam_width"):
            llm.beam_search([_PROMPTS[0]], params)


@pytest.mark.parametrize(
    "fields", [{"beam_width": 0}, {"max_tokens": 0}, {"temperature": 3.0}, {"early_stopping": "soon"}]
)
def test_wrong_parameter_is_named(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(fields))):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **fields})
