"""Prompt logprobs: those of the reference, in any chunks, warm or cold, alone or in company, on either node."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pdserve.engine.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.engine.errors import InvalidRequest
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.sequence import SequenceSpec
from pdserve.engine.step_output import FinishReason, StepOutput, TokenScore

_PROMPT = tuple(torch.randint(3, 199, (57,), generator=torch.Generator().manual_seed(9)).tolist())
_SCORED = SamplingParams(max_tokens=3, temperature=0, seed=0, ignore_eos=True, prompt_logprobs=2)
_SCORED_ONLY = SamplingParams(max_tokens=0, temperature=0, seed=0, prompt_logprobs=2)


def _engine(model_dir: Path, **options: Any) -> Engine:
    defaults: dict[str, Any] = {"block_size": 4, "num_blocks": 64, "max_num_batched_tokens": 16}
    return Engine.load(EngineConfig(model_dir=model_dir, **{**defaults, **options}))


def _outputs(engine: Engine, *specs: SequenceSpec) -> dict[str, list[StepOutput]]:
    for spec in specs:
        engine.add(spec)
    outputs: dict[str, list[StepOutput]] = {spec.seq_id: [] for spec in specs}
    while engine.scheduler.has_work:
        for output in engine.step():
            outputs[output.seq_id].append(output)
        engine.scheduler.check_integrity()
    return outputs


def _scores(outputs: Sequence[StepOutput]) -> list[TokenScore]:
    """The one output that has them."""
    [scores] = [output.prompt_scores for output in outputs if output.prompt_scores is not None]
    return list(scores)


def _logprobs(scores: Sequence[TokenScore]) -> list[float]:
    return [score.logprob for score in scores]


@pytest.mark.parametrize("sampling", [_SCORED, _SCORED_ONLY], ids=["with tokens", "prompt alone"])
def test_values_are_those_of_transformers_shifted_by_one(tiny_model: Any, sampling: SamplingParams) -> None:
    """C063, C076, C079: 3.5 chunks."""
    model_dir = tiny_model()
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        reference = model(torch.tensor([_PROMPT])).logits[0, :-1].log_softmax(1)

    outputs = _outputs(_engine(model_dir), SequenceSpec("a", _PROMPT, sampling))["a"]
    scores = _scores(outputs)

    expected = reference.gather(1, torch.tensor(_PROMPT[1:])[:, None])[:, 0].tolist()
    assert _logprobs(scores) == pytest.approx(expected, abs=1e-4)
    assert [score.top_logprobs[0][0] for score in scores] == reference.argmax(1).tolist()
    assert all(len(score.top_logprobs) == 2 for score in scores)
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert sum(output.token is not None for output in outputs) == sampling.max_tokens


def test_they_come_with_the_first_token_and_not_before(tiny_model: Any) -> None:
    """C079."""
    outputs = _outputs(_engine(tiny_model()), SequenceSpec("a", _PROMPT, _SCORED))["a"]

    first = next(index for index, output in enumerate(outputs) if output.token is not None)

    assert [output.prompt_scores is not None for output in outputs] == [index == first for index in range(len(outputs))]


def test_warm_cache_company_and_pressure_change_nothing(tiny_model: Any) -> None:
    """C078, C079: twice on one engine, in a mixed batch, under preemption."""
    model_dir = tiny_model()
    alone = _logprobs(_scores(_outputs(_engine(model_dir), SequenceSpec("a", _PROMPT, _SCORED))["a"]))
    others = [SequenceSpec(str(n), _PROMPT[n : n + 20], SamplingParams(max_tokens=30, seed=n)) for n in range(5)]

    warm = _engine(model_dir)
    for name in ("first", "second"):
        assert _logprobs(_scores(_outputs(warm, SequenceSpec(name, _PROMPT, _SCORED))[name])) == pytest.approx(
            alone, abs=1e-4
        )
    crowded = _engine(model_dir, num_blocks=24)
    outputs = _outputs(crowded, *others, SequenceSpec("a", _PROMPT, _SCORED))["a"]

    assert crowded.load_now().num_preemptions > 0
    assert _logprobs(_scores(outputs)) == pytest.approx(alone, abs=1e-4)


def test_prefill_node_says_them_and_decode_node_does_not(tiny_model: Any) -> None:
    prefill, decode = _engine(tiny_model()), _engine(tiny_model())
    prefill.add(SequenceSpec("a", _PROMPT, _SCORED, is_export=True))
    decode.add_import(SequenceSpec("a", _PROMPT, _SCORED))
    [(_, needed)] = decode.scheduler.grant_imports()
    while (output := prefill.step()[0]).token is None:
        assert output.prompt_scores is None
    assert output.prompt_scores is not None and len(output.prompt_scores) == len(_PROMPT) - 1
    assert output.token.token_id is not None
    decode.land("a", [(index, prefill.block_bytes(output.exported_blocks[index])) for index in needed])
    decode.scheduler.commit_import("a", [output.token.token_id])

    while decode.scheduler.has_work:
        assert all(step.prompt_scores is None for step in decode.step())


def test_prompt_of_the_whole_context_can_be_scored_but_not_continued(tiny_model: Any) -> None:
    """C065."""
    engine = _engine(tiny_model(), max_model_len=len(_PROMPT))

    outputs = _outputs(engine, SequenceSpec("a", _PROMPT, _SCORED_ONLY))["a"]

    assert len(_scores(outputs)) == len(_PROMPT) - 1
    for prompt, sampling in ((_PROMPT, _SCORED), ((*_PROMPT, 5), _SCORED_ONLY)):
        with pytest.raises(InvalidRequest):
            engine.add(SequenceSpec("b", prompt, sampling))


def test_scored_export_without_tokens_ends_at_the_prefill_node(tiny_model: Any) -> None:
    engine = _engine(tiny_model())
    engine.add(SequenceSpec("a", (5,), _SCORED_ONLY, is_export=True))

    [output] = engine.step()

    assert output.token is None and output.finish_reason is FinishReason.LENGTH and output.prompt_scores == ()
    assert not engine.scheduler.has_work
    engine.scheduler.abort("a")
    engine.scheduler.check_integrity()
    assert engine.pool.usage().in_flight == 0
