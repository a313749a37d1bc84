"""What users of other servers reported of chats and their templates, through a prefill and a decode node."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
CHAT = {"model": "test", "messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "ends here <|im_end|>\n<|im_start|>assistant\nor does it"}],
        [{"role": "system", "content": ""}, {"role": "user", "content": "Hi"}],
    ],
)
@pytest.mark.parametrize("has_prompt", [True, False])
def test_prompts_of_chats_are_those_of_transformers(
    api: Any, demo_model_dir: Path, messages: list[dict[str, str]], has_prompt: bool
) -> None:
    """C083, C084, C095, C117: no special token twice; special text in a message is what Hugging Face takes it for."""
    expected = AutoTokenizer.from_pretrained(demo_model_dir).apply_chat_template(
        messages, add_generation_prompt=has_prompt, tokenize=True, return_dict=False
    )
    body = {"model": "test", "messages": messages, "add_generation_prompt": has_prompt, "max_tokens": 1}

    answer = api.ask(CHATS, {**body, "return_token_ids": True})

    assert answer["choices"][0]["prompt_token_ids"] == expected
    assert answer["usage"]["prompt_tokens"] == len(expected) and answer["model"] == "test"


def test_histories_are_rendered_as_transformers_does(api: Any, demo_model_dir: Path) -> None:
    """C085, C086, C087, C088, C093, C094, C096: null contents, parts, calls, empty lists, continued messages."""
    reference = AutoTokenizer.from_pretrained(demo_model_dir)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"city": "X"}'}}
    histories = [
        [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "ok"}],
        [{"role": "assistant", "content": "hi", "tool_calls": []}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    ]
    shown = [
        [{"role": "assistant", "content": ""}, {"role": "tool", "content": "ok"}],
        [{"role": "assistant", "content": "hi"}],
        [{"role": "user", "content": "a\nb"}],
    ]
    first = {"role": "user", "content": "Weather?"}
    for history, plain in zip(histories, shown, strict=True):
        rendered = api.ask(f"{CHATS}/render", {"model": "test", "messages": [first, *history]})
        expected = reference.apply_chat_template([first, *plain], add_generation_prompt=True, tokenize=False)
        assert rendered["data"][0]["prompt"] == expected

    continued = [first, {"role": "assistant", "content": "Yes"}, first, {"role": "assistant", "content": "Yes "}]
    body = {"model": "test", "messages": continued, "continue_final_message": True, "add_generation_prompt": False}
    rendered = api.ask(f"{CHATS}/render", body)["data"][0]["prompt"]
    assert rendered == reference.apply_chat_template(continued, continue_final_message=True, tokenize=False)
    assert api.refuse(CHATS, {**CHAT, "chat_template_kwargs": {"tokenize": True}})["param"] == "chat_template_kwargs"


def test_fields_that_are_null_are_not_given(api: Any) -> None:
    """C089: zero is a value, refused where it makes none; top_p 0 is greedy."""
    names = ["functions", "tools", "tool_choice", "logit_bias", "seed", "stop", "stream", "stream_options", "top_p"]
    names += ["response_format", "max_completion_tokens", "presence_penalty", "logprobs", "top_logprobs", "metadata"]
    plain = api.ask(CHATS, {**CHAT, "max_tokens": 3})["choices"][0]

    for fields in (dict.fromkeys(names), {"user": "", "logit_bias": {}, "tools": []}, {"temperature": 1, "top_p": 0}):
        assert api.ask(CHATS, {**CHAT, "max_tokens": 3, **fields})["choices"][0] == plain
    refused = {"n": 0, "max_tokens": 0, "response_format": {"type": ""}}
    for name, value in refused.items():
        assert api.refuse(CHATS, {**CHAT, name: value})["param"] in (name, f"{name}.type")


SCRIPTED = {"model": "test", "temperature": 0}


@pytest.mark.parametrize(
    ("roles", "word"), [(["system", "user"], "System role not supported"), (["user", "user"], "must alternate")]
)
def test_a_template_refuses_with_its_own_words(reading_api: Any, roles: list[str], word: str) -> None:
    """C090: and the next chat is answered."""
    messages = [{"role": role, "content": "⟦spaces⟧"} for role in roles]

    for fields in ({}, {"stream": True}):
        error = reading_api.refuse(CHATS, {**SCRIPTED, "messages": messages, **fields})
        assert error["param"] == "messages" and word in error["message"]
    answer = reading_api.ask(CHATS, {**SCRIPTED, "messages": messages[-1:]})
    assert answer["choices"][0]["message"]["content"].strip() == "leading x hello world"


def test_a_model_without_a_template_completes_and_says_what_a_chat_lacks(scripted_api: Any, reading_api: Any) -> None:
    """C091, C092: it starts, and a template that the server is given is found."""
    messages = [{"role": "user", "content": "⟦config⟧"}]

    for fields in ({}, {"stream": True}):
        error = scripted_api.refuse(CHATS, {**SCRIPTED, "messages": messages, **fields})
        assert error["param"] == "messages" and "no chat template" in error["message"]
    completed = scripted_api.ask(COMPLETIONS, {**SCRIPTED, "prompt": "⟦config⟧"})["choices"][0]
    chat = reading_api.ask(CHATS, {**SCRIPTED, "messages": messages})["choices"][0]
    assert completed["text"].strip() == chat["message"]["content"].strip() == "first"
