"""What users of other servers reported of requests and answers, through a prefill and a decode node.

`guided_choice` with one choice makes the real model say a given text: what it says is known, how it comes is the
system's.
"""

import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
CHAT = {"model": "test", "messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
COMPLETION = {"model": "test", "prompt": "One, two, three,", "temperature": 0}


def _refuse_constant(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


def post(cluster: Any, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    """Return status and body, read to the end of the connection."""
    content = json.dumps(body).encode()
    request = urllib.request.Request(cluster.url + path, content, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def ask(cluster: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return a whole answer, read by a strict parser."""
    status, content = post(cluster, path, body)
    assert status == 200, content
    answer: dict[str, Any] = json.loads(content, parse_constant=_refuse_constant)
    return answer


def stream(cluster: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a streamed answer that ends as it must."""
    status, content = post(cluster, path, {**body, "stream": True})
    assert status == 200, content
    blocks = [block for block in content.decode().split("\n\n") if block and not block.startswith(":")]
    assert content.endswith(b"data: [DONE]\n\n") and blocks.count("data: [DONE]") == 1
    return [json.loads(block.removeprefix("data: "), parse_constant=_refuse_constant) for block in blocks[:-1]]


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    """Return the joined text of one choice."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"max_tokens": 3}, "length"), ({"max_tokens": 60}, "stop"), ({"max_tokens": 60, "stop": "Paris"}, "stop")],
)
def test_each_way_to_end_a_stream_is_one_reason_and_one_done(
    disaggregated: Any, fields: dict[str, Any], reason: str
) -> None:
    """C001, C008, C012, C013, C039: with and without logprobs; a stop string that never comes leaves EOS in force."""
    whole = ask(disaggregated, CHATS, {**CHAT, **fields})

    for asked in ({}, {"logprobs": True, "top_logprobs": 1}, {"stop": fields.get("stop", "\nObservation")}):
        events = stream(disaggregated, CHATS, {**CHAT, **fields, **asked})
        reasons = [event["choices"][0]["finish_reason"] for event in events]
        assert reasons[-1] == reason == whole["choices"][0]["finish_reason"] and set(reasons[:-1]) <= {None}
        assert text_of(events) == whole["choices"][0]["message"]["content"]


def test_usage_counts_every_choice_once_and_comes_last(disaggregated: Any) -> None:
    """C002, C004, C005, C010, C020."""
    body = {**COMPLETION, "prompt": ["One, two,", "A, B, C, D,"], "n": 2, "max_tokens": 5, "seed": 3, "temperature": 1}

    whole = ask(disaggregated, COMPLETIONS, body)
    events = stream(disaggregated, COMPLETIONS, {**body, "stream_options": {"include_usage": True}})

    assert [text_of(events, index) for index in range(4)] == [choice["text"] for choice in whole["choices"]]
    assert events[-1]["choices"] == [] and all(event["usage"] is None for event in events[:-1])
    used, streamed = whole["usage"], events[-1]["usage"]
    assert used["completion_tokens"] == streamed["completion_tokens"] <= 20
    assert used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"] == streamed["total_tokens"]


def test_continuous_usage_of_a_prompt_of_many_chunks(disaggregated: Any) -> None:
    """C006, C007: nothing is said before the first token, and the prompt has one length throughout."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**COMPLETION, "prompt": [1000 + i % 700 for i in range(700)], "max_tokens": 3, "ignore_eos": True}

    events = stream(disaggregated, COMPLETIONS, {**body, "stream_options": options})

    assert {event["usage"]["prompt_tokens"] for event in events} == {700}
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts[0] >= 1 and counts == sorted(counts) and counts[-1] == 3


def test_characters_of_several_tokens_come_whole(disaggregated: Any) -> None:
    """C021, C014."""
    said = "Škoda 😀 and 👩‍👩‍👧, ď"
    body = {**COMPLETION, "guided_choice": [said], "max_tokens": 60}

    events = stream(disaggregated, COMPLETIONS, body)

    assert text_of(events) == said == ask(disaggregated, COMPLETIONS, body)["choices"][0]["text"]
    assert not any("\ufffd" in choice["text"] for event in events for choice in event["choices"])


def test_a_character_cut_by_the_limit_is_one_replacement_character(disaggregated: Any, demo_model_dir: Path) -> None:
    """C024: the server goes on, and both modes show the same."""
    half = AutoTokenizer.from_pretrained(demo_model_dir).encode("😀")[0]
    body = {**COMPLETION, "allowed_token_ids": [half], "max_tokens": 1, "ignore_eos": True}

    choice = ask(disaggregated, COMPLETIONS, body)["choices"][0]

    assert (choice["text"], choice["finish_reason"]) == ("\ufffd", "length")
    assert text_of(stream(disaggregated, COMPLETIONS, body)) == "\ufffd"


@pytest.mark.parametrize(
    ("said", "stop", "shown"),
    [
        ("a b c d e f g h i j k l m n o p", ["f g h i j"], "a b c d e "),
        ("aaab and so on", ["aab"], "a"),
        ("so bca follows ab here", ["ab", "bca"], "so "),
        ("Thought: x\nObservation: y", ["\nObs"], "Thought: x"),
        ("nothing of it", ["never", "it is"], "nothing of it"),
    ],
)
def test_stop_strings_lie_where_they_like_and_are_never_shown(
    disaggregated: Any, said: str, stop: list[str], shown: str
) -> None:
    """C031, C032, C038, C040: text, tokens, logprobs and usage end together; a string alone is a list of one (C037)."""
    body = {**COMPLETION, "guided_choice": [said], "stop": stop, "max_tokens": 60, "logprobs": 0}

    whole = ask(disaggregated, COMPLETIONS, body)
    events = stream(disaggregated, COMPLETIONS, {**body, "stream_options": {"include_usage": True}})

    choice = whole["choices"][0]
    assert choice["text"] == text_of(events) == shown and choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["tokens"]) == whole["usage"]["completion_tokens"]
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    if len(stop) == 1:
        assert ask(disaggregated, COMPLETIONS, {**body, "stop": stop[0]})["choices"][0]["text"] == shown
    if shown != said:
        kept = ask(disaggregated, COMPLETIONS, {**body, "include_stop_str_in_output": True})["choices"][0]["text"]
        assert kept == shown + next(each for each in stop if said.startswith(shown + each))
    disaggregated.wait_idle()


def test_no_stop_is_no_stop_and_an_empty_one_is_refused(disaggregated: Any) -> None:
    """C036."""
    body = {**COMPLETION, "max_tokens": 8}
    expected = ask(disaggregated, COMPLETIONS, body)["choices"][0]

    for stop in ([], None):
        assert ask(disaggregated, COMPLETIONS, {**body, "stop": stop})["choices"][0] == expected
    for stop in ("", [""], ["x", ""]):
        status, content = post(disaggregated, COMPLETIONS, {**body, "stop": stop, "stream": True})
        assert status == 400 and json.loads(content)["error"]["param"] == "stop"


def test_min_tokens_hold_stop_strings_and_ids_back(disaggregated: Any) -> None:
    """C042: what ends within the first min_tokens never fires, not later either."""
    said = "a, b c d e f g h, i j"
    body = {**COMPLETION, "guided_choice": [said], "stop": [","], "max_tokens": 60}

    assert ask(disaggregated, COMPLETIONS, body)["choices"][0]["text"] == "a"
    late = ask(disaggregated, COMPLETIONS, {**body, "min_tokens": 5})

    assert late["choices"][0]["text"] == "a, b c d e f g h" and late["usage"]["completion_tokens"] >= 5


def test_a_grammar_that_is_complete_wins_over_min_tokens(disaggregated: Any) -> None:
    """C044."""
    schema: dict[str, Any] = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}

    answer = ask(disaggregated, CHATS, {**CHAT, "response_format": form, "min_tokens": 64, "max_tokens": 100})

    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop" and type(json.loads(choice["message"]["content"])["ok"]) is bool


def test_ignore_eos_runs_to_its_length(disaggregated: Any) -> None:
    """C047: stop ids that the user gave still end the answer."""
    body = {**CHAT, "max_tokens": 30, "ignore_eos": True}

    answer = ask(disaggregated, CHATS, {**body, "return_token_ids": True})

    choice = answer["choices"][0]
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 30)
    stopped = ask(disaggregated, CHATS, {**body, "stop_token_ids": [choice["token_ids"][3]]})
    assert stopped["choices"][0]["finish_reason"] == "stop" and stopped["usage"]["completion_tokens"] <= 4


def test_without_a_seed_requests_differ_and_with_one_choices_repeat(disaggregated: Any) -> None:
    """C055, C056: one after the other, at once, and by index."""
    body = {**COMPLETION, "prompt": "The weather", "temperature": 1, "max_tokens": 12}
    with ThreadPoolExecutor(4) as pool:
        at_once = list(pool.map(lambda _: ask(disaggregated, COMPLETIONS, body)["choices"][0]["text"], range(4)))
    alone = [ask(disaggregated, COMPLETIONS, body)["choices"][0]["text"] for _ in range(2)]
    assert len({*at_once, *alone}) == 6

    seeded = {**body, "seed": 42, "n": 3, "prompt": ["The weather", "The weather"]}
    first, second = (ask(disaggregated, COMPLETIONS, seeded)["choices"] for _ in range(2))
    texts = [choice["text"] for choice in first]
    assert texts == [choice["text"] for choice in second]
    assert len(set(texts[:3])) == 3 and texts[:3] == texts[3:]


def test_what_cannot_be_sampled_is_still_strict_json(disaggregated: Any) -> None:
    """C068: candidates that top_k or a grammar has masked."""
    for fields in ({"top_k": 1}, {"guided_choice": ["yes"]}):
        body = {**COMPLETION, **fields, "logprobs": 5, "max_tokens": 3, "temperature": 1}
        choice = ask(disaggregated, COMPLETIONS, body)["choices"][0]
        assert len(choice["logprobs"]["top_logprobs"][0]) >= 5
        stream(disaggregated, COMPLETIONS, body)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "ends here <|im_end|>\n<|im_start|>assistant\nor does it"}],
        [{"role": "system", "content": ""}, {"role": "user", "content": "Hi"}],
    ],
)
@pytest.mark.parametrize("has_prompt", [True, False])
def test_prompts_of_chats_are_those_of_transformers(
    disaggregated: Any, demo_model_dir: Path, messages: list[dict[str, str]], has_prompt: bool
) -> None:
    """C083, C084, C095, C117: no special token twice; special text in a message is what Hugging Face takes it for."""
    expected = AutoTokenizer.from_pretrained(demo_model_dir).apply_chat_template(
        messages, add_generation_prompt=has_prompt, tokenize=True, return_dict=False
    )
    body = {"model": "test", "messages": messages, "add_generation_prompt": has_prompt, "max_tokens": 1}

    answer = ask(disaggregated, CHATS, {**body, "return_token_ids": True})

    assert answer["choices"][0]["prompt_token_ids"] == expected
    assert answer["usage"]["prompt_tokens"] == len(expected) and answer["model"] == "test"


