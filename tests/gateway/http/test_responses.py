"""/v1/responses through OpenAI's own client: streamed, stored, continued, in the background, cancelled."""

import asyncio

import openai
import pytest

from pdserve.control.keyspace import Keyspace
from pdserve.control.response_store import ResponseStore
from pdserve.gateway.errors import GenerationFailed

MODEL = "org/demo"


@pytest.fixture
def responses(redis) -> ResponseStore:
    return ResponseStore(redis, Keyspace("test"), 60.0)


@pytest.fixture
async def gateway(start_gateway, responses):
    return await start_gateway(responses=responses)


@pytest.fixture
async def client(gateway):
    async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


async def settled(client, response_id: str):
    """Return the response once nobody works on it any more."""
    async with asyncio.timeout(50):
        while True:
            response = await client.responses.retrieve(response_id)
            if response.status not in ("queued", "in_progress"):
                return response


def prompt_text(gateway, index: int = -1) -> str:
    return gateway.tokenizer.decode(list(gateway.source.started[index].request.prompt_token_ids))


async def test_a_response_is_answered_and_kept(gateway, client):
    gateway.say("Hello there!")

    response = await client.responses.create(
        model=MODEL, input="Hi", instructions="Be brief.", max_output_tokens=40, metadata={"a": "b"}
    )

    assert response.output_text == "Hello there!" and response.status == "completed"
    assert "Be brief." in prompt_text(gateway)
    assert response.usage.input_tokens == len(gateway.source.started[0].request.prompt_token_ids)
    assert response.usage.input_tokens_details.cached_tokens == 3
    assert (await client.responses.retrieve(response.id)).model_dump() == response.model_dump()
    items = await client.responses.input_items.list(response.id)
    assert items.data[0].content[0].text == "Hi"

    await client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response.id)


@pytest.fixture
async def five_items(client) -> str:
    """A response to five items."""
    texts = [{"role": "user", "content": f"number {number}"} for number in range(5)]
    return (await client.responses.create(model=MODEL, input=texts)).id


def numbers(items) -> list[int]:
    return [int(item.content[0].text.removeprefix("number ")) for item in items]


async def test_input_items_come_in_pages_the_last_one_first(client, five_items):
    listed = client.responses.input_items.list

    whole = await listed(five_items)
    first = await listed(five_items, limit=2)
    rest = await listed(five_items, limit=100, after=first.last_id)
    upward = await listed(five_items, limit=4, order="asc")

    assert numbers(whole.data) == [4, 3, 2, 1, 0] and not whole.has_more
    assert numbers(first.data) == [4, 3] and first.has_more
    assert (first.first_id, first.last_id) == (first.data[0].id, first.data[1].id)
    assert numbers(rest.data) == [2, 1, 0] and not rest.has_more
    assert numbers(upward.data) == [0, 1, 2, 3] and upward.has_more
    end = await listed(five_items, after=rest.last_id)
    assert (end.data, end.first_id, end.last_id, end.has_more) == ([], None, None, False)


async def test_openais_client_turns_the_pages_by_itself(client, five_items):
    assert numbers([item async for item in client.responses.input_items.list(five_items, limit=2)]) == [4, 3, 2, 1, 0]


async def test_twenty_input_items_are_a_page(client):
    texts = [{"role": "user", "content": "x"} for _ in range(21)]
    response = await client.responses.create(model=MODEL, input=texts)

    page = await client.responses.input_items.list(response.id)

    assert len(page.data) == 20 and page.has_more


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("limit", "0"),
        ("limit", "101"),
        ("limit", "-1"),
        ("limit", "2.0"),
        ("limit", ""),
        ("limit", "٥"),
        ("order", "up"),
        ("order", "ASC"),
        ("after", "msg_nope"),
        ("after", ""),
    ],
)
async def test_a_wrong_page_is_refused_by_name(gateway, five_items, param, value):
    url = f"{gateway.url}/v1/responses/{five_items}/input_items"
    async with gateway.session.get(url, params={param: value}) as response:
        reply = await response.json()

    assert response.status == 400 and reply["error"]["param"] == param


