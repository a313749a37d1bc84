"""Server-sent events, read by a strict parser."""

import asyncio
import json

import pytest
from yarl import URL

from pdserve.gateway.errors import AdmissionRefused, GenerationFailed

MODEL = "org/demo"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
COMPLETION = {"model": MODEL, "prompt": "Hi", "stream": True}
REASONS = {None, "stop", "length"}


def parse(raw: bytes) -> tuple[list[dict], int]:
    """Return the JSON events and the number of comments; anything that is not SSE fails."""
    assert raw.endswith(b"\n\n")
    events: list[dict] = []
    num_comments = num_done = 0
    for block in raw.decode().split("\n\n")[:-1]:
        assert "\n" not in block
        if block.startswith(": "):
            assert num_done == 0
            num_comments += 1
            continue
        assert block.startswith("data: ") and num_done == 0
        if block == "data: [DONE]":
            num_done += 1
            continue
        events.append(json.loads(block.removeprefix("data: "), parse_constant=lambda name: pytest.fail(name)))
    assert num_done == 1
    assert not any("error" in event for event in events[:-1])
    return events, num_comments


async def read(gateway, path: str, body: dict) -> tuple[list[dict], int]:
    async with gateway.session.post(gateway.url + path, json=body) as response:
        assert response.status == 200, await response.text()
        return parse(await response.read())


def texts(events: list[dict]) -> str:
    choices = [event["choices"][0] for event in events if event.get("choices")]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