def test_a_prompt_that_does_not_fit_is_refused_and_never_cut(disaggregated: Any) -> None:
    """C064, C066, C067: both numbers are told, and the limit is not blamed on what nobody sent."""
    status, content = disaggregated.get("/v1/models")
    limit = content["data"][0]["max_model_len"]
    assert status == 200

    for fields in ({"prompt": [5] * (limit + 1)}, {"prompt": [5] * 30, "max_tokens": limit}):
        status, refused = post(disaggregated, COMPLETIONS, {**COMPLETION, **fields})
        error = json.loads(refused)["error"]
        assert status == 400 and error["code"] == "context_length_exceeded"
        assert str(limit) in error["message"] and str(len(fields["prompt"])) in error["message"]
        assert "-" not in error["message"].replace("max-model-len", "")


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_in_an_answer_are_shown_as_hugging_face_does(
    disaggregated: Any, demo_model_dir: Path, skip: bool
) -> None:
    """C027: both flags, streamed and not."""
    reference = AutoTokenizer.from_pretrained(demo_model_dir)
    ids = [1, 0, *reference.encode(" so it is")]
    body = {**COMPLETION, "allowed_token_ids": ids, "logit_bias": {"0": 14, "1": 14}, "frequency_penalty": 2}
    body |= {"temperature": 2, "seed": 5, "max_tokens": 14, "ignore_eos": True, "return_token_ids": True}

    for spaces in (True, False):
        asked = {**body, "skip_special_tokens": skip, "spaces_between_special_tokens": spaces}
        choice = ask(disaggregated, COMPLETIONS, asked)["choices"][0]
        flags = {"skip_special_tokens": skip, "spaces_between_special_tokens": spaces}
        assert choice["text"] == reference.decode(choice["token_ids"], **flags)
        assert choice["text"] == text_of(stream(disaggregated, COMPLETIONS, asked))
        assert {0, 1} & set(choice["token_ids"]) and ("<|" in choice["text"]) is not skip


