"""Every refusal: its status, the field it names, and OpenAI's envelope around it."""

import asyncio
import time

import pytest

from pdserve.gateway.api_keys import KeyLimits, KeyRing, keys_of

MODEL = "org/demo"
CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": MODEL, "prompt": "Hi"}


def check_envelope(reply: dict) -> dict:
    assert set(reply) == {"error"}
    error = reply["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    return error


async def refuse(gateway, path: str, body: object, status: int = 400) -> dict:
    got, reply, response = await gateway.post(path, body)
    assert got == status, reply
    assert response.content_type == "application/json" and response.headers["X-Request-Id"]
    assert gateway.source.started == []
    return check_envelope(reply)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 999999}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"top_p": True}, "top_p"),
        ({"min_p": 2}, "min_p"),
        ({"top_k": -5}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 5.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"n": 10**30}, "n"),
        ({"n": "2"}, "n"),
        ({"seed": "x"}, "seed"),
        ({"seed": 2**70}, "seed"),
        ({"stream": "true"}, "stream"),
        ({"stream_options": 5}, "stream_options"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": False, "stream_options": {}}, "stream_options"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x", ""]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 2000}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [2**40]}, "stop_token_ids"),
        ({"stop_token_ids": [49152]}, "stop_token_ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids.0"),
        ({"ignore_eos": "false"}, "ignore_eos"),
        ({"speculative": 1}, "speculative"),
        ({"presence_penalty": 1e9}, "presence_penalty"),
        ({"frequency_penalty": "0.5"}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias"),
        ({"logit_bias": {"05": 1, "5": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"49152": -100}}, "logit_bias"),
        ({"logit_bias": {"5": "1"}}, "logit_bias.5"),
        ({"logit_bias": {"5": 1000}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [49152]}, "allowed_token_ids"),
        ({"allowed_token_ids": [28, 29], "logit_bias": {"28": -100, "29": -100}}, "allowed_token_ids"),
        ({"bad_words": "the"}, "bad_words"),
        ({"bad_words": ["the", ""]}, "bad_words.1"),
        ({"bad_words": ["x" * 300]}, "bad_words.0"),
        ({"bad_words": ["x"] * 600}, "bad_words"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": ""}}, "response_format.type"),
        ({"response_format": "json_object"}, "response_format"),
        ({"best_of": 0}, "best_of"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"model": ""}, "model"),
        ({"model": 5}, "model"),
        ({"model": None}, "model"),
    ],
)
@pytest.mark.parametrize(("path", "base"), [(CHAT_PATH, CHAT), (COMPLETION_PATH, COMPLETION)])
async def test_wrong_values_are_refused_by_name(gateway, path, base, fields, param):
    """C036, C049, C064, C112, C115, C120."""
    assert (await refuse(gateway, path, {**base, **fields}))["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": 5}, "messages"),
        ({"messages": ["x"]}, "messages.0"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"logprobs": "3"}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ],
)
async def test_wrong_chats_are_refused_by_name(gateway, fields, param):
    """C088, C096, C108."""
    assert (await refuse(gateway, CHAT_PATH, {**CHAT, **fields}))["param"] == param


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        5,
        {},
        [],
        [[]],
        [[1], []],
        [1, "a"],
        [1.5],
        [True],
        [-1],
        [49152],
        [2**63],
        [[1, 49152]],
        ["a", [1]],
        "",
        [""],
        ["a"] * 129,
        ["a"] * 100_000,
    ],
)
async def test_wrong_prompts_are_refused(gateway, prompt):
    """C108, C109, C110, C112."""
    assert (await refuse(gateway, COMPLETION_PATH, {**COMPLETION, "prompt": prompt}))["param"] == "prompt"


@pytest.mark.parametrize("fields", [{"logprobs": True}, {"logprobs": -1}, {"logprobs": 21}])
async def test_wrong_completion_logprobs_are_refused(gateway, fields):
    assert (await refuse(gateway, COMPLETION_PATH, {**COMPLETION, **fields}))["param"] == "logprobs"