@pytest.mark.parametrize("max_tokens", [1, 2, 5, 6, 50])
@pytest.mark.parametrize("chunk", [1, 3, 50])
async def test_streamed_text_reason_and_usage_equal_the_whole_answer(gateway, path, body, max_tokens, chunk):
    """C001, C002, C004, C008, C011, C012."""
    gateway.say("One 👩‍👩‍👧 two", chunk=chunk)
    body = {**body, "max_tokens": max_tokens}

    events, _ = await read(gateway, path, {**body, "stream_options": {"include_usage": True}})
    _, whole, _ = await gateway.post(path, {**body, "stream": False})

    choice = whole["choices"][0]
    assert texts(events) == (choice["text"] if "text" in choice else choice["message"]["content"])
    reasons = [event["choices"][0]["finish_reason"] for event in events if event["choices"]]
    assert set(reasons) <= REASONS
    assert [reason for reason in reasons if reason] == [choice["finish_reason"]] and reasons[-1]
    assert events[-1]["choices"] == [] and events[-1]["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in events[:-1])
    assert len({event["id"] for event in events}) == 1


async def test_headers_keep_proxies_from_buffering(gateway):
    """C019."""
    async with gateway.session.post(gateway.url + "/v1/chat/completions", json=CHAT) as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["X-Accel-Buffering"] == "no"
        assert "Content-Length" not in response.headers and "Content-Encoding" not in response.headers
        parse(await response.read())


async def test_headers_come_before_the_first_token_and_comments_keep_the_stream_alive(start_gateway):
    """C018."""
    gateway = await start_gateway(keep_alive_s=0.05)
    gateway.say("later", hold_after=0)
    gateway.script.proceed.clear()

    async with gateway.session.post(gateway.url + "/v1/chat/completions", json=CHAT) as response:
        assert response.status == 200
        first = await response.content.readuntil(b"\n\n")
        gateway.script.proceed.set()
        events, _ = parse(first + await response.read())

    assert first == b": keep-alive\n\n"
    assert texts(events) == "later"


@pytest.mark.parametrize("options", [{}, None, {"include_usage": False}])
async def test_usage_needs_an_explicit_true(gateway, options):
    """C003."""
    events, _ = await read(gateway, "/v1/chat/completions", {**CHAT, "stream_options": options})

    assert not any("usage" in event for event in events)


async def test_continuous_usage_counts_up_to_the_total(gateway):
    """C007."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    gateway.say("one two three four")

    events, _ = await read(gateway, "/v1/completions", {**COMPLETION, "stream_options": options})

    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[0] >= 1
    assert counts[-1] == counts[-2]
    assert {event["usage"]["prompt_tokens"] for event in events} == {1}


async def test_each_choice_has_its_own_index_and_one_reason(gateway):
    """C009, C010."""
    answers = iter([gateway.tokenizer.encode(text) for text in ("a", "b b b b b", "c c")])
    gateway.say_ids([])
    gateway.script.answer = lambda request: next(answers)

    events, _ = await read(gateway, "/v1/chat/completions", {**CHAT, "n": 3})

    by_index = {i: [e for e in events if e["choices"][0]["index"] == i] for i in range(3)}
    assert [texts(by_index[i]) for i in range(3)] == ["a", "b b b b b", "c c"]
    for chunks in by_index.values():
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert reasons[-1] == "stop" and not any(reasons[:-1])
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


async def test_failure_after_headers_is_one_error_event_and_the_end(gateway):
    gateway.say("one two three four five", fail_after=3, failure=GenerationFailed("node_lost", "gone", True))

    events, _ = await read(gateway, "/v1/chat/completions", CHAT)

    assert events[-1]["error"]["code"] == "node_lost" and events[-1]["error"]["type"] == "server_error"
    assert not any(event["choices"][0]["finish_reason"] for event in events[:-1])
    assert len(gateway.open_requests) == 0


async def test_unexpected_error_in_a_stream_is_an_event_too(gateway):
    gateway.say("one two", fail_after=1, failure=RuntimeError("secret"))

    events, _ = await read(gateway, "/v1/completions", COMPLETION)

    assert events[-1]["error"]["code"] == "internal_error"
    assert "secret" not in json.dumps(events)


@pytest.mark.parametrize("body", [CHAT, {**CHAT, "stream": False}])
async def test_refusal_is_a_plain_503_with_retry_after(gateway, body):
    gateway.script.refusal = AdmissionRefused("server_overloaded", "full", 2.3)

    status, reply, response = await gateway.post("/v1/chat/completions", body)

    assert status == 503 and reply["error"]["code"] == "server_overloaded"
    assert response.headers["Retry-After"] == "3"


async def test_invalid_stream_request_is_a_plain_400(gateway):
    """C016."""
    status, reply, response = await gateway.post("/v1/chat/completions", {**CHAT, "n": 0})

    assert status == 400 and reply["error"]["param"] == "n"
    assert response.content_type == "application/json"


@pytest.mark.parametrize("chunk", [1, 2, 7])
@pytest.mark.parametrize("include", [False, True])
async def test_stop_string_ends_text_usage_and_logprobs_alike(gateway, chunk, include):
    """C038, C040."""
    gateway.say("The answer is: forty-two, not more.", chunk=chunk)
    body = {
        **COMPLETION,
        "max_tokens": 50,
        "stop": [": forty-t"],
        "logprobs": 1,
        "include_stop_str_in_output": include,
    }

    events, _ = await read(gateway, "/v1/completions", {**body, "stream_options": {"include_usage": True}})
    _, whole, _ = await gateway.post("/v1/completions", {**body, "stream": False})

    choice = whole["choices"][0]
    assert choice["text"] == texts(events) == ("The answer is: forty-t" if include else "The answer is")
    assert choice["finish_reason"] == "stop"
    num_tokens = whole["usage"]["completion_tokens"]
    assert len(choice["logprobs"]["tokens"]) == num_tokens == events[-1]["usage"]["completion_tokens"]
    streamed = [t for e in events if e["choices"] for t in e["choices"][0]["logprobs"]["tokens"]]
    assert streamed == choice["logprobs"]["tokens"]
    assert [g.ended for g in gateway.source.started] == ["early stop"] * 2


async def test_one_of_many_failing_ends_all(gateway):
    gateway.say("one two three", fail_after=2, failure=GenerationFailed("engine_error", "broken", False))

    status, reply, _ = await gateway.post("/v1/completions", {**COMPLETION, "stream": False, "n": 4})

    assert status == 500 and reply["error"]["code"] == "engine_error"
    assert all(g.ended in ("failed", "cancelled") for g in gateway.source.started)


async def test_two_hundred_streams_at_once_all_complete(gateway):
    gateway.say("one two three four")

    results = await asyncio.gather(*[read(gateway, "/v1/completions", COMPLETION) for _ in range(200)])

    assert {texts(events) for events, _ in results} == {"one two three four"}


@pytest.mark.parametrize(
    ("path", "body", "options"),
    [
        ("/v1/chat/completions", CHAT, {}),
        ("/v1/chat/completions", CHAT, {"n": 3}),
        ("/v1/completions", COMPLETION, {}),
        ("/v1/completions", COMPLETION, {"n": 2, "echo": True}),
    ],
)
async def test_events_encoded_around_their_text_are_those_encoded_whole(gateway, path, body, options):
    gateway.say('a "quoted" \\ line\n and 👩‍👩‍👧 to the end')

    events, _ = await read(gateway, path, {**body, **options, "stream_options": {"include_usage": True}})
    counted = {"include_usage": True, "continuous_usage_stats": True}  # these change with every event
    whole, _ = await read(gateway, path, {**body, **options, "stream_options": counted})

    def shown(event: dict) -> dict:
        return {name: value for name, value in event.items() if name not in {"usage", "id", "created"}}

    def by_choice(events: list[dict]) -> dict[int, list[dict]]:
        indexes = range(options.get("n", 1))
        return {
            at: [shown(each) for each in events if each["choices"][:1] and each["choices"][0]["index"] == at]
            for at in indexes
        }

    assert by_choice(events) == by_choice(whole)
    assert all(event["usage"] is None for event in events[:-1]) and events[-1]["usage"] is not None


async def test_http_1_0_gets_the_events_without_chunks_and_an_end(gateway):
    body = json.dumps(COMPLETION).encode()
    head = b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    gateway.say("one two three")
    reader, writer = await asyncio.open_connection("127.0.0.1", URL(gateway.url).port)
    writer.write(head + body)

    async with asyncio.timeout(30):
        answer = await reader.read()  # up to the end of the connection

    headers, _, content = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in headers.lower()
    assert texts(parse(content)[0]) == "one two three"
    writer.close()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_clients_that_cut_lines_as_unicode_does_see_whole_events(gateway, path):
    said = "next\x85line\u2028separator\u2029end\x0b\x1c"
    gateway.say(said)
    body = {"/v1/completions": COMPLETION, "/v1/responses": {"model": MODEL, "input": "Hi", "stream": True}}
    async with gateway.session.post(gateway.url + path, json=body.get(path, {**CHAT, "max_tokens": 50})) as response:
        raw = await response.read()

    lines = raw.decode().splitlines()
    assert lines == raw.decode().split("\n")[:-1]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    deltas = [event.get("delta", "") for event in events if event.get("type", "").endswith("delta")]
    parts = [delta if isinstance(delta, str) else delta.get("text", "") for delta in deltas]
    assert "".join(parts) + texts(events) == said
