"""What requests ask of sampling arrives at the nodes, and the model's recommendations where they do not ask."""

import openai
import pytest

from pdserve.engine.sampling_defaults import SamplingDefaults

MODEL = "org/demo"
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def client(gateway):
    async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def last_sampling(gateway):
    return gateway.source.started[-1].request.sampling


async def test_penalties_and_biases_reach_the_nodes(gateway, client):
    """C059: keys of a JSON object are strings."""
    fields = {"presence_penalty": 0.5, "frequency_penalty": -1, "logit_bias": {"28": -100, "30": 2.5}}
    extra = {"repetition_penalty": 1.2, "allowed_token_ids": [30, 31, 30]}

    for create, prompt in (
        (client.completions.create, {"prompt": "Hi"}),
        (client.chat.completions.create, {"messages": MESSAGES}),
    ):
        await create(model=MODEL, **prompt, **fields, extra_body=extra)

        sampling = last_sampling(gateway)
        assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -1, 1.2)
        assert sampling.logit_bias == ((28, -100), (30, 2.5))
        assert sampling.allowed_token_ids == (30, 31)


async def test_a_bad_word_is_banned_bare_and_after_a_space(gateway, client):
    """C060, C061: both encodings, whatever their lengths, and no special token in either."""
    encode = gateway.tokenizer.encode
    words = ["Seine", " sea", "quokka"]

    await client.completions.create(model=MODEL, prompt="Hi", extra_body={"bad_words": words})

    expected = {
        tuple(encode(text, add_special_tokens=False))
        for text in ("Seine", " Seine", "sea", " sea", "quokka", " quokka")
    }
    banned = last_sampling(gateway).bad_words_ids
    assert set(banned) == expected
    assert len({len(token_ids) for token_ids in banned}) > 1, "the words are chosen to differ in length"


async def test_bad_words_that_cover_the_allow_list_are_refused(gateway):
    """C062."""
    token_ids = gateway.tokenizer.encode(" the", add_special_tokens=False)
    assert len(token_ids) == 1

    body = {"model": MODEL, "prompt": "Hi", "bad_words": ["the"], "allowed_token_ids": token_ids}
    status, reply, _ = await gateway.post("/v1/completions", body)

    assert status == 400 and reply["error"]["param"] == "allowed_token_ids"


@pytest.mark.parametrize(
    ("n", "best_of", "is_stream", "status"),
    [
        (None, 1, False, 200),
        (2, 2, True, 200),
        (2, 3, False, 200),
        (2, 3, True, 400),
        (2, 1, False, 400),
        (1, 129, False, 400),
    ],
)
async def test_best_of_is_at_least_n_and_not_streamed_when_more(gateway, n, best_of, is_stream, status):
    body = {"model": MODEL, "prompt": "Hi", "n": n, "best_of": best_of, "stream": is_stream}

    async with gateway.session.post(gateway.url + "/v1/completions", json=body) as reply:
        assert reply.status == status
        if status == 400:
            assert (await reply.json())["error"]["param"] == "best_of"


async def test_best_of_shows_the_likeliest_of_each_prompt_and_counts_all(gateway):
    gateway.source.script.answer = lambda request: [100 + request.sampling.seed % 50] * 3
    gateway.source.script.logprob = lambda request: -1.0 - request.sampling.seed % 7
    body = {"model": MODEL, "prompt": ["Hi", "Ho"], "n": 2, "best_of": 3, "seed": 4, "logprobs": 0}
    status, every, _ = await gateway.post("/v1/completions", {**body, "n": 3})
    assert status == 200

    status, best, _ = await gateway.post("/v1/completions", body)
    _, silent, _ = await gateway.post("/v1/completions", {**body, "logprobs": None})

    def mean(choice):
        logprobs = choice["logprobs"]["token_logprobs"]
        return sum(logprobs) / len(logprobs)

    expected = []
    for start in (0, 3):
        expected += sorted(every["choices"][start : start + 3], key=lambda choice: -mean(choice))[:2]
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in best["choices"]] == [choice["text"] for choice in expected]
    assert [choice["text"] for choice in silent["choices"]] == [choice["text"] for choice in best["choices"]]
    assert all(choice["logprobs"] is None for choice in silent["choices"])
    assert best["usage"] == every["usage"]


async def test_the_models_recommendations_hold_until_a_request_speaks(start_gateway):
    defaults = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.9, repetition_penalty=1.1)
    gateway = await start_gateway(defaults=defaults)

    await gateway.post("/v1/completions", {"model": MODEL, "prompt": "Hi"})
    unsaid = last_sampling(gateway)
    spoken = {"temperature": 0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    await gateway.post("/v1/completions", {"model": MODEL, "prompt": "Hi", **spoken})
    said = last_sampling(gateway)

    assert (unsaid.temperature, unsaid.top_k, unsaid.top_p, unsaid.repetition_penalty) == (0.6, 20, 0.9, 1.1)
    assert unsaid.min_p == 0
    assert (said.temperature, said.top_k, said.top_p, said.repetition_penalty) == (0, 0, 1.0, 1.0)


async def test_priority_reaches_the_nodes_where_the_policy_has_priorities(start_gateway):
    gateway = await start_gateway(has_priorities=True)
    for path, prompt in (("/v1/completions", {"prompt": "Hi"}), ("/v1/chat/completions", {"messages": MESSAGES})):
        status, _, _ = await gateway.post(path, {"model": MODEL, **prompt, "priority": -7})

        assert status == 200
        assert last_sampling(gateway).priority == -7


@pytest.mark.parametrize(("priority", "status"), [(0, 200), (None, 200), (1, 400), (-1, 400), ("high", 400)])
async def test_priority_is_refused_under_fcfs_unless_it_is_zero(gateway, priority, status):
    body = {"model": MODEL, "prompt": "Hi", "priority": priority}
    found, reply, _ = await gateway.post("/v1/completions", body)

    assert found == status
    if status == 400:
        assert reply["error"]["param"] == "priority"
