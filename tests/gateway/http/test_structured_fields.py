"""Fields that ask for a form: each reaches the nodes, each wrong one is a 400 that names it, nothing is ignored."""

import asyncio
import json

import pytest

from pdserve.engine.structured_outputs import StructuredOutputsParams

CHAT = "/v1/chat/completions", {"model": "org/demo", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = "/v1/completions", {"model": "org/demo", "prompt": "hi", "max_tokens": 40}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NAMED = {"name": "thing", "schema": SCHEMA, "strict": True}


@pytest.mark.parametrize(("path", "base"), [CHAT, COMPLETION], ids=["chat", "completions"])
@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, {"json": SCHEMA}),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_json": json.dumps(SCHEMA)}, {"json": SCHEMA}),
        ({"guided_json": {}}, {"json": {}}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"structured_outputs": {"json": SCHEMA, "regex": None, "disable_fallback": False}}, {"json": SCHEMA}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
        ({"structured_outputs": {"choice": ["a"]}, "response_format": {"type": "text"}}, {"choice": ["a"]}),
    ],
)
async def test_a_form_reaches_the_nodes(gateway, path, base, fields, form):
    status, _, response = await gateway.post(path, {**base, **fields})

    assert status == 200
    assert "x-pdserve-warning" not in response.headers
    sampling = gateway.source.started[0].request.sampling
    assert sampling.structured_outputs == StructuredOutputsParams(**form)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "base"), [CHAT, COMPLETION], ids=["chat", "completions"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {**NAMED, "strict": 1}}},
            "response_format.json_schema.strict",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"properties": {"foo": "bar"}}}}},
            "response_format.json_schema.schema",
        ),
        ({"guided_json": {"$ref": "#/nowhere"}}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_json": False}, "guided_json"),
        ({"guided_json": {"type": "integer", "minimum": 2, "maximum": 1}}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": "ab\\"}, "guided_regex"),
        ({"structured_outputs": {"regex": "ab\\\\\\"}}, "structured_outputs.regex"),
        ({"guided_regex": "(a{1000}){1000}"}, "guided_regex"),
        ({"guided_regex": "a" * 70_000}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_choice": ["x" * 70_000]}, "guided_choice"),
        ({"guided_grammar": "root ::= x"}, "guided_grammar"),
        ({"guided_grammar": ""}, "guided_grammar"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ],
)
async def test_a_form_that_cannot_be_held_to_is_refused_by_name(gateway, path, base, stream, fields, param):
    """C100."""
    status, body, _ = await gateway.post(path, {**base, **fields, "stream": stream})

    assert (status, body["error"]["param"], body["error"]["type"]) == (400, param, "invalid_request_error")
    assert gateway.source.started == []


async def test_huge_forms_do_not_stop_others(gateway):
    """C100: compiling is off the event loop and bounded, whatever is sent."""
    path, base = CHAT
    deep = {
        "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)} | {"d3000": {}},
        "$ref": "#/$defs/d0",
    }
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}
    forms = [{"guided_json": deep}, {"guided_json": wide}, {"guided_regex": "(a{1000}){1000}"}, {}, {}]

    answers = await asyncio.gather(*(gateway.post(path, {**base, **form}) for form in forms))

    assert [status for status, _, _ in answers] == [200, 200, 400, 200, 200]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_token_that_completes_an_answer_has_text(gateway, stream):
    """A structured answer may end without an end-of-sequence token; any other one ends with a token without text."""
    token_ids = gateway.tokenizer.encode('{"a": 1}', add_special_tokens=False)
    gateway.script.answer = lambda request: token_ids[:-1]
    gateway.source._eos = token_ids[-1]
    path, base = COMPLETION

    if stream:
        async with gateway.session.post(
            gateway.url + path, json={**base, "guided_json": SCHEMA, "stream": True}
        ) as response:
            lines = [line[6:] async for line in response.content if line.startswith(b"data: {")]
        text = "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])
    else:
        _, body, _ = await gateway.post(path, {**base, "guided_json": SCHEMA})
        text = body["choices"][0]["text"]
        _, without, _ = await gateway.post(path, base)
        assert without["choices"][0]["text"] == '{"a": 1'

    assert text == '{"a": 1}'