async def test_a_stream_says_the_same_in_numbered_events(gateway, client):
    gateway.say("one two three", chunk=2)
    whole = await client.responses.create(model=MODEL, input="Hi")

    events = [event async for event in await client.responses.create(model=MODEL, input="Hi", stream=True)]

    names = [event.type for event in events]
    assert names[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert names[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "one two three"
    final = events[-1].response
    assert final.output_text == whole.output_text and final.usage == whole.usage
    assert (await client.responses.retrieve(final.id)).output_text == "one two three"


async def test_logprobs_cover_every_token_streamed_or_not(gateway, client):
    gateway.say("one two three", chunk=2)
    asked = {"model": MODEL, "input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    num_tokens = len(gateway.tokenizer.encode("one two three", add_special_tokens=False)) + 1

    whole = await client.responses.create(**asked)
    events = [event async for event in await client.responses.create(**asked, stream=True)]

    entries = whole.output[0].content[0].logprobs
    assert len(entries) == num_tokens and all(len(entry.top_logprobs) == 2 for entry in entries)
    assert "".join(entry.token for entry in entries).startswith("one two three")
    assert events[-1].response.output[0].content[0].logprobs == entries
    streamed = [entry.token for event in events if event.type.endswith("text.delta") for entry in event.logprobs]
    assert streamed == [entry.token for entry in entries][: len(streamed)] and len(streamed) >= num_tokens - 1
    assert (await client.responses.create(model=MODEL, input="Hi")).output[0].content[0].logprobs == []


async def test_input_is_cut_only_when_asked_for(gateway, client):
    long = "word " * 400

    with pytest.raises(openai.BadRequestError):
        await client.responses.create(model=MODEL, input=long, max_output_tokens=20)
    response = await client.responses.create(model=MODEL, input=long, max_output_tokens=20, truncation="auto")

    assert response.usage.input_tokens == 256 - 20 and response.truncation == "auto"


async def test_input_tokens_are_those_of_the_response(gateway, client):
    first = await client.responses.create(model=MODEL, input="Two and two?")
    asked = {"model": MODEL, "input": "Sure?", "instructions": "Be brief.", "previous_response_id": first.id}

    counted = await client.responses.input_tokens.count(**asked)

    assert counted.input_tokens == (await client.responses.create(**asked)).usage.input_tokens
    assert len(gateway.source.started) == 2


async def test_counting_is_a_path_of_its_own(gateway):
    async with gateway.session.get(gateway.url + "/v1/responses/input_tokens") as response:
        assert response.status == 405 and response.headers["Allow"] == "POST"


async def test_a_response_continues_an_earlier_one(gateway, client):
    gateway.say("The answer is four.")
    first = await client.responses.create(model=MODEL, input="Two and two?", instructions="Secret system text.")

    second = await client.responses.create(model=MODEL, input="Are you sure?", previous_response_id=first.id)

    text = prompt_text(gateway)
    assert text.index("Two and two?") < text.index("The answer is four.") < text.index("Are you sure?")
    assert "Secret system text." not in text, "instructions are of one response only"
    assert second.previous_response_id == first.id
    third = await client.responses.create(model=MODEL, input="Really?", previous_response_id=second.id)
    assert prompt_text(gateway).count("The answer is four.") == 2 and third.status == "completed"


async def test_what_is_not_stored_cannot_be_continued(gateway, client):
    first = await client.responses.create(model=MODEL, input="Hi", store=False)

    for wrong in (first.id, "resp_nope"):
        with pytest.raises(openai.NotFoundError) as raised:
            await client.responses.create(model=MODEL, input="Hi", previous_response_id=wrong)
        assert raised.value.param == "previous_response_id"


async def test_an_answer_cut_by_its_limit_is_incomplete(client):
    response = await client.responses.create(model=MODEL, input="Hi", max_output_tokens=1)

    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"


async def test_messages_calls_and_their_outputs_are_a_conversation(gateway, client):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Sunny."}]},
        {"role": "user", "content": "Thanks"},
    ]
    await client.responses.create(model=MODEL, input=items)

    text = prompt_text(gateway)
    assert text.index("Weather?") < text.index("Sunny.") < text.index("Thanks")


async def test_a_background_response_is_fetched_when_it_is_done(gateway, client):
    gateway.say("one two three", hold_after=1)
    gateway.script.proceed.clear()

    queued = await client.responses.create(model=MODEL, input="Hi", background=True)
    assert queued.status == "queued" and queued.output == []
    async with asyncio.timeout(50):
        await gateway.source.has_started.wait()
    assert (await client.responses.retrieve(queued.id)).status in ("queued", "in_progress")
    gateway.script.proceed.set()

    done = await settled(client, queued.id)
    assert done.status == "completed" and done.output_text == "one two three" and done.background is True


async def released(responses, response_id: str) -> None:
    """Return once no gateway works on it any more."""
    async with asyncio.timeout(50):
        while await responses.has_owner(response_id):
            continue


@pytest.fixture
async def running(gateway, client) -> str:
    """A background response that will not end by itself."""
    gateway.say("one two three", hold_after=1)
    gateway.script.proceed.clear()
    queued = await client.responses.create(model=MODEL, input="Hi", background=True)
    async with asyncio.timeout(50):
        await gateway.source.has_started.wait()
    return queued.id


async def test_a_background_response_is_cancelled_from_any_gateway(gateway, start_gateway, responses, running):
    other = await start_gateway(responses=responses)

    async with openai.AsyncOpenAI(base_url=other.url + "/v1", api_key="none", max_retries=0) as elsewhere:
        assert (await elsewhere.responses.cancel(running)).status == "cancelled"
        assert (await elsewhere.responses.retrieve(running)).status == "cancelled"
        assert (await elsewhere.responses.cancel(running)).status == "cancelled"
        await released(responses, running)
        assert (await elsewhere.responses.retrieve(running)).status == "cancelled"
    assert gateway.source.started[0].ended == "cancelled" and len(gateway.open_requests) == 0


async def test_an_answer_that_is_done_after_the_cancellation_does_not_replace_it(gateway, responses, client, running):
    assert (await client.responses.cancel(running)).status == "cancelled"
    gateway.script.proceed.set()

    await released(responses, running)
    assert (await client.responses.retrieve(running)).status == "cancelled"


async def test_a_background_response_that_is_deleted_is_stopped_and_does_not_return(
    gateway, responses, client, running
):
    await client.responses.delete(running)

    await released(responses, running)
    assert gateway.source.started[0].ended == "cancelled"
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(running)


async def test_a_background_failure_is_told_when_it_is_fetched(gateway, client):
    gateway.say("one two", fail_after=1, failure=GenerationFailed("node_lost", "the node has gone", True))

    queued = await client.responses.create(model=MODEL, input="Hi", background=True)

    failed = await settled(client, queued.id)
    assert failed.status == "failed" and failed.error.message == "the node has gone"


async def test_a_background_response_of_a_gateway_that_died_has_failed(redis, start_gateway):
    brief = ResponseStore(redis, Keyspace("test"), 60.0, owner_ttl_s=0.05)
    gateway = await start_gateway(responses=brief)
    gateway.say("one two", hold_after=1)
    gateway.script.proceed.clear()
    async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0) as client:
        queued = await client.responses.create(model=MODEL, input="Hi", background=True)
        failed = await settled(client, queued.id)

    assert failed.status == "failed" and failed.error.code == "gateway_lost"


async def test_a_failure_in_mid_stream_is_a_failed_response(gateway, client):
    gateway.say("one two three", fail_after=2, failure=GenerationFailed("node_lost", "gone", True))

    events = [event async for event in await client.responses.create(model=MODEL, input="Hi", stream=True)]

    assert events[-1].type == "response.failed" and events[-1].response.error.message == "gone"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [5]}, "input.0"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role"),
        ({"input": [{"type": "computer_call"}]}, "input.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
        ({"background": True, "store": False}, "background"),
        ({"background": True, "stream": True}, "background"),
        ({"truncation": "some"}, "truncation"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 9}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"text": {"format": 5}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"max_output_tokens": 100_000}, "input"),
    ],
)
async def test_wrong_fields_are_refused_by_name(gateway, fields, param):
    status, reply, _ = await gateway.post("/v1/responses", {"model": MODEL, "input": "Hi", **fields})

    assert status == 400 and reply["error"]["param"] == param, reply
    assert gateway.source.started == []