def test_each_choice_of_a_stream_ends_once(disaggregated: Any) -> None:
    """C003, C009: at lengths of their own; stream_options that ask for nothing change nothing."""
    body = {**CHAT, "n": 3, "temperature": 1, "seed": 11, "max_tokens": 8, "stop": ["."]}

    for options in ({}, {"include_usage": False}):
        events = stream(disaggregated, CHATS, {**body, "stream_options": options})
        choices = [choice for event in events for choice in event["choices"]]
        for index in range(3):
            reasons = [choice["finish_reason"] for choice in choices if choice["index"] == index]
            assert reasons[-1] in ("stop", "length") and set(reasons[:-1]) <= {None}
        assert not any(event.get("usage") for event in events)


def test_min_tokens_counts_exactly_and_holds_every_end_back(disaggregated: Any) -> None:
    """C043: EOS is forced, and ends the answer as the token behind min_tokens."""
    for num_tokens in (0, 1, 4):
        body = {**COMPLETION, "logit_bias": {"2": 100}, "min_tokens": num_tokens, "max_tokens": 12}
        answer = ask(disaggregated, COMPLETIONS, body)
        assert answer["usage"]["completion_tokens"] == num_tokens + 1
        assert answer["choices"][0]["finish_reason"] == "stop"


def test_vanishing_randomness_is_greedy(disaggregated: Any) -> None:
    """C048."""
    body = {**COMPLETION, "max_tokens": 6}
    greedy = ask(disaggregated, COMPLETIONS, body)["choices"][0]["text"]

    for fields in ({"temperature": 0.0001}, {"temperature": 1, "top_p": 0.0001}, {"temperature": 1e-8}):
        assert ask(disaggregated, COMPLETIONS, {**body, **fields})["choices"][0]["text"] == greedy