@pytest.mark.parametrize("fields", [{"suffix": "x"}, {"use_beam_search": True}])
async def test_unsupported_completion_fields_are_refused(gateway, fields):
    assert (await refuse(gateway, COMPLETION_PATH, {**COMPLETION, **fields}))["param"] == next(iter(fields))


async def test_prompts_times_n_is_bounded(gateway):
    """C112."""
    assert (await refuse(gateway, COMPLETION_PATH, {**COMPLETION, "prompt": ["a"] * 10, "n": 13}))["param"] == "n"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b'{"model": "org/demo",}',
        b'{"a": 1} {"b": 2}',
        b"[" * 10_000,
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": 1e999}',
        b'"x"',
        b"[]",
        b"5",
        b"null",
        b"true",
        '{"prompt": "日本"}'.encode("gbk", "replace") + b"\xff",
        b'{"model": "org/demo", "prompt": "\\ud83d"}',
    ],
)
async def test_bodies_that_are_not_strict_json_objects_are_400(gateway, raw):
    """C028, C029, C049, C105, C106."""
    async with gateway.session.post(gateway.url + COMPLETION_PATH, data=raw) as response:
        assert response.status == 400
        assert check_envelope(await response.json())["code"] == "invalid_json"


@pytest.mark.parametrize("half", ["\\ud83d", "\\ude00", "\\ude00\\ud83d", "x\\ud83dx"])
@pytest.mark.parametrize(
    "fields",
    [
        '"messages": [{"role": "user", "content": "HALF"}]',
        '"messages": [{"role": "user", "content": [{"type": "text", "text": "HALF"}]}]',
        '"messages": [{"role": "user", "content": "x"}], "stop": "HALF"',
        '"messages": [{"role": "user", "content": "x"}], "stop": ["x", "HALF"], "stream": true',
        '"messages": [{"role": "user", "content": "x"}], "user": "HALF"',
        '"messages": [{"role": "user", "content": "x"}], "HALF": 1',
        '"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {"name": "HALF"}}]',
        '"messages": [{"role": "user", "content": "x"}], "model": "HALF"',
    ],
)
async def test_half_a_surrogate_pair_is_refused_wherever_it_stands(gateway, fields, half):
    """C029: nothing is hashed, tokenized or stored of it."""
    raw = f'{{"model": "{MODEL}", {fields.replace("HALF", half)}}}'.encode()

    async with gateway.session.post(gateway.url + CHAT_PATH, data=raw) as response:
        assert response.status == 400
        assert check_envelope(await response.json())["code"] == "invalid_json"
    assert gateway.source.started == []


async def test_a_surrogate_pair_is_one_character_but_not_over_two_parts(gateway):
    """C029."""
    body = '{"model": "org/demo", "messages": [{"role": "user", "content": CONTENT}]}'
    halves = '[{"type": "text", "text": "\\ud83d"}, {"type": "text", "text": "\\ude00"}]'

    async def status_of(content: str) -> int:
        raw = body.replace("CONTENT", content).encode()
        async with gateway.session.post(gateway.url + CHAT_PATH, data=raw) as response:
            return response.status

    assert await status_of('"\\ud83d\\ude00"') == 200
    [started] = gateway.source.started
    assert "😀" in gateway.tokenizer.decode(list(started.request.prompt_token_ids))
    assert await status_of(halves) == 400


async def test_an_empty_prompt_begins_with_the_token_that_begins_every_text(start_gateway, bos_tokenizer):
    """C109: where a tokenizer has one; elsewhere it is refused, and the server goes on."""
    gateway = await start_gateway(tokenizer=bos_tokenizer)

    for prompt in ("", [""]):
        status, reply, _ = await gateway.post(COMPLETION_PATH, {**COMPLETION, "prompt": prompt})
        assert status == 200 and reply["usage"]["prompt_tokens"] == 1 and reply["choices"][0]["text"]
    assert {each.request.prompt_token_ids for each in gateway.source.started} == {(1,)}
    status, reply, _ = await gateway.post(COMPLETION_PATH, {**COMPLETION, "prompt": "", "add_special_tokens": False})
    assert status == 400 and reply["error"]["param"] == "prompt"
    status, _, _ = await gateway.post(COMPLETION_PATH, COMPLETION)
    assert status == 200


