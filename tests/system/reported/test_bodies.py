"""What users of other servers reported of bytes, headers and paths, before a prefill and a decode node."""

import contextlib
import http.client
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
SCRIPTED = {"model": "test", "prompt": "⟦spaces⟧", "temperature": 0}
SAID = "  leading x hello world"
MESSAGES: list[Any] = [{"role": "user", "content": "⟦spaces⟧"}]


@pytest.fixture
def still_answers(scripted_api: Any) -> Iterator[None]:
    """Whatever a test has sent, the next request goes through both nodes."""
    yield
    assert scripted_api.ask(COMPLETIONS, SCRIPTED)["choices"][0]["text"] == SAID


@pytest.mark.usefixtures("still_answers")
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"five",
        b'{"model": "test", "prompt": "x",}',
        b'{"model": "test"} {"prompt": "x"}',
        b"[" * 10_000,
        b'{"model": "test", "prompt": ' + b"[" * 10_000,
        b'"x"',
        b"[]",
        b"5",
        b"null",
        b"true",
        b'{"model": "test", "prompt": "x", "temperature": NaN}',
        '{"model": "test", "prompt": "日本"}'.encode("gbk"),
        '{"model": "test", "prompt": "é"}'.encode("latin-1"),
    ],
    ids=repr,
)
def test_bytes_that_are_no_json_object_are_refused_and_not_quoted(scripted_api: Any, raw: bytes) -> None:
    """C028, C105, C106."""
    for path in (COMPLETIONS, CHATS):
        error = scripted_api.refuse(path, raw)
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_json")
        assert not set("日本é") & set(error["message"])


def test_a_charset_that_is_declared_is_decoded(api: Any) -> None:
    """C028: the nodes are given the same tokens."""
    body = {"model": "test", "prompt": "Café, naïve", "temperature": 0, "max_tokens": 2, "return_token_ids": True}
    raw = json.dumps(body, ensure_ascii=False).encode("latin-1")

    decoded = api.ask(COMPLETIONS, raw, Content_Type="application/json; charset=latin-1")["choices"][0]

    assert decoded == api.ask(COMPLETIONS, body)["choices"][0]


@pytest.mark.usefixtures("still_answers")
@pytest.mark.parametrize("half", ["\\ud83d", "\\ude00", "\\ude00\\ud83d"])
@pytest.mark.parametrize(
    "fields",
    [
        '"messages": [{"role": "user", "content": "HALF"}]',
        '"messages": [{"role": "user", "content": "x"}], "stop": "HALF"',
        '"messages": [{"role": "user", "content": "x"}], "model": "HALF"',
        '"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {"name": "HALF"}}]',
        '"messages": [{"role": "user", "content": [{"type": "text", "text": "HALF"}, {"type": "text", "text": "x"}]}]',
    ],
)
def test_half_a_surrogate_pair_is_refused(scripted_api: Any, fields: str, half: str) -> None:
    """C029: before anything is tokenized, hashed or stored, streamed or not."""
    for stream in ("false", "true"):
        raw = f'{{"model": "test", "stream": {stream}, {fields.replace("HALF", half)}}}'.encode()
        assert scripted_api.refuse(CHATS, raw)["code"] == "invalid_json"


def test_a_whole_surrogate_pair_is_one_character(api: Any) -> None:
    """C029."""
    body = {"model": "test", "temperature": 0, "max_tokens": 2, "return_token_ids": True}
    escaped = json.dumps({**body, "prompt": "Say 😀"}).encode()
    assert b"\\ud83d\\ude00" in escaped

    plain = json.dumps({**body, "prompt": "Say 😀"}, ensure_ascii=False).encode()
    assert api.ask(COMPLETIONS, escaped)["choices"] == api.ask(COMPLETIONS, plain)["choices"]
    parts = '[{"type": "text", "text": "\\ud83d"}, {"type": "text", "text": "\\ude00"}]'
    split = f'{{"model": "test", "messages": [{{"role": "user", "content": {parts}}}]}}'.encode()
    assert api.refuse(CHATS, split)["code"] == "invalid_json"


@pytest.mark.usefixtures("still_answers")
def test_every_refusal_is_in_the_envelope(reading_api: Any) -> None:
    """C104: whether a handler made it or the framework."""
    wrong_key = {"Authorization": "Bearer wrong"}

    assert reading_api.refuse(COMPLETIONS, {**SCRIPTED, "n": 0})["param"] == "n"
    assert reading_api.refuse(COMPLETIONS, SCRIPTED, 401, **wrong_key)["code"] == "invalid_api_key"
    assert reading_api.refuse(COMPLETIONS, {**SCRIPTED, "model": "nope"}, 404)["code"] == "model_not_found"
    assert reading_api.refuse("/v1/nope", SCRIPTED, 404)["code"] == "not_found"
    assert reading_api.refuse("/v1/models", SCRIPTED, 405)["code"] == "method_not_allowed"
    form = reading_api.refuse(COMPLETIONS, b"a=b", 415, Content_Type="application/x-www-form-urlencoded")
    assert form["code"] == "unsupported_media_type"
    few = {"Authorization": "Bearer one-a-minute"}
    replies = [reading_api.post(COMPLETIONS, SCRIPTED, **few) for _ in range(4)]
    refused = [reply for reply in replies if reply.status != 200]
    assert {reply.status for reply in refused} == {429}
    for reply in refused:
        assert reading_api.error(reply)["code"] == "rate_limit_exceeded" and int(reply.headers["Retry-After"]) >= 1


