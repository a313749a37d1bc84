"""What users of other servers reported of the text that tokens become, through a prefill and a decode node."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
COMPLETION = {"model": "test", "prompt": "One, two, three,", "temperature": 0}


def test_characters_of_several_tokens_come_whole(api: Any) -> None:
    """C021, C014."""
    said = "Škoda 😀 and 👩‍👩‍👧, ď"
    body = {**COMPLETION, "guided_choice": [said], "max_tokens": 60}

    events = api.stream(COMPLETIONS, body)

    assert api.text_of(events) == said == api.ask(COMPLETIONS, body)["choices"][0]["text"]
    assert not any("\ufffd" in choice["text"] for event in events for choice in event["choices"])


def test_a_character_cut_by_the_limit_is_one_replacement_character(api: Any, demo_model_dir: Path) -> None:
    """C024: the server goes on, and both modes show the same."""
    half = AutoTokenizer.from_pretrained(demo_model_dir).encode("😀")[0]
    body = {**COMPLETION, "allowed_token_ids": [half], "max_tokens": 1, "ignore_eos": True}

    choice = api.ask(COMPLETIONS, body)["choices"][0]

    assert (choice["text"], choice["finish_reason"]) == ("\ufffd", "length")
    assert api.text_of(api.stream(COMPLETIONS, body)) == "\ufffd"


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_in_an_answer_are_shown_as_hugging_face_does(api: Any, demo_model_dir: Path, skip: bool) -> None:
    """C027: both flags, streamed and not."""
    reference = AutoTokenizer.from_pretrained(demo_model_dir)
    ids = [1, 0, *reference.encode(" so it is")]
    body = {**COMPLETION, "allowed_token_ids": ids, "logit_bias": {"0": 14, "1": 14}, "frequency_penalty": 2}
    body |= {"temperature": 2, "seed": 5, "max_tokens": 14, "ignore_eos": True, "return_token_ids": True}

    for spaces in (True, False):
        asked = {**body, "skip_special_tokens": skip, "spaces_between_special_tokens": spaces}
        choice = api.ask(COMPLETIONS, asked)["choices"][0]
        flags = {"skip_special_tokens": skip, "spaces_between_special_tokens": spaces}
        assert choice["text"] == reference.decode(choice["token_ids"], **flags)
        assert choice["text"] == api.text_of(api.stream(COMPLETIONS, asked))
        assert {0, 1} & set(choice["token_ids"]) and ("<|" in choice["text"]) is not skip


def test_spaces_of_a_sentencepiece_vocabulary_are_those_of_its_own_decode(
    scripted_api: Any, scripted_model_dir: Path
) -> None:
    """C025, C026: the first piece keeps its space, as the prompt stands before it, and a piece that is one stays."""
    reference = Tokenizer.from_file(str(scripted_model_dir / "tokenizer.json"))
    body = {"model": "test", "prompt": "⟦spaces⟧", "temperature": 0, "return_token_ids": True}

    choice = scripted_api.ask(COMPLETIONS, body)["choices"][0]
    events = scripted_api.stream(COMPLETIONS, body)

    assert [reference.id_to_token(each) for each in choice["token_ids"]][:3] == ["▁", "▁leading", "▁x"]
    whole = reference.decode([*choice["prompt_token_ids"], *choice["token_ids"]])
    assert choice["text"] == whole.removeprefix("⟦spaces⟧") == "  leading x hello world"
    assert scripted_api.text_of(events) == choice["text"]


def test_a_text_of_bytes_begins_with_the_spaces_that_it_has(api: Any) -> None:
    """C026."""
    said = "  two spaces"
    body = {**COMPLETION, "guided_choice": [said], "max_tokens": 20}

    assert api.ask(COMPLETIONS, body)["choices"][0]["text"] == said == api.text_of(api.stream(COMPLETIONS, body))


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("fields", [{}, {"tools": [WEATHER]}], ids=["thoughts", "calls"])
@pytest.mark.parametrize(("script", "thoughts", "content"), [("⟦less⟧", "", "<"), ("⟦cut tag⟧", "Well</thi", "")])
def test_what_might_have_been_a_tag_is_told_at_the_end(
    reading_api: Any, fields: dict[str, Any], script: str, thoughts: str, content: str
) -> None:
    """C030: where it belongs, and the same in a stream."""
    body = {"model": "test", "messages": [{"role": "user", "content": script}], "temperature": 0, **fields}

    choice = reading_api.ask(CHATS, body)["choices"][0]
    events = reading_api.stream(CHATS, body)

    message = choice["message"]
    assert (message.get("reasoning_content") or "", message["content"] or "") == (thoughts, content)
    assert choice["finish_reason"] == "stop" and not message.get("tool_calls")
    assert reading_api.text_of(events) == content
    assert reading_api.text_of(events, name="reasoning_content") == thoughts
