"""The offline API beyond one call of `generate`: lists, scores, results, progress, Ctrl-C, quick-start scripts."""

import io
import math
import os
import runpy
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from pdserve import LLM, RequestOutput, SamplingParams
from pdserve.engine.errors import InvalidRequest
from pdserve.engine.offline_batch import Interruption
from pdserve.engine.step_output import FinishReason

_PROMPTS = [[5, 9, 23, 42, 7], [17, 4, 9], [100, 3, 8, 11]]
_GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model: Any) -> LLM:
    return LLM(tiny_model(), num_blocks=64, seed=3)


def _ids(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_a_prompt_has_the_same_answer_in_every_form(llm: LLM) -> None:
    text = "w5 w9 w23 w42 w7"
    forms: list[Any] = [text, _PROMPTS[0], {"prompt": text}, {"prompt_token_ids": _PROMPTS[0]}]

    outputs = llm.generate(forms, _GREEDY, use_tqdm=False)

    assert len(set(_ids(outputs))) == 1
    assert [output.prompt for output in outputs] == [text, None, text, None]
    for wrong in ({}, {"prompt": 7}, {"prompt_token_ids": "5"}):
        with pytest.raises(InvalidRequest, match="prompt"):
            llm.generate([wrong], _GREEDY, use_tqdm=False)


@pytest.mark.parametrize("wrong", [None, 5, 2.5, b"w5", [5, 2.5], [5, None], ["w5"]])
def test_what_is_no_prompt_is_refused_and_never_left_out(llm: LLM, wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^prompt: "):
        llm.generate(["w5", wrong], SamplingParams(max_tokens=1), use_tqdm=False)


def test_results_say_how_they_ended_and_how_likely_they_were(llm: LLM) -> None:
    [plain] = llm.generate([_PROMPTS[0]], _GREEDY, use_tqdm=False)
    third = plain.outputs[0].token_ids[2]
    word = f"w{plain.outputs[0].token_ids[1]}"
    by_id = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, stop_token_ids=(third,), logprobs=2)
    by_text = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, stop=(word,))

    ended_by_id, ended_by_text = llm.generate([_PROMPTS[0]] * 2, [by_id, by_text], use_tqdm=False)

    assert plain.finished and plain.outputs[0].finish_reason == "length"
    assert plain.outputs[0].stop_reason is None and plain.outputs[0].cumulative_logprob is None
    [one] = ended_by_id.outputs
    assert (one.finish_reason, one.stop_reason, one.token_ids[-1]) == ("stop", third, third)
    assert one.logprobs is not None and one.cumulative_logprob is not None
    assert one.cumulative_logprob == pytest.approx(sum(token.logprob or 0 for token in one.logprobs))
    assert (ended_by_text.outputs[0].finish_reason, ended_by_text.outputs[0].stop_reason) == (FinishReason.STOP, word)


def test_chat_takes_one_conversation_or_several(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.tokenizer, "render_chat", lambda messages, **options: messages[-1]["content"])
    first, second = ([{"role": "user", "content": text}] for text in ("w5 w9 w23 w42 w7", "w17 w4 w9"))

    one, many = llm.chat(first, _GREEDY, use_tqdm=False), llm.chat([first, second], _GREEDY, use_tqdm=False)

    assert _ids(many) == _ids(llm.generate(_PROMPTS[:2], _GREEDY, use_tqdm=False))
    assert _ids(one) == _ids(many)[:1]
    with pytest.raises(InvalidRequest, match="messages"):
        llm.chat([])


