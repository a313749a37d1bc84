import asyncio

import openai
import pytest

MODEL = "org/demo"
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def client(gateway):
    async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_chat_whole_and_streamed_are_the_same_text(gateway, client):
    whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2)
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        logprobs=True,
        top_logprobs=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]

    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == "Hello there, friend!"
    assert whole.choices[0].message.content == "Hello there, friend!"
    assert choices[0].delta.role == "assistant"
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
    assert whole.choices[0].finish_reason == "stop"
    streamed_logprobs = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert streamed_logprobs == whole.choices[0].logprobs.content
    assert len(streamed_logprobs) == whole.usage.completion_tokens
    assert chunks[-1].usage == whole.usage
    assert whole.usage.prompt_tokens_details.cached_tokens == 3


async def test_completion_whole_and_streamed_are_the_same_text(gateway, client):
    whole = await client.completions.create(model=MODEL, prompt=["a", "b"], n=2, logprobs=1, seed=3)
    stream = await client.completions.create(
        model=MODEL,
        prompt=["a", "b"],
        n=2,
        logprobs=1,
        seed=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]

    for index in range(4):
        mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.text for choice in mine) == whole.choices[index].text == "Hello there, friend!"
        assert [choice.finish_reason for choice in mine if choice.finish_reason] == ["stop"]
        assert mine[-1].finish_reason == "stop"
        offsets = [offset for choice in mine for offset in choice.logprobs.text_offset]
        assert offsets == whole.choices[index].logprobs.text_offset
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == sum(g.num_sent for g in gateway.source.started[:4])
    assert whole.usage.prompt_tokens == 2


async def test_errors_are_the_clients_own_classes(gateway, client):
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9)
    assert bad.value.param == "temperature"

    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="nope", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"


async def test_models_are_listed_and_found_by_name(client):
    listed = [model.id async for model in client.models.list()]

    assert listed == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_the_synchronous_client_works_too(gateway):
    def ask() -> tuple[str, str]:
        with openai.OpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0) as client:
            whole = client.chat.completions.create(model=MODEL, messages=MESSAGES)
            with client.completions.create(model=MODEL, prompt="x", stream=True) as stream:
                streamed = "".join(chunk.choices[0].text for chunk in stream)
        return whole.choices[0].message.content or "", streamed

    assert await asyncio.to_thread(ask) == ("Hello there, friend!", "Hello there, friend!")
