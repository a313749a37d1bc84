"""What users of other servers reported of streams, through a prefill and a decode node."""

import json
import signal
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
CHAT = {"model": "test", "messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
COMPLETION = {"model": "test", "prompt": "One, two, three,", "temperature": 0}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"max_tokens": 3}, "length"), ({"max_tokens": 60}, "stop"), ({"max_tokens": 60, "stop": "Paris"}, "stop")],
)
def test_each_way_to_end_a_stream_is_one_reason_and_one_done(api: Any, fields: dict[str, Any], reason: str) -> None:
    """C001, C008, C012, C013, C039: with and without logprobs; a stop string that never comes leaves EOS in force."""
    whole = api.ask(CHATS, {**CHAT, **fields})

    for asked in ({}, {"logprobs": True, "top_logprobs": 1}, {"stop": fields.get("stop", "\nObservation")}):
        events = api.stream(CHATS, {**CHAT, **fields, **asked})
        reasons = [event["choices"][0]["finish_reason"] for event in events]
        assert reasons[-1] == reason == whole["choices"][0]["finish_reason"] and set(reasons[:-1]) <= {None}
        assert api.text_of(events) == whole["choices"][0]["message"]["content"]


def test_usage_counts_every_choice_once_and_comes_last(api: Any) -> None:
    """C002, C004, C005, C010, C020."""
    body = {**COMPLETION, "prompt": ["One, two,", "A, B, C, D,"], "n": 2, "max_tokens": 5, "seed": 3, "temperature": 1}

    whole = api.ask(COMPLETIONS, body)
    events = api.stream(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})

    assert [api.text_of(events, index) for index in range(4)] == [choice["text"] for choice in whole["choices"]]
    assert events[-1]["choices"] == [] and all(event["usage"] is None for event in events[:-1])
    used, streamed = whole["usage"], events[-1]["usage"]
    assert used["completion_tokens"] == streamed["completion_tokens"] <= 20
    assert used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"] == streamed["total_tokens"]


def test_continuous_usage_of_a_prompt_of_many_chunks(api: Any) -> None:
    """C006, C007: nothing is said before the first token, and the prompt has one length throughout."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**COMPLETION, "prompt": [1000 + i % 700 for i in range(700)], "max_tokens": 3, "ignore_eos": True}

    events = api.stream(COMPLETIONS, {**body, "stream_options": options})

    assert {event["usage"]["prompt_tokens"] for event in events} == {700}
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts[0] >= 1 and counts == sorted(counts) and counts[-1] == 3


def test_each_choice_of_a_stream_ends_once(api: Any) -> None:
    """C003, C009: at lengths of their own; stream_options that ask for nothing change nothing."""
    body = {**CHAT, "n": 3, "temperature": 1, "seed": 11, "max_tokens": 8, "stop": ["."]}

    for options in ({}, {"include_usage": False}):
        events = api.stream(CHATS, {**body, "stream_options": options})
        choices = [choice for event in events for choice in event["choices"]]
        for index in range(3):
            reasons = [choice["finish_reason"] for choice in choices if choice["index"] == index]
            assert reasons[-1] in ("stop", "length") and set(reasons[:-1]) <= {None}
        assert not any(event.get("usage") for event in events)


def test_a_prefill_that_takes_its_time_is_not_silent(scripted: Any, reading_api: Any) -> None:
    """C018: headers and comments come before the first token, none behind the end, and none in a whole answer."""
    body = {"model": "test", "prompt": "⟦spaces⟧", "temperature": 0}
    content = json.dumps({**body, "stream": True}).encode()
    request = urllib.request.Request(
        reading_api.url + COMPLETIONS, content, {"Content-Type": "application/json", **reading_api.headers}
    )
    prefill = scripted.processes["prefill-0"]

    with ThreadPoolExecutor(1) as pool:
        prefill.send_signal(signal.SIGSTOP)
        try:
            whole = pool.submit(reading_api.post, COMPLETIONS, body)
            with urllib.request.urlopen(request, timeout=120) as reply:
                first = reply.readline() + reply.readline()
                prefill.send_signal(signal.SIGCONT)
                events = reading_api.events(first + reply.read())
        finally:
            prefill.send_signal(signal.SIGCONT)

    assert first == b": keep-alive\n\n"
    assert reading_api.text_of(events) == json.loads(whole.result().content)["choices"][0]["text"] != ""


def test_events_are_sent_as_they_come_and_marked_for_proxies(disaggregated: Any, api: Any) -> None:
    """C019: the first events can be read while the answer is far from its end."""
    body = {**COMPLETION, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    headers = {"Content-Type": "application/json", "Accept-Encoding": "gzip, br"}
    request = urllib.request.Request(api.url + COMPLETIONS, json.dumps(body).encode(), headers)

    with urllib.request.urlopen(request, timeout=120) as reply:
        lines = [reply.readline() for _ in range(10)]
        events = [json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: ")]
        _, record = disaggregated.get(f"/v1/requests/{events[0]['id']}")

    assert len(events) >= 4 and record["status"] not in ("finished", "failed", "cancelled")
    assert reply.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["Cache-Control"] == "no-cache" and reply.headers["X-Accel-Buffering"] == "no"
    assert reply.headers["Content-Length"] is None and reply.headers["Content-Encoding"] is None
    disaggregated.wait_idle(60)


def test_streams_go_through_both_nodes(scripted: Any, scripted_api: Any) -> None:
    """What whole answers say in a header is counted for all."""
    body = {"model": "test", "prompt": "⟦spaces⟧", "temperature": 0}
    before = scripted.status()["routes"]

    for _ in range(3):
        scripted_api.stream(COMPLETIONS, body)

    assert scripted.status()["routes"] == {**before, "disaggregated": before.get("disaggregated", 0) + 3}
