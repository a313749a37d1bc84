"""Fields that change nothing in an answer are checked like all others, under the names of each protocol."""

import pytest
from multidict import CIMultiDictProxy

MODEL = "org/demo"
BODIES = {
    "/v1/completions": {"model": MODEL, "prompt": "Hi"},
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"model": MODEL, "input": "Hi", "store": False},
    "/v1/messages": {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5},
}
OPENAI = [path for path in BODIES if path != "/v1/messages"]
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}


async def _send(gateway, path: str, fields: dict) -> tuple[int, dict, CIMultiDictProxy[str]]:
    status, reply, response = await gateway.post(path, {**BODIES[path], **fields})
    return status, reply, response.headers


def _named(reply: dict) -> str:
    """The field that an error names; Anthropic's envelope has it in the message."""
    return reply["error"].get("param") or reply["error"]["message"].split(":")[0]


@pytest.mark.parametrize("path", OPENAI)
@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("user", "u-1", 5),
        ("user", "", True),
        ("metadata", {"a": "b"}, "a"),
        ("metadata", {}, []),
        ("store", False, "false"),
        ("store", None, 0),
        ("service_tier", "flex", 5),
        ("safety_identifier", "s", []),
        ("prompt_cache_key", "k", 1),
        ("prompt_cache_retention", "24h", 24),
    ],
)
async def test_openais_books_are_taken_and_never_of_another_type(gateway, path, name, right, wrong):
    status, _, headers = await _send(gateway, path, {name: right})
    refused, reply, _ = await _send(gateway, path, {name: wrong})

    assert status == 200 and "x-pdserve-warning" not in headers
    assert refused == 400 and _named(reply) == name


@pytest.mark.parametrize("path", OPENAI)
async def test_metadata_is_text(gateway, path):
    refused, reply, _ = await _send(gateway, path, {"metadata": {"a": 5}})

    assert refused == 400 and _named(reply) == "metadata.a"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("name", "right", "wrong"), [("cache_salt", "team", 5), ("priority", 0, "0"), ("return_route_info", False, "no")]
)
async def test_extensions_are_the_same_in_every_protocol(gateway, path, name, right, wrong):
    status, _, headers = await _send(gateway, path, {name: right})
    refused, reply, _ = await _send(gateway, path, {name: wrong})

    assert status == 200 and "x-pdserve-warning" not in headers
    assert refused == 400 and _named(reply) == name


@pytest.mark.parametrize("path", BODIES)
async def test_a_salt_reaches_the_nodes_from_every_protocol(gateway, path):
    await _send(gateway, path, {"cache_salt": "team"})

    assert gateway.source.started[0].request.cache_salt == "team"


@pytest.mark.parametrize("path", BODIES)
async def test_every_protocol_tells_its_route_when_asked(gateway, path):
    _, told, headers = await _send(gateway, path, {"return_route_info": True})
    _, silent, _ = await _send(gateway, path, {})

    assert [choice["route"] for choice in told["route_info"]] == ["disaggregated"]
    assert headers["x-pdserve-route"] == "disaggregated" and "route_info" not in silent


async def test_a_stream_without_a_plan_has_no_route_in_its_headers(gateway):
    gateway.script.planned = None

    body = {**BODIES["/v1/completions"], "stream": True}
    async with gateway.session.post(gateway.url + "/v1/completions", json=body) as reply:
        assert reply.status == 200 and "x-pdserve-route" not in reply.headers


@pytest.mark.parametrize("path", BODIES)
async def test_every_stream_tells_its_route_when_asked(gateway, path):
    body = {**BODIES[path], "stream": True, "return_route_info": True}
    async with gateway.session.post(gateway.url + path, json=body) as reply:
        text = await reply.text()

    assert reply.headers["x-pdserve-route"] == "local", "as planned; what came of it is in the last event"
    assert text.count('"route_info":[{"index":0,"route":"disaggregated"') == 1


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/v1/chat/completions", {"max_completion_tokens": 10**12}, "max_completion_tokens"),
        ("/v1/chat/completions", {"max_tokens": 10**12}, "max_tokens"),
        ("/v1/chat/completions", {"verbosity": 5}, "verbosity"),
        ("/v1/chat/completions", {"chat_template": "{{ messages }}"}, "chat_template"),
        (
            "/v1/chat/completions",
            {"tools": [{"type": "function", "function": {**FUNCTION, "description": 5}}], "tool_choice": "none"},
            "tools.0.function.description",
        ),
        (
            "/v1/chat/completions",
            {"tools": [{"type": "function", "function": {**FUNCTION, "strict": "yes"}}], "tool_choice": "none"},
            "tools.0.function.strict",
        ),
        ("/v1/responses", {"max_output_tokens": 10**12}, "max_output_tokens"),
        ("/v1/responses", {"tool_choice": "required"}, "tool_choice"),
        ("/v1/responses", {"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ("/v1/responses", {"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
        ("/v1/responses", {"tools": [{"type": "function", "name": "a", "parameters": 5}]}, "tools.0.parameters"),
        ("/v1/responses", {"include": ["everything"]}, "include"),
        ("/v1/responses", {"conversation": "conv_1"}, "conversation"),
        ("/v1/responses", {"prompt": {"id": "p"}}, "prompt"),
        ("/v1/responses", {"max_tool_calls": 0}, "max_tool_calls"),
        ("/v1/responses", {"stream_options": {}}, "stream_options"),
        ("/v1/responses", {"reasoning": {"summary": 5}}, "reasoning.summary"),
        ("/v1/responses", {"text": {"verbosity": 5}}, "text.verbosity"),
        ("/v1/messages", {"stop_sequences": [""]}, "stop_sequences"),
        ("/v1/messages", {"thinking": {"type": "perhaps"}}, "thinking.type"),
        ("/v1/messages", {"thinking": {}}, "thinking.type"),
        ("/v1/messages", {"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": "9"}}, "thinking.budget_tokens"),
        ("/v1/messages", {"metadata": {"user_id": 5}}, "metadata.user_id"),
        ("/v1/messages", {"tool_choice": {"type": "any"}}, "tool_choice"),
        ("/v1/messages", {"tool_choice": {"type": "perhaps"}}, "tool_choice.type"),
        (
            "/v1/messages",
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": "yes"}},
            "tool_choice.disable_parallel_tool_use",
        ),
        ("/v1/messages", {"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name"),
        ("/v1/messages", {"tools": [{"name": "a", "input_schema": {}, "description": 5}]}, "tools.0.description"),
        ("/v1/messages", {"container": "c"}, "container"),
        ("/v1/messages", {"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ],
)
async def test_a_refusal_names_the_field_that_the_client_sent(gateway, path, fields, named):
    status, reply, _ = await _send(gateway, path, fields)

    assert status == 400 and _named(reply) == named, reply
    assert gateway.source.started == []


async def test_anthropics_clients_find_the_request_id_under_their_name(gateway):
    _, _, headers = await _send(gateway, "/v1/messages", {"max_tokens": 0})

    assert headers["request-id"] == headers["X-Request-Id"]


async def test_a_chat_may_ask_for_the_special_tokens_that_its_template_does_not_print(start_gateway, bos_tokenizer):
    gateway = await start_gateway(tokenizer=bos_tokenizer)

    for adds in (True, False, None):
        await _send(gateway, "/v1/chat/completions", {"add_special_tokens": adds})

    adding, plain, unsaid = (each.request.prompt_token_ids for each in gateway.source.started)
    assert plain == unsaid and adding[1:] == plain