async def test_a_declared_charset_is_decoded(gateway):
    """C028."""
    body = '{"model": "org/demo", "prompt": "é"}'.encode("latin-1")
    headers = {"Content-Type": "application/json; charset=latin-1"}

    async with gateway.session.post(gateway.url + COMPLETION_PATH, data=body, headers=headers) as response:
        assert response.status == 200

    assert gateway.source.started[0].request.prompt_token_ids == tuple(gateway.tokenizer.encode("é"))


async def test_a_body_that_is_not_encoded_as_declared_is_400(gateway):
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}

    async with gateway.session.post(gateway.url + COMPLETION_PATH, data=b"not gzip", headers=headers) as response:
        assert response.status == 400
        assert check_envelope(await response.json())["code"] == "invalid_encoding"


async def test_shape_is_checked_before_the_model(gateway):
    """C107, C120."""
    assert (await refuse(gateway, CHAT_PATH, {"model": "nope"}))["param"] == "messages"
    assert (await refuse(gateway, COMPLETION_PATH, {"model": "nope", "prompt": []}))["param"] == "prompt"
    error = await refuse(gateway, CHAT_PATH, {**CHAT, "model": "nope"}, status=404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


async def test_prompt_at_the_context_limit(gateway):
    limit = 256
    gateway.say_ids([5], is_endless=True)

    status, reply, _ = await gateway.post(COMPLETION_PATH, {**COMPLETION, "prompt": [5] * (limit - 1)})
    assert status == 200 and reply["usage"]["completion_tokens"] == 1
    assert reply["choices"][0]["finish_reason"] == "length"

    gateway.source.started.clear()
    for num_tokens in (limit, limit + 1):
        error = await refuse(gateway, COMPLETION_PATH, {**COMPLETION, "prompt": [5] * num_tokens})
        assert error["code"] == "context_length_exceeded" and error["param"] == "prompt"
        assert str(num_tokens) in error["message"] and str(limit) in error["message"]


async def test_prompt_and_answer_over_the_limit_are_refused_with_both_numbers(gateway):
    """C066."""
    body = {**COMPLETION, "prompt": [5] * 30, "max_tokens": 1000}

    error = await refuse(gateway, COMPLETION_PATH, body)

    assert error["code"] == "context_length_exceeded"
    assert "256" in error["message"] and "30 in the prompt" in error["message"] and "1000" in error["message"]
    error = await refuse(gateway, CHAT_PATH, {**CHAT, "max_tokens": 5, "max_completion_tokens": 10**12})
    assert error["param"] == "max_completion_tokens"


async def test_a_huge_prompt_is_refused_quickly_and_health_answers_meanwhile(start_gateway):
    """C067, C114."""
    gateway = await start_gateway(max_model_len=8192)
    text = "the quick brown fox " * 30_000  # 600 KB: under the bound by characters, so it is tokenized

    async def slowest_health() -> float:
        slowest = 0.0
        while not refused.done():
            started = time.monotonic()
            async with gateway.session.get(gateway.url + "/health") as response:
                assert response.status == 200
            slowest = max(slowest, time.monotonic() - started)
        return slowest

    refused = asyncio.ensure_future(gateway.post(COMPLETION_PATH, {**COMPLETION, "prompt": text}))
    slowest = await slowest_health()
    status, reply, _ = await refused

    assert status == 400 and reply["error"]["code"] == "context_length_exceeded"
    assert slowest < 5.0  # tokenizing it inline would stop the loop for longer than this on a busy machine
    error = await refuse(gateway, COMPLETION_PATH, {**COMPLETION, "prompt": "x" * 5_000_000})
    assert "at least" in error["message"]


async def test_a_body_over_the_limit_is_413_and_a_large_one_under_it_is_read(start_gateway):
    """C113."""
    gateway = await start_gateway(max_body_bytes=2_000_000)
    error = await refuse(gateway, COMPLETION_PATH, {**COMPLETION, "prompt": "x" * 2_000_000}, status=413)
    assert error["code"] == "body_too_large"

    async def chunks():
        yield b'{"model": "org/demo", "prompt": "'
        for _ in range(40):
            yield b"x" * 100_000

    async with gateway.session.post(gateway.url + COMPLETION_PATH, data=chunks()) as response:
        assert response.status == 413
        check_envelope(await response.json())
    assert (await refuse(gateway, COMPLETION_PATH, {**COMPLETION, "prompt": "x" * 1_500_000}))[
        "code"
    ] == "context_length_exceeded"


async def test_unknown_paths_and_methods_have_the_envelope_too(gateway):
    """C104."""
    async with gateway.session.get(gateway.url + "/nope") as response:
        assert response.status == 404
        assert check_envelope(await response.json())["code"] == "not_found"
    async with gateway.session.get(gateway.url + CHAT_PATH) as response:
        assert response.status == 405 and "POST" in response.headers["Allow"]
        assert check_envelope(await response.json())["code"] == "method_not_allowed"


async def test_nulls_are_defaults_and_neutral_values_are_accepted(gateway):
    """C089."""
    names = ["temperature", "top_p", "n", "seed", "stop", "stream", "stream_options", "max_tokens", "tools"]
    names += ["functions", "tool_choice", "logit_bias", "response_format", "presence_penalty", "top_logprobs"]
    neutral = {"logit_bias": {}, "tools": [], "presence_penalty": 0, "user": "", "max_tokens": 5.0}

    for fields in (dict.fromkeys(names), neutral, {"response_format": {"type": "text"}, "top_p": 0}):
        status, reply, response = await gateway.post(CHAT_PATH, {**CHAT, **fields})
        assert status == 200, reply
        assert "x-pdserve-warning" not in response.headers


async def test_unknown_fields_are_ignored_and_reported(gateway):
    """C116."""
    status, _, response = await gateway.post(CHAT_PATH, {**CHAT, "enable_thinking": 1, "bad\nname": 2})

    assert status == 200
    assert response.headers["x-pdserve-warning"] == "ignored unknown fields: ?, enable_thinking"


async def test_api_keys(start_gateway):
    """C107, C164."""
    gateway = await start_gateway(api_keys=KeyRing(keys_of(("sekret", "schlüssel"), KeyLimits())))

    async def status_with(header: str | None, path: str = CHAT_PATH) -> int:
        headers = {} if header is None else {"Authorization": header}
        async with gateway.session.post(gateway.url + path, data=b"not json", headers=headers) as response:
            check_envelope(await response.json())
            return response.status

    for header in (None, "Bearer", "Bearer ", "Bearer wrong", "Basic sekret", "sekret", "Bearer ünknown"):
        assert await status_with(header) == 401, header
    for header in ("Bearer sekret", "bearer   sekret ", "BEARER schlüssel"):
        assert await status_with(header) == 400, header
    for path in ("/health", "/live", "/ready", "/metrics"):
        async with gateway.session.get(gateway.url + path) as response:
            assert response.status == 200
    async with gateway.session.get(gateway.url + "/admin/status") as response:
        assert response.status == 401


@pytest.mark.parametrize("given", ["abc-123", "x" * 128])
async def test_a_plain_request_id_is_echoed_everywhere(gateway, given):
    """C166."""
    for path, body in ((CHAT_PATH, CHAT), (CHAT_PATH, {}), ("/nope", {}), (CHAT_PATH, {**CHAT, "stream": True})):
        async with gateway.session.post(gateway.url + path, json=body, headers={"X-Request-Id": given}) as response:
            assert response.headers["X-Request-Id"] == given
            assert given not in await response.text()


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "é"])
async def test_other_request_ids_are_replaced(gateway, given):
    """C118."""
    async with gateway.session.get(gateway.url + "/health", headers={"X-Request-Id": given}) as response:
        assert response.headers["X-Request-Id"] not in ("", given)


async def test_the_same_request_id_twice_is_two_requests(gateway):
    headers = {"X-Request-Id": "same"}
    replies = await asyncio.gather(*[gateway.post(CHAT_PATH, CHAT, headers=headers) for _ in range(2)])

    assert [status for status, _, _ in replies] == [200, 200]
    ids = {generation.request.request_id for generation in gateway.source.started}
    assert len(ids) == 2 and "same" not in "".join(ids)
