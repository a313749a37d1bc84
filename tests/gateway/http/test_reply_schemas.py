"""What the document says of answers is what is answered: every endpoint, every option that adds to an answer."""

import json

import jsonschema
import pytest

from pdserve.control.keyspace import Keyspace
from pdserve.control.response_store import ResponseStore
from pdserve.engine.tokenizer import Tokenizer
from pdserve.gateway.openapi import OPERATIONS, openapi_document
from pdserve.gateway.tool_parsers import ReasoningParser

MODEL = "org/demo"
DOCUMENT = openapi_document()
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": MODEL, "prompt": ["Hi", "there"]}
FUNCTION = {"name": "weather", "parameters": {"type": "object"}}
TOOLS = {"tools": [{"type": "function", "function": FUNCTION}]}
EVERYTHING = {"return_token_ids": True, "return_route_info": True}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
TEMPLATE = "{{ tools }}<tool_call>{% for message in messages %}{{ message.content }}{% endfor %}"
CALL = 'Well. <tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


def check(shown: object, schema: dict) -> None:
    jsonschema.Draft202012Validator({**schema, "components": DOCUMENT["components"]}).validate(shown)


def response_of(method: str, path: str, status: int) -> dict:
    return DOCUMENT["paths"][path][method.lower()]["responses"][str(status)]["content"]


@pytest.fixture
async def gateway(start_gateway, demo_model_dir, redis):
    gateway = await start_gateway(
        tokenizer=Tokenizer.load(demo_model_dir, TEMPLATE),
        reasoning_parser=ReasoningParser.THINK,
        responses=ResponseStore(redis, Keyspace("test"), 60.0),
    )
    gateway.say(f"<think>Hm.</think>{CALL}")
    return gateway


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", COMPLETION),
        ("/v1/completions", {**COMPLETION, **EVERYTHING, "logprobs": 2, "echo": True, "n": 2}),
        ("/v1/completions", {**COMPLETION, "prompt_logprobs": 1}),
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, **EVERYTHING, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1}),
        ("/v1/chat/completions", {**CHAT, **TOOLS, "n": 2}),
        ("/v1/chat/completions", {**CHAT, **TOOLS, "max_tokens": 3}),
        ("/v1/messages", {**CHAT, "max_tokens": 90, "tools": [{"name": "weather", "input_schema": {}}]}),
        ("/v1/responses", {"model": MODEL, "input": "Hi", "tools": [{"type": "function", **FUNCTION}]}),
        ("/v1/responses", {"model": MODEL, "input": "Hi", "top_logprobs": 1, "max_output_tokens": 4}),
        ("/v1/responses", {"model": MODEL, "input": "Hi", "background": True}),
        ("/v1/responses/input_tokens", {"model": MODEL, "input": "Hi"}),
        ("/v1/messages/count_tokens", CHAT),
        ("/v1/completions/render", COMPLETION),
        ("/v1/chat/completions/render", CHAT),
        ("/tokenize", {"prompt": "Hi", "return_token_strs": True}),
        ("/detokenize", {"tokens": [5]}),
        ("/ping", {}),
    ],
)
async def test_whole_answers_are_as_described(gateway, path, body):
    status, reply, _ = await gateway.post(path, body)

    assert status == 200, reply
    check(reply, response_of("POST", path, 200)["application/json"]["schema"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", COMPLETION),
        ("/v1/completions", {**COMPLETION, **EVERYTHING, **STREAM, "logprobs": 2, "echo": True}),
        ("/v1/chat/completions", {**CHAT, **TOOLS}),
        ("/v1/chat/completions", {**CHAT, **TOOLS, **EVERYTHING, **STREAM, "logprobs": True, "top_logprobs": 2}),
        ("/v1/messages", {**CHAT, "max_tokens": 90}),
        ("/v1/responses", {"model": MODEL, "input": "Hi"}),
    ],
)
async def test_events_are_as_described(gateway, path, body):
    async with gateway.session.post(gateway.url + path, json={**body, "stream": True}) as response:
        lines = (await response.text()).splitlines()

    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert len(events) > 5
    for event in events:
        check(event, response_of("POST", path, 200)["text/event-stream"]["x-event-data"])


async def test_what_is_fetched_and_refused_is_as_described(gateway):
    _, response, _ = await gateway.post("/v1/responses", {"model": MODEL, "input": "Hi"})
    stored = f"/v1/responses/{response['id']}"
    asked = [
        ("GET", "/v1/responses/{id}", stored, 200),
        ("GET", "/v1/responses/{id}/input_items", f"{stored}/input_items", 200),
        ("POST", "/v1/responses/{id}/cancel", f"{stored}/cancel", 400),
        ("DELETE", "/v1/responses/{id}", stored, 200),
        ("GET", "/v1/responses/{id}", stored, 404),
        ("GET", "/v1/models", "/v1/models", 200),
        ("GET", "/v1/models/{name}", f"/v1/models/{MODEL}", 200),
        ("GET", "/v1/requests/{id}", "/v1/requests/none", 404),
        ("GET", "/admin/status", "/admin/status", 200),
        *(("GET", path, path, 200) for path in ("/health", "/live", "/ping", "/ready", "/version")),
    ]
    for method, path, url, expected in asked:
        async with gateway.session.request(method, gateway.url + url) as reply:
            assert reply.status == expected, (method, url)
            check(await reply.json(), response_of(method, path, expected)["application/json"]["schema"])


def test_every_answer_in_json_has_a_type_and_no_further_fields():
    for operation in OPERATIONS:
        described = operation.reply is not None or operation.content_type != "application/json"
        assert described or operation.path == "/openapi.json", operation.path
    reply = DOCUMENT["components"]["schemas"]["ChatReply"]
    assert reply["additionalProperties"] is False and "usage" in reply["required"]
