"""What is asked of the source, and how tokens become an answer."""

import json

import pytest

from pdserve.engine.tokenizer import Tokenizer

MODEL = "org/demo"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": MODEL, "prompt": "Hi"}


async def complete(gateway, **fields) -> dict:
    status, reply, _ = await gateway.post("/v1/completions", {**COMPLETION, **fields})
    assert status == 200, reply
    return reply


async def chat(gateway, **fields) -> dict:
    status, reply, _ = await gateway.post("/v1/chat/completions", {**CHAT, **fields})
    assert status == 200, reply
    return reply


async def test_prompt_shapes_ask_for_the_same_tokens_in_order(gateway):
    """C111."""
    ids = [gateway.tokenizer.encode(text) for text in ("a b", "c")]

    for prompt in (["a b", "c"], ids):
        gateway.source.started.clear()
        reply = await complete(gateway, prompt=prompt, n=2)
        asked = [list(generation.request.prompt_token_ids) for generation in gateway.source.started]
        assert asked == [ids[0], ids[0], ids[1], ids[1]]
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
        assert reply["usage"]["prompt_tokens"] == len(ids[0]) + len(ids[1])
    assert len((await complete(gateway, prompt=ids[0]))["choices"]) == 1


async def test_each_choice_has_its_own_seed_and_the_same_one_next_time(gateway):
    """C056."""
    await complete(gateway, prompt=["p", "p"], n=3, seed=42)

    seeds = [generation.request.sampling.seed for generation in gateway.source.started]
    assert seeds[0] == 42 and len(set(seeds[:3])) == 3 and seeds[:3] == seeds[3:]
    gateway.source.started.clear()
    await complete(gateway, n=3)
    assert [generation.request.sampling.seed for generation in gateway.source.started] == [None] * 3


async def test_sampling_and_extensions_reach_the_source(gateway):
    await complete(
        gateway,
        max_tokens=9,
        min_tokens=2,
        temperature=0,
        top_k=-1,
        top_p=0.5,
        min_p=0.1,
        stop_token_ids=[7],
        ignore_eos=True,
        speculative=False,
        logprobs=3,
        stop="zzz",
        cache_salt="tenant",
    )

    request = gateway.source.started[0].request
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature) == (9, 2, 0)
    assert (sampling.top_k, sampling.top_p, sampling.min_p, sampling.logprobs) == (-1, 0.5, 0.1, 3)
    assert sampling.stop_token_ids == (7,) and sampling.ignore_eos and sampling.stop == ()
    assert not sampling.speculative
    assert request.cache_salt == "tenant"


async def test_defaults_of_max_tokens(gateway):
    """C066."""
    await complete(gateway)
    await chat(gateway)
    await chat(gateway, max_tokens=3, max_completion_tokens=4)

    requests = [generation.request for generation in gateway.source.started]
    assert requests[0].sampling.max_tokens == 16
    assert requests[1].sampling.max_tokens == 256 - len(requests[1].prompt_token_ids)
    assert requests[2].sampling.max_tokens == 4


