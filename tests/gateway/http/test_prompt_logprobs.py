"""`prompt_logprobs` as a field of both endpoints, and what goes wrong with logprobs elsewhere."""

import json
import math

import pytest

from pdserve.control.messages import TokenLogprobs
from pdserve.gateway.logprob_format import chat_logprobs, completion_logprobs, prompt_logprobs
from pdserve.gateway.shown_token import ShownToken

MODEL = "org/demo"
COMPLETION = {"model": MODEL, "prompt": "The sky is", "max_tokens": 3}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}


async def test_completions_have_them_by_token_id(gateway):
    ids = gateway.tokenizer.encode(COMPLETION["prompt"])

    _, reply, _ = await gateway.post("/v1/completions", {**COMPLETION, "prompt_logprobs": 2})

    [choice] = reply["choices"]
    assert choice["text"] and choice["logprobs"] is None
    first, *rest = choice["prompt_logprobs"]
    assert first is None and len(rest) == len(ids) - 1
    for position, (token_id, entry) in enumerate(zip(ids[1:], rest, strict=True), start=1):
        assert next(iter(entry)) == str(token_id) and len(entry) == 3
        assert entry[str(token_id)]["logprob"] == -position and entry[str(token_id)]["rank"] is None
        assert [entry[each]["rank"] for each in ("40", "41")] == [1, 2]
        assert entry["40"]["decoded_token"] == gateway.tokenizer.decode([40])


async def test_chat_has_them_beside_the_choices(gateway):
    _, reply, _ = await gateway.post("/v1/chat/completions", {**CHAT, "prompt_logprobs": 0})

    assert reply["prompt_logprobs"][0] is None
    assert len(reply["prompt_logprobs"]) == reply["usage"]["prompt_tokens"]
    assert all(len(entry) == 1 for entry in reply["prompt_logprobs"][1:])
    _, plain, _ = await gateway.post("/v1/chat/completions", CHAT)
    assert "prompt_logprobs" not in plain


async def test_they_go_with_echo_each_with_its_own_number(gateway):
    body = {**COMPLETION, "prompt_logprobs": 3, "echo": True, "logprobs": 1}

    _, reply, _ = await gateway.post("/v1/completions", body)

    [choice] = reply["choices"]
    assert {len(entry) for entry in choice["prompt_logprobs"][1:]} == {4}
    num_prompt = reply["usage"]["prompt_tokens"]
    assert {len(top) for top in choice["logprobs"]["top_logprobs"][1:num_prompt]} == {2}


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)], ids=["completion", "chat"]
)
@pytest.mark.parametrize(("number", "is_stream"), [(21, False), (-1, False), (1, True)])
async def test_what_cannot_be_given_is_refused_by_name(gateway, path, body, number, is_stream):
    status, reply, _ = await gateway.post(path, {**body, "prompt_logprobs": number, "stream": is_stream})

    assert (status, reply["error"]["param"]) == (400, "prompt_logprobs")


def test_what_has_no_probability_is_still_json(demo_tokenizer):
    """C068: -inf and not-a-number become -9999.0."""
    worst = TokenLogprobs(-math.inf, ((41, -0.5), (42, -math.inf), (43, math.nan)))
    tokens = [ShownToken(40, 0, worst)]

    flat, content = completion_logprobs(tokens, demo_tokenizer), chat_logprobs(tokens, demo_tokenizer)
    by_id = prompt_logprobs([1, 40], [worst], demo_tokenizer)

    for shape in (flat, content, by_id):
        json.dumps(shape, allow_nan=False)
    assert flat["token_logprobs"] == [-9999.0]
    assert [each["logprob"] for each in content["content"][0]["top_logprobs"]] == [-0.5, -9999.0, -9999.0]
    assert by_id[1]["40"]["logprob"] == -9999.0


