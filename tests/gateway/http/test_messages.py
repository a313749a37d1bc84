"""/v1/messages through Anthropic's own client, streamed and not, and what it refuses."""

import anthropic
import pydantic
import pytest

from pdserve.gateway.api_keys import KeyLimits, KeyRing, keys_of

MODEL = "org/demo"
ASK = [{"role": "user", "content": "Hi"}]
BODY = {"model": MODEL, "messages": ASK, "max_tokens": 50}


@pytest.fixture
async def client(gateway):
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0) as client:
        yield client


async def test_a_message_is_answered(gateway, client):
    gateway.say("Hello there!")

    message = await client.messages.create(model=MODEL, max_tokens=50, messages=ASK, system="Be brief.")

    assert message.content[0].text == "Hello there!" and message.role == "assistant"
    assert message.stop_reason == "end_turn" and message.stop_sequence is None
    sent = gateway.source.started[0].request
    assert "Be brief." in gateway.tokenizer.decode(list(sent.prompt_token_ids))
    assert sent.sampling.max_tokens == 50
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len(sent.prompt_token_ids)
    assert usage.cache_read_input_tokens == 3


async def test_a_stream_says_the_same_as_a_whole_answer(gateway, client):
    gateway.say("one two three four, STOP five", chunk=2)
    asked = {"model": MODEL, "max_tokens": 50, "messages": ASK, "stop_sequences": ["STOP"]}

    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        text = "".join([delta async for delta in stream.text_stream])
        streamed = await stream.get_final_message()

    assert text == whole.content[0].text == streamed.content[0].text == "one two three four, "
    for message in (whole, streamed):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "STOP")
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert streamed.usage.input_tokens == whole.usage.input_tokens


async def test_models_are_complete_for_this_client_too(client):
    listed = [model async for model in client.models.list()]
    shown = await client.models.retrieve(MODEL)

    assert listed == [shown]
    assert (shown.id, shown.type, shown.display_name, shown.created_at.year) == (MODEL, "model", MODEL, 1970)


async def test_events_come_in_the_order_of_the_protocol(gateway):
    gateway.say("one two")
    async with gateway.session.post(gateway.url + "/v1/messages", json={**BODY, "stream": True}) as response:
        lines = (await response.text()).splitlines()

    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[2:-3]) == {"content_block_delta"} and "[DONE]" not in lines[-1]


async def test_an_answer_cut_by_max_tokens_says_so(gateway, client):
    message = await client.messages.create(model=MODEL, max_tokens=1, messages=ASK)

    assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 1


async def test_tokens_are_counted_as_a_message_would_have_them(gateway, client):
    count = await client.messages.count_tokens(model=MODEL, messages=ASK, system="Be brief.")
    message = await client.messages.create(model=MODEL, max_tokens=5, messages=ASK, system="Be brief.")

    assert count.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens


async def test_blocks_of_text_are_joined(gateway, client):
    blocks = [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]
    await client.messages.create(model=MODEL, max_tokens=5, messages=[{"role": "user", "content": blocks}])

    prompt = gateway.tokenizer.decode(list(gateway.source.started[0].request.prompt_token_ids))
    assert "first\nsecond" in prompt


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_p": "x"}, "top_p"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages.0.content.0.tool_use_id"),
        ({"system": [{"type": "image"}]}, "system.0.type"),
        ({"stop_sequences": [""]}, "stop"),
        ({"output_config": {"format": {"type": "yaml"}}}, "output_config.format"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"effort": 5}}, "output_config.effort"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
    ],
)
async def test_wrong_fields_are_named_in_anthropics_envelope(gateway, fields, name):
    status, reply, _ = await gateway.post("/v1/messages", {**BODY, **fields})

    assert status == 400 and reply["type"] == "error" and reply["error"]["type"] == "invalid_request_error"
    assert reply["error"]["message"].startswith(name), reply
    assert gateway.source.started == []


async def test_an_answer_is_held_to_the_form_that_is_asked_for(gateway, client):
    class Answer(pydantic.BaseModel):
        ok: bool

    gateway.say('{"ok": true}')

    message = await client.messages.parse(model=MODEL, max_tokens=50, messages=ASK, output_format=Answer)

    assert message.parsed_output == Answer(ok=True)
    assert "ok" in gateway.source.started[0].request.sampling.structured_outputs.json


async def test_leave_to_think_is_no_promise_of_thoughts(gateway, client):
    """A model that does not think apart from its answer answers."""
    message = await client.messages.create(
        model=MODEL, max_tokens=50, messages=ASK, thinking={"type": "enabled", "budget_tokens": 1024}
    )

    assert [block.type for block in message.content] == ["text"]


async def test_a_failure_in_mid_stream_is_an_error_event(gateway):
    from pdserve.gateway.errors import GenerationFailed

    gateway.say("one two three", fail_after=2, failure=GenerationFailed("node_lost", "gone", True))
    async with gateway.session.post(gateway.url + "/v1/messages", json={**BODY, "stream": True}) as response:
        text = await response.text()

    assert "event: error\n" in text and "overloaded_error" in text and "message_stop" not in text


async def test_errors_are_typed_as_its_client_knows_them(start_gateway):
    gateway = await start_gateway(api_keys=KeyRing(keys_of(("secret",), KeyLimits())))
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="wrong", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(model=MODEL, max_tokens=5, messages=ASK)
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="secret", max_retries=0) as client:
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(model="other", max_tokens=5, messages=ASK)
        assert (await client.messages.create(model=MODEL, max_tokens=5, messages=ASK)).content