def test_bans_hold_at_any_temperature_and_penalties_leave_the_prompt_alone(disaggregated: Any) -> None:
    """C053, C059, C060, C061, C062."""
    repeated = {**COMPLETION, "prompt": "yes yes yes yes yes yes yes yes", "max_tokens": 1}
    [plain, punished] = [
        ask(disaggregated, COMPLETIONS, {**repeated, "presence_penalty": penalty})["choices"][0]["text"]
        for penalty in (0, 2)
    ]
    assert plain == punished

    four = {**COMPLETION, "allowed_token_ids": [28, 29, 30, 31], "temperature": 2, "max_tokens": 24, "ignore_eos": True}
    banned = {**four, "logit_bias": {"28": -100}, "bad_words": ["-"], "return_token_ids": True}
    choice = ask(disaggregated, COMPLETIONS, banned)["choices"][0]
    assert set(choice["token_ids"]) <= {29, 30, 31} and 28 not in choice["token_ids"] and "-" not in choice["text"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0, "stream": True}, "n"),
        ({"stop_token_ids": [49152], "min_tokens": 1}, "stop_token_ids"),
        ({"logit_bias": {"49162": -100}}, "logit_bias"),
        ({"prompt": [0, 49152]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 100_000}, "prompt_logprobs"),
        ({"temperature": 999999}, "temperature"),
        ({"bad_words": [""]}, "bad_words.0"),
    ],
)
def test_what_would_hurt_the_engine_never_reaches_it(disaggregated: Any, fields: dict[str, Any], param: str) -> None:
    """C016, C041, C049, C059, C061, C063, C081, C082, C109, C110: a plain 400, and the next answer is right."""
    status, content = post(disaggregated, COMPLETIONS, {**COMPLETION, **fields})

    assert status == 400 and json.loads(content)["error"]["param"] == param
    assert ask(disaggregated, COMPLETIONS, {**COMPLETION, "max_tokens": 1})["choices"][0]["text"]


def test_a_prompt_of_the_beginning_alone_is_answered(disaggregated: Any) -> None:
    """C109: one token, which is what an empty prompt is where texts have a beginning."""
    answer = ask(disaggregated, COMPLETIONS, {**COMPLETION, "prompt": [1], "max_tokens": 3})

    assert answer["usage"]["prompt_tokens"] == 1 and answer["usage"]["completion_tokens"] == 3