async def test_chat_tokens_are_those_of_the_template(gateway):
    """C088, C117."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await chat(gateway, messages=[{"role": "system", "content": ""}, {"role": "user", "content": parts}])

    text = gateway.tokenizer.decode(gateway.source.started[0].request.prompt_token_ids, skip_special_tokens=False)
    assert text == "<|im_start|>system\n<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"


async def test_tool_history_is_rendered(gateway):
    """C085, C086, C087."""
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": '{"city": "X"}'}}
    history = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "1"},
        {"role": "assistant", "content": "hi", "tool_calls": []},
    ]

    await chat(gateway, messages=history)

    text = gateway.tokenizer.decode(gateway.source.started[0].request.prompt_token_ids, skip_special_tokens=False)
    assert "<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\nsunny<|im_end|>" in text


async def test_continued_message_is_the_end_of_the_prompt(gateway):
    """C093."""
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "OK! "}]

    await chat(gateway, messages=messages, continue_final_message=True)

    text = gateway.tokenizer.decode(gateway.source.started[0].request.prompt_token_ids, skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\nOK! ")


async def test_character_cut_at_the_limit_is_one_replacement_character(gateway):
    """C024."""
    emoji = gateway.tokenizer.encode("😀")
    gateway.say("ok 😀 and more")
    limit = len(gateway.tokenizer.encode("ok 😀")) - 1
    assert len(emoji) > 1

    reply = await complete(gateway, max_tokens=limit)

    assert reply["choices"][0]["text"] == "ok \ufffd"
    assert reply["choices"][0]["finish_reason"] == "length"


async def test_min_tokens_hold_back_stop_strings(gateway):
    """C042."""
    gateway.say("a\nb\nc\nd")

    assert (await complete(gateway, stop="\n"))["choices"][0]["text"] == "a"
    reply = await complete(gateway, stop="\n", min_tokens=4)
    assert reply["choices"][0]["text"] == "a\nb\nc"


async def test_roles_and_effort_reach_the_template_as_it_knows_them(start_gateway, demo_model_dir):
    """`developer` is `system` to a template that does not know it; the effort is a variable of the template."""
    shown = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}{{ reasoning_effort }}"
    messages = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]
    for template, expected in ((shown, "[system]a[user]blow"), (shown + "{# developer #}", "[developer]a[user]blow")):
        gateway = await start_gateway(tokenizer=Tokenizer.load(demo_model_dir, template))
        body = {"model": MODEL, "messages": messages, "reasoning_effort": "low"}

        status, reply, response = await gateway.post("/v1/chat/completions/render", body)

        assert status == 200 and reply["data"][0]["prompt"] == expected
        assert "x-pdserve-warning" not in response.headers


async def test_special_tokens_are_shown_only_on_request(gateway):
    gateway.say("a<|im_start|>b")

    assert (await complete(gateway))["choices"][0]["text"] == "ab"
    assert (await complete(gateway, skip_special_tokens=False))["choices"][0]["text"] == "a<|im_start|>b"


async def test_a_stop_token_has_no_text_unless_it_is_asked_for(gateway):
    ids = gateway.tokenizer.encode("one two three")
    gateway.say_ids(ids)
    gateway.source._eos = ids[-1]
    gateway.say_ids(ids[:-1])

    assert (await complete(gateway, stop_token_ids=[ids[-1]]))["choices"][0]["text"] == "one two"
    reply = await complete(gateway, stop_token_ids=[ids[-1]], include_stop_str_in_output=True)
    assert reply["choices"][0]["text"] == "one two three"
    assert reply["usage"]["completion_tokens"] == 3


async def test_token_ids_are_returned_on_request(gateway):
    gateway.say("one two")
    expected = [*gateway.tokenizer.encode("one two"), min(gateway.tokenizer.eos_token_ids)]

    choice = (await complete(gateway, return_token_ids=True))["choices"][0]
    assert choice["token_ids"] == expected
    assert choice["prompt_token_ids"] == gateway.tokenizer.encode("Hi")
    body = {**CHAT, "return_token_ids": True, "stream": True}
    async with gateway.session.post(gateway.url + "/v1/chat/completions", json=body) as response:
        lines = [line.removeprefix("data: ") for line in (await response.text()).split("\n\n")[:-2]]
    choices = [json.loads(line)["choices"][0] for line in lines]
    assert [token_id for choice in choices for token_id in choice.get("token_ids", [])] == expected
    assert sum("prompt_token_ids" in choice for choice in choices) == 1


@pytest.mark.parametrize("k", [0, 1, 3])
async def test_logprobs_have_the_shape_of_each_endpoint(gateway, k):
    gateway.say("one two 😀", chunk=2)

    flat = (await complete(gateway, logprobs=k))["choices"][0]
    num_tokens = len(flat["logprobs"]["tokens"])
    assert flat["logprobs"]["token_logprobs"] == [-0.5] * num_tokens
    assert all(len(top) == max(k, 1) for top in flat["logprobs"]["top_logprobs"])
    assert flat["logprobs"]["text_offset"][:2] == [0, 3]
    entries = (await chat(gateway, logprobs=True, top_logprobs=k))["choices"][0]["logprobs"]["content"]
    assert len(entries) == num_tokens
    assert all(len(entry["top_logprobs"]) == k for entry in entries)
    assert bytes(b for entry in entries[:-1] for b in entry["bytes"]).decode() == "one two 😀"


async def test_without_logprobs_the_field_is_null(gateway):
    assert (await complete(gateway))["choices"][0]["logprobs"] is None
    assert (await chat(gateway, logprobs=False))["choices"][0]["logprobs"] is None


async def test_long_prompts_are_cut_from_the_left_when_asked(gateway):
    """C067."""
    ids = list(range(10, 40))
    for fields, kept in (({"truncate_prompt_tokens": 4}, ids[-4:]), ({"truncate_prompt_tokens": -1}, ids)):
        status, reply, _ = await gateway.post(
            "/v1/completions", {"model": MODEL, "prompt": ids, "echo": True, **fields}
        )
        assert status == 200 and reply["usage"]["prompt_tokens"] == len(kept)
        assert list(gateway.source.started[-1].request.prompt_token_ids) == kept

    long = {"model": MODEL, "prompt": "word " * 2000, "max_tokens": 6}
    assert (await gateway.post("/v1/completions", long))[0] == 400
    status, reply, _ = await gateway.post("/v1/completions", {**long, "truncate_prompt_tokens": -1})
    assert status == 200 and reply["usage"]["prompt_tokens"] == 250
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "word " * 2000}], "truncate_prompt_tokens": 9}
    status, reply, _ = await gateway.post("/v1/chat/completions", chat)
    assert status == 200 and reply["usage"]["prompt_tokens"] == 9


@pytest.mark.parametrize(
    ("path", "fields", "num_kept"),
    [
        ("/v1/completions", {}, 256 - 16),
        ("/v1/completions", {"min_tokens": 30}, 256 - 30),
        ("/v1/completions", {"max_tokens": 40}, 256 - 40),
        ("/v1/completions", {"max_tokens": 0, "echo": True}, 256),
        ("/v1/chat/completions", {}, 256 - 1),
        ("/v1/chat/completions", {"min_tokens": 30}, 256 - 30),
        ("/v1/chat/completions", {"max_tokens": 9, "max_completion_tokens": 50}, 256 - 50),
    ],
)
async def test_a_cut_to_the_context_leaves_room_for_the_answer(gateway, path, fields, num_kept):
    long = "word " * 2000
    asked = {"prompt": long} if path == "/v1/completions" else {"messages": [{"role": "user", "content": long}]}

    status, reply, _ = await gateway.post(path, {"model": MODEL, **asked, **fields, "truncate_prompt_tokens": -1})

    assert status == 200 and reply["usage"]["prompt_tokens"] == num_kept
    request = gateway.source.started[-1].request if gateway.source.started else None
    assert request is None or len(request.prompt_token_ids) == num_kept


@pytest.mark.parametrize("value", [0, -2, 257, "5", True])
async def test_a_wrong_cut_is_refused(gateway, value):
    body = {"model": MODEL, "prompt": "Hi", "truncate_prompt_tokens": value}

    status, reply, _ = await gateway.post("/v1/completions", body)

    assert status == 400 and reply["error"]["param"] == "truncate_prompt_tokens"


async def test_the_label_of_a_request_may_come_in_its_body(gateway):
    _, _, response = await gateway.post("/v1/completions", {"model": MODEL, "prompt": "Hi", "request_id": "mine:1"})
    assert response.headers["X-Request-Id"] == "mine:1"

    status, reply, _ = await gateway.post("/v1/completions", {"model": MODEL, "prompt": "Hi", "request_id": "a b\n"})
    assert status == 400 and reply["error"]["param"] == "request_id"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_says_how_it_was_made_when_asked(gateway, stream):
    body = {"model": MODEL, "prompt": "Hi", "n": 2, "return_route_info": True, "stream": stream}
    async with gateway.session.post(gateway.url + "/v1/completions", json=body) as response:
        text = await response.text()
    last = json.loads(text.split("data: ")[-2]) if stream else json.loads(text)

    assert [choice["index"] for choice in last["route_info"]] == [0, 1]
    for choice in last["route_info"]:
        assert (choice["route"], choice["prefill_node_id"], choice["cached_tokens"]) == (
            "disaggregated",
            "prefill-0",
            3,
        )
        assert choice["stages_ms"]["first_token"] == 5.0 and choice["stages_ms"]["ended"] is None