def test_openais_client_reads_every_refusal(reading_api: Any) -> None:
    """C104: each is an error of its own class, with message, param and code."""

    def client(key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=reading_api.url + "/v1", api_key=key, max_retries=0, timeout=120)

    fields: Any = {"model": "test", "messages": MESSAGES}
    with client("plain") as known, client("wrong") as unknown:
        with pytest.raises(openai.BadRequestError) as invalid:
            known.chat.completions.create(**fields, temperature=3)
        with pytest.raises(openai.NotFoundError) as missing:
            known.chat.completions.create(**{**fields, "model": "nope"}, stream=True)
        with pytest.raises(openai.AuthenticationError) as refused:
            unknown.chat.completions.create(**fields)

    assert invalid.value.param == "temperature" and "temperature" in invalid.value.message
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    assert refused.value.code == "invalid_api_key" and refused.value.type == "authentication_error"


def test_the_key_is_asked_for_first_then_the_shape_then_the_model(reading_api: Any) -> None:
    """C107."""
    assert reading_api.refuse(CHATS, b"{", 401, Authorization="Bearer wrong")["code"] == "invalid_api_key"
    for messages in ({}, {"messages": None}, {"messages": 5}, {"messages": []}):
        assert reading_api.refuse(CHATS, {"model": "nope", **messages})["param"] == "messages"
    error = reading_api.refuse(CHATS, {"model": "nope", "messages": MESSAGES}, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


@pytest.mark.usefixtures("still_answers")
def test_a_body_of_more_than_a_megabyte_is_read_and_one_over_the_limit_is_not(scripted_api: Any) -> None:
    """C113: it is refused by its declared length, of which not a byte is waited for."""
    padded = json.dumps(SCRIPTED).encode() + b" " * 1_200_000
    assert scripted_api.ask(COMPLETIONS, padded)["choices"][0]["text"] == SAID
    long = scripted_api.refuse(COMPLETIONS, {**SCRIPTED, "prompt": "x" * 1_200_000})
    assert long["code"] == "context_length_exceeded"

    connection = http.client.HTTPConnection(urlsplit(scripted_api.url).netloc, timeout=120)
    connection.putrequest("POST", COMPLETIONS)
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(200 * 2**20))
    connection.endheaders()
    with connection.getresponse() as response:
        assert response.status == 413 and response.headers["Content-Type"].startswith("application/json")
        assert json.loads(response.read())["error"]["code"] == "body_too_large"
    connection.close()


def test_others_are_answered_while_a_very_long_line_is_tokenized(disaggregated: Any, api: Any) -> None:
    """C114: no answer about health takes most of the time that the text does. One that cannot fit is not tokenized."""
    body = {"model": "test", "prompt": "the quick brown fox " * 150_000, "truncate_prompt_tokens": 8, "max_tokens": 1}
    slowest = 0.0

    started = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(api.ask, COMPLETIONS, body)
        while not answer.done():
            asked = time.monotonic()
            assert disaggregated.get("/health")[0] == 200
            slowest = max(slowest, time.monotonic() - asked)

    assert answer.result()["usage"]["prompt_tokens"] == 8
    assert slowest < (time.monotonic() - started) / 2
    error = api.refuse(COMPLETIONS, {"model": "test", "prompt": "x" * 27_000_000})
    assert error["code"] == "context_length_exceeded" and "at least" in error["message"]


@pytest.mark.usefixtures("still_answers")
@pytest.mark.parametrize(
    "given", ["x" * 300, "x" * 7000, "a b", "é", "a,b\tc"], ids=["300", "7000", "space", "é", "tab"]
)
def test_a_request_id_that_is_no_label_is_replaced(scripted_api: Any, given: str) -> None:
    """C118: it is in no chunk and in no header."""
    reply = scripted_api.post(COMPLETIONS, {**SCRIPTED, "stream": True}, X_Request_Id=given)

    assert reply.status == 200 and given.encode() not in reply.content
    assert 0 < len(reply.headers["X-Request-Id"]) <= 128 and reply.headers["X-Request-Id"] != given
    assert {len(event["id"]) < 100 for event in scripted_api.events(reply.content)} == {True}


@pytest.mark.usefixtures("still_answers")
def test_a_request_id_cannot_add_a_header(scripted_api: Any) -> None:
    """C118: a bare line break is refused, and one folded into the value is no label; a megabyte is too much."""
    for value in (b"a\rSet-Cookie: x=1", b"a\nSet-Cookie: x=1", b"x" * 2**20):
        connection = http.client.HTTPConnection(urlsplit(scripted_api.url).netloc, timeout=120)
        head = b"POST " + COMPLETIONS.encode() + b" HTTP/1.1\r\nHost: test\r\nContent-Length: 0\r\nX-Request-Id: "
        connection.connect()
        assert connection.sock is not None
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):  # it was refused before all of it was sent
            connection.sock.sendall(head + value + b"\r\n\r\n")
        response = http.client.HTTPResponse(connection.sock)
        response.begin()
        assert response.status in (400, 431) and response.headers["Set-Cookie"] is None
        assert set(json.loads(response.read())["error"]) == {"message", "type", "param", "code"}
        connection.close()