def test_scores_are_those_of_transformers(llm: LLM, tiny_model: Any) -> None:
    """Pairs, one prompt with several continuations, and texts."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model()).eval()
    continuations = [[44, 3], [8], [61, 62, 63]]

    scores = llm.score(_PROMPTS, continuations, use_tqdm=False)

    for prompt, continuation, score in zip(_PROMPTS, continuations, scores, strict=True):
        with torch.inference_mode():
            logprobs = model(torch.tensor([prompt + continuation])).logits[0].log_softmax(-1)
        places = range(len(prompt) - 1, len(prompt) + len(continuation) - 1)
        expected = [float(logprobs[place, token_id]) for place, token_id in zip(places, continuation, strict=True)]
        assert score.logprobs == pytest.approx(expected, abs=1e-4)
        assert score.logprob == pytest.approx(sum(expected), abs=1e-4)
        assert (score.prompt_token_ids, score.token_ids) == (tuple(prompt), tuple(continuation))
    [shared, *_] = llm.score(_PROMPTS[0], continuations, use_tqdm=False)
    assert shared.logprobs == pytest.approx(scores[0].logprobs, abs=1e-5)
    [by_text] = llm.score("w5 w9 w23 w42 w7", " w44 w3", use_tqdm=False)
    assert by_text.logprobs == pytest.approx(scores[0].logprobs, abs=1e-5)


def test_what_greedy_decoding_writes_is_scored_as_greedy(llm: LLM) -> None:
    [output] = llm.generate([_PROMPTS[0]], _GREEDY, use_tqdm=False)
    written = list(output.outputs[0].token_ids)
    other = [*written[:-1], (written[-1] + 1) % 199]

    greedy, not_greedy = llm.score(_PROMPTS[0], [written, other], use_tqdm=False)

    assert greedy.is_greedy and not not_greedy.is_greedy
    assert greedy.logprob > not_greedy.logprob and math.isfinite(not_greedy.logprob)


@pytest.mark.parametrize(
    ("prompts", "continuations", "field"),
    [([[5], [6]], [[7]], "continuations"), ([5], [[]], "continuations"), ("", "w5", "prompts")],
)
def test_scores_without_a_meaning_are_refused(llm: LLM, prompts: Any, continuations: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.score(prompts, continuations, use_tqdm=False)

    assert caught.value.field == field


def test_the_bar_counts_prompts_and_tells_the_rates(llm: LLM) -> None:
    lines = io.StringIO()

    llm.generate(_PROMPTS, _GREEDY, use_tqdm=lambda **options: tqdm(file=lines, **options))

    last = lines.getvalue().split("\r")[-1]
    assert "3/3" in last and "out " in last and "tokens/s" in last


@pytest.mark.usefixtures("sigint_is_heard")
def test_ctrl_c_returns_what_is_there(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    """The first prompt is finished when Ctrl-C comes, the second is not; the engine goes on."""
    lengths = [SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True) for tokens in (2, 400)]

    class InterruptedBar:
        def __init__(self, **options: Any) -> None: ...
        def set_postfix_str(self, *arguments: Any, **options: Any) -> None: ...
        def close(self) -> None: ...
        def update(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    done, cut = llm.generate(_PROMPTS[:2], lengths, use_tqdm=InterruptedBar)

    assert done.finished and len(done.outputs[0].token_ids) == 2
    assert not cut.finished and cut.outputs[0].finish_reason is None
    assert 1 <= len(cut.outputs[0].token_ids) < 400
    assert "interrupted" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    again = llm.generate(_PROMPTS[1], _GREEDY, use_tqdm=False)
    assert _ids(again)[0][: len(cut.outputs[0].token_ids)] == cut.outputs[0].token_ids[:6]


@pytest.mark.usefixtures("sigint_is_heard")
def test_a_second_ctrl_c_is_one_as_usual() -> None:
    with pytest.raises(KeyboardInterrupt), Interruption.watched() as interruption:
        os.kill(os.getpid(), signal.SIGINT)
        assert interruption.is_asked
        os.kill(os.getpid(), signal.SIGINT)


def test_requests_are_read_only_as_they_are_needed(llm: LLM) -> None:
    read: list[int] = []

    def requests() -> Iterator[tuple[list[int], SamplingParams]]:
        for index in range(9):
            read.append(index)
            yield ([] if index == 4 else _PROMPTS[index % 3]), _GREEDY

    ended: dict[int, Any] = {}
    for index, output in llm.generate_each(requests(), max_pending=2):
        assert len(read) <= len(ended) + 4
        ended[index] = output

    assert sorted(ended) == list(range(9))
    assert isinstance(ended[4], InvalidRequest), "an empty prompt ends itself only"
    expected = _ids(llm.generate(_PROMPTS, _GREEDY, use_tqdm=False))
    assert [ended[index].outputs[0].token_ids for index in (0, 1, 2, 3, 5, 6, 7, 8)] == [
        expected[index % 3] for index in (0, 1, 2, 3, 5, 6, 7, 8)
    ]


def test_the_seed_of_the_engine_decides_what_has_none(tiny_model: Any) -> None:
    sampled = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)

    first, same, other = (
        _ids(LLM(tiny_model(), num_blocks=32, seed=seed).generate(_PROMPTS, sampled, use_tqdm=False))
        for seed in (1, 1, 2)
    )

    assert first == same != other


_BATCH_SCRIPT = """
from {package} import LLM, SamplingParams

prompts = ["w5 w9 w23", "w17 w4", "w100 w3 w8 w11"]
sampling_params = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=256)

llm = LLM(model={model!r}, tensor_parallel_size=1, max_model_len=400, gpu_memory_utilization=0.9)
outputs = llm.generate(prompts, sampling_params)
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {{prompt!r}}, Generated text: {{generated_text!r}}")
"""
_CHAT_SCRIPT = """
from {package} import LLM, SamplingParams

llm = LLM(model={model!r}, dtype="auto", trust_remote_code=True, enforce_eager=True, enable_prefix_caching=True, seed=0)
sampling = llm.get_default_sampling_params()
conversation = [
    {{"role": "system", "content": "w1"}},
    {{"role": "user", "content": "w5 w9"}},
]
outputs = llm.chat([conversation, conversation], sampling, use_tqdm=False)
assert [len(output.outputs) for output in outputs] == [1, 1]
request_ids = {{output.request_id for output in outputs}}
assert len(request_ids) == 2 and all(output.finished for output in outputs)
tokens = llm.generate({{"prompt_token_ids": [5, 9]}}, SamplingParams(n=2, best_of=3, logprobs=1, max_tokens=4))[0]
for completion in tokens.outputs:
    print(completion.index, completion.finish_reason, completion.cumulative_logprob, list(completion.token_ids))
"""


@pytest.mark.parametrize("script", [_BATCH_SCRIPT, _CHAT_SCRIPT], ids=["batch", "chat"])
def test_scripts_for_vllm_run_with_another_import(
    script: str, tiny_model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_dir = _with_template(tiny_model(), tmp_path)
    path = tmp_path / "script.py"
    path.write_text(script.format(package="pdserve", model=str(model_dir)))

    runpy.run_path(str(path), run_name="__main__")

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == (3 if script is _BATCH_SCRIPT else 2)
    assert script is _CHAT_SCRIPT or lines[1].startswith("Prompt: 'w17 w4', Generated text: ")


def _with_template(model_dir: Path, target: Path) -> Path:
    own = target / "model"
    own.mkdir()
    for file in model_dir.iterdir():
        (own / file.name).symlink_to(file)
    (own / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    return own