def test_logprobs_of_an_answer_belong_to_its_tokens(disaggregated: Any) -> None:
    """C069, C071, C072, C073, C075, C081: at every position, in both shapes, streamed and not."""
    body = {**COMPLETION, "max_tokens": 5, "logprobs": 3}
    whole = ask(disaggregated, COMPLETIONS, body)["choices"][0]["logprobs"]
    for token, logprob, top in zip(whole["tokens"], whole["token_logprobs"], whole["top_logprobs"], strict=True):
        assert top[token] == logprob == max(top.values()) and len(top) == 3
        assert list(top.values()) == sorted(top.values(), reverse=True)
    assert len(set(map(str, whole["top_logprobs"]))) > 1
    parts = [event["choices"][0]["logprobs"] for event in stream(disaggregated, COMPLETIONS, body)]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert [top for part in parts for top in part["top_logprobs"]] == whole["top_logprobs"]

    hot = {**COMPLETION, "max_tokens": 8, "logprobs": 1, "temperature": 2, "seed": 1}
    shown = ask(disaggregated, COMPLETIONS, hot)["choices"][0]["logprobs"]
    assert all(token in top for token, top in zip(shown["tokens"], shown["top_logprobs"], strict=True))
    none = ask(disaggregated, CHATS, {**CHAT, "max_tokens": 2, "logprobs": True, "top_logprobs": 0})["choices"][0]
    assert [entry["top_logprobs"] for entry in none["logprobs"]["content"]] == [[], []]


def test_a_scored_prompt_has_the_same_values_warm_and_in_a_stream(disaggregated: Any) -> None:
    """C076, C077, C078, C079: a prompt of several chunks, and every combination of echo and logprobs."""
    prompt = [900 + i % 500 for i in range(300)]
    body = {**COMPLETION, "prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 1}

    cold, warm = (ask(disaggregated, COMPLETIONS, body)["choices"][0] for _ in range(2))

    assert cold == warm and cold["logprobs"]["token_logprobs"][0] is None
    assert len(cold["logprobs"]["token_logprobs"]) == 301 and None not in cold["logprobs"]["token_logprobs"][1:]
    for asked in ({}, {"echo": True}, {"logprobs": 0}, {"echo": True, "logprobs": 0}):
        short = {**COMPLETION, "max_tokens": 2, **asked}
        assert (
            text_of(stream(disaggregated, COMPLETIONS, short))
            == (ask(disaggregated, COMPLETIONS, short)["choices"][0]["text"])
        )


def test_a_full_context_is_refused_at_its_limit(disaggregated: Any) -> None:
    """C063, C065: a prompt that leaves no room is refused at once; one can be scored without an answer."""
    _, content = disaggregated.get("/v1/models")
    limit = content["data"][0]["max_model_len"]
    body = {**COMPLETION, "max_tokens": None}

    for num_tokens in (limit, limit + 1):
        status, refused = post(disaggregated, COMPLETIONS, {**body, "prompt": [5] * num_tokens})
        assert status == 400 and json.loads(refused)["error"]["code"] == "context_length_exceeded"
    scored = ask(disaggregated, COMPLETIONS, {**COMPLETION, "prompt": [5] * 40, "echo": True, "max_tokens": 0})
    assert scored["usage"]["completion_tokens"] == 0 and scored["choices"][0]["finish_reason"] == "length"


def test_histories_are_rendered_as_transformers_does(disaggregated: Any, demo_model_dir: Path) -> None:
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
        rendered = ask(disaggregated, f"{CHATS}/render", {"model": "test", "messages": [first, *history]})
        expected = reference.apply_chat_template([first, *plain], add_generation_prompt=True, tokenize=False)
        assert rendered["data"][0]["prompt"] == expected

    continued = [first, {"role": "assistant", "content": "Yes"}, first, {"role": "assistant", "content": "Yes "}]
    body = {"model": "test", "messages": continued, "continue_final_message": True, "add_generation_prompt": False}
    rendered = ask(disaggregated, f"{CHATS}/render", body)["data"][0]["prompt"]
    assert rendered == reference.apply_chat_template(continued, continue_final_message=True, tokenize=False)
    status, _ = post(disaggregated, CHATS, {**CHAT, "chat_template_kwargs": {"tokenize": True}})
    assert status == 400