def test_a_sampled_token_outside_of_the_top_has_its_own_entry(demo_tokenizer):
    """C071: completions have k + 1 entries then, a chat's list only the top k."""
    best = ((41, -0.5),)
    tokens = [ShownToken(50, 0, TokenLogprobs(-7.0, best)), ShownToken(41, 1, TokenLogprobs(-0.5, best))]

    flat, content = completion_logprobs(tokens, demo_tokenizer), chat_logprobs(tokens, demo_tokenizer)

    own, other = (demo_tokenizer.decode([token_id]) for token_id in (50, 41))
    assert flat["top_logprobs"] == [{other: -0.5, own: -7.0}, {other: -0.5}]
    assert flat["token_logprobs"] == [-7.0, -0.5]
    assert content["content"][0]["logprob"] == -7.0
    assert [each["token"] for each in content["content"][0]["top_logprobs"]] == [other]


@pytest.mark.parametrize("chunk", [1, 4])
async def test_each_position_has_its_own_alternatives_in_both_shapes(gateway, chunk):
    """C069, C075: the greedy token comes first in its list of k, also in a stream of several tokens a chunk."""
    gateway.say("one two three four five six", chunk=chunk)
    body = {**CHAT, "max_tokens": 6, "logprobs": True, "top_logprobs": 3}

    _, chat, _ = await gateway.post("/v1/chat/completions", body)
    streamed = [part for part in await _events(gateway, "/v1/chat/completions", body) if part.get("logprobs")]
    _, flat, _ = await gateway.post("/v1/completions", {**COMPLETION, "max_tokens": 6, "logprobs": 3})
    flat_parts = await _events(gateway, "/v1/completions", {**COMPLETION, "max_tokens": 6, "logprobs": 3})

    content = chat["choices"][0]["logprobs"]["content"]
    assert len(content) == 6 and len({entry["token"] for entry in content}) == 6
    for entry in content:
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0] == {name: entry[name] for name in ("token", "logprob", "bytes")}
        assert [each["logprob"] for each in entry["top_logprobs"]] == sorted(
            (each["logprob"] for each in entry["top_logprobs"]), reverse=True
        )
    assert [entry for part in streamed for entry in part["logprobs"]["content"]] == content
    arrays = flat["choices"][0]["logprobs"]
    assert set(arrays) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert arrays["tokens"] == [entry["token"] for entry in content]
    assert all(token in top for token, top in zip(arrays["tokens"], arrays["top_logprobs"], strict=True))
    for name, values in arrays.items():
        assert [value for part in flat_parts for value in (part["logprobs"] or {}).get(name, [])] == values


async def test_tokens_held_back_for_a_stop_string_keep_their_own_entries(gateway):
    """C080: the text begins like the stop string and goes on otherwise; then it is completed."""
    gateway.say("Hello there, friend! Goodbye then.")
    body = {**COMPLETION, "max_tokens": 30, "logprobs": 2, "stop": ["there, foe", "Goodbye"]}

    _, whole, _ = await gateway.post("/v1/completions", body)
    parts = await _events(gateway, "/v1/completions", body)

    choice = whole["choices"][0]
    assert choice["text"] == "Hello there, friend! " and choice["finish_reason"] == "stop"
    arrays = choice["logprobs"]
    assert "".join(arrays["tokens"]).startswith(choice["text"])
    assert all(token in top for token, top in zip(arrays["tokens"], arrays["top_logprobs"], strict=True))
    assert [token for part in parts for token in (part["logprobs"] or {}).get("tokens", [])] == arrays["tokens"]
    assert len(arrays["tokens"]) == whole["usage"]["completion_tokens"]


async def _events(gateway, path, body):
    """Return the choices of a stream."""
    async with gateway.session.post(gateway.url + path, json={**body, "stream": True}) as response:
        assert response.status == 200
        blocks = (await response.read()).decode().split("\n\n")
    lines = [block.removeprefix("data: ") for block in blocks if block.startswith("data: {")]
    return [choice for line in lines for choice in json.loads(line)["choices"]]
