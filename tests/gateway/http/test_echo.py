"""`echo`: the prompt in front of the answer, with its logprobs, whole and streamed."""

import openai
import pytest

MODEL = "org/demo"
PATH = "/v1/completions"
PROMPT = "The sky is"


@pytest.fixture
async def client(gateway):
    async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


async def _streamed(client, **fields):
    """Return the choices of a stream by index: text, all arrays of logprobs, finish reason."""
    choices = {}
    async for chunk in await client.completions.create(model=MODEL, stream=True, **fields):
        for choice in chunk.choices:
            text, arrays, reasons = choices.setdefault(choice.index, ([], {}, []))
            text.append(choice.text)
            for name, values in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
                arrays.setdefault(name, []).extend(values)
            reasons += [choice.finish_reason] if choice.finish_reason else []
    return choices


async def test_prompt_logprobs_come_before_those_of_the_answer(gateway, client):
    """C076: n + 1 entries for a prompt of n tokens and one token of answer, the first null."""
    num_prompt = len(gateway.tokenizer.encode(PROMPT))

    reply = await client.completions.create(model=MODEL, prompt=PROMPT, echo=True, logprobs=1, max_tokens=1)

    [choice] = reply.choices
    assert choice.text == PROMPT + "Hello"
    assert choice.logprobs.token_logprobs == [None, *(-float(i) for i in range(1, num_prompt)), -0.5]
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.top_logprobs[0] is None and len(choice.logprobs.top_logprobs[1]) == 2
    assert [choice.text[offset] for offset in choice.logprobs.text_offset] == [t[0] for t in choice.logprobs.tokens]
    assert reply.usage.completion_tokens == 1 and reply.usage.prompt_tokens == num_prompt


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
async def test_stream_and_whole_are_the_same(gateway, client, echo, logprobs):
    """C077: each combination, the prompt once for each choice."""
    fields = {"prompt": [PROMPT, "Hi"], "n": 2, "echo": echo, "logprobs": logprobs, "seed": 1}

    whole = await client.completions.create(model=MODEL, **fields)
    streamed = await _streamed(client, **fields)

    for choice in whole.choices:
        text, arrays, reasons = streamed[choice.index]
        expected = (fields["prompt"][choice.index // 2] if echo else "") + "Hello there, friend!"
        assert "".join(text) == choice.text == expected
        assert reasons == [choice.finish_reason]
        assert arrays == (choice.logprobs.model_dump() if choice.logprobs else {})


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_prompt_can_be_scored_without_an_answer(gateway, client, logprobs, is_stream):
    """C063."""
    fields = {"prompt": PROMPT, "echo": True, "max_tokens": 0, "logprobs": logprobs}
    num_prompt = len(gateway.tokenizer.encode(PROMPT))

    if is_stream:
        text, arrays, reasons = (await _streamed(client, **fields))[0]
    else:
        reply = await client.completions.create(model=MODEL, **fields)
        text, reasons = [reply.choices[0].text], [reply.choices[0].finish_reason]
        arrays = reply.choices[0].logprobs.model_dump() if logprobs else {}
        assert reply.usage.completion_tokens == 0

    assert "".join(text) == PROMPT and reasons == ["length"]
    assert len(arrays.get("token_logprobs", [])) == (num_prompt if logprobs else 0)


@pytest.mark.parametrize("fields", [{}, {"echo": False}, {"logprobs": 1}])
async def test_no_tokens_without_echo_are_refused(gateway, fields):
    """C063."""
    status, reply, _ = await gateway.post(PATH, {"model": MODEL, "prompt": PROMPT, "max_tokens": 0, **fields})

    assert status == 400 and reply["error"]["param"] == "max_tokens"


@pytest.mark.parametrize(("num_tokens", "max_tokens", "status"), [(256, 0, 200), (256, 1, 400), (257, 0, 400)])
async def test_a_prompt_may_fill_the_context_if_nothing_follows(gateway, num_tokens, max_tokens, status):
    """C065: the context holds 256 tokens."""
    body = {"model": MODEL, "prompt": [28] * num_tokens, "echo": True, "logprobs": 0, "max_tokens": max_tokens}

    assert (await gateway.post(PATH, body))[0] == status


async def test_logprobs_of_prompts_are_bounded(gateway):
    """C082."""
    body = {"model": MODEL, "prompt": [[28] * 200] * 8, "n": 16, "echo": True, "logprobs": 20, "max_tokens": 1}

    status, reply, _ = await gateway.post(PATH, body)

    assert status == 400 and reply["error"]["param"] == "logprobs"
    assert not gateway.source.started


async def test_token_ids_are_those_of_the_answer_alone(gateway):
    prompt = gateway.tokenizer.encode(PROMPT)
    body = {"model": MODEL, "prompt": prompt, "echo": True, "logprobs": 1, "return_token_ids": True, "max_tokens": 2}

    _, reply, _ = await gateway.post(PATH, body)

    [choice] = reply["choices"]
    assert len(choice["token_ids"]) == 2 and choice["prompt_token_ids"] == prompt
    assert choice["text"].startswith(PROMPT) and len(choice["logprobs"]["tokens"]) == len(prompt) + 2
