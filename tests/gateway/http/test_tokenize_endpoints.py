"""Token ids for clients, and the prompts that requests would become."""

import pytest

MODEL = "org/demo"
MESSAGES = [{"role": "user", "content": "Grüße, 世界!"}]


async def test_text_goes_to_ids_and_back(gateway):
    text = "Hello, Grüße und 世界! 🙂"

    status, tokens, _ = await gateway.post("/tokenize", {"model": MODEL, "prompt": text, "return_token_strs": True})
    assert status == 200
    assert tokens["tokens"] == gateway.tokenizer.encode(text) and tokens["count"] == len(tokens["tokens"])
    assert tokens["max_model_len"] == 256 and len(tokens["token_strs"]) == tokens["count"]

    status, back, _ = await gateway.post("/detokenize", {"tokens": tokens["tokens"]})
    assert status == 200 and back == {"prompt": text}


async def test_messages_are_tokenized_as_a_chat_would_be(gateway):
    _, tokens, _ = await gateway.post("/tokenize", {"messages": MESSAGES})
    _, rendered, _ = await gateway.post("/v1/chat/completions/render", {"model": MODEL, "messages": MESSAGES})
    await gateway.post("/v1/chat/completions", {"model": MODEL, "messages": MESSAGES})

    prompt = gateway.source.started[0].request.prompt_token_ids
    assert tokens["tokens"] == rendered["data"][0]["prompt_token_ids"] == list(prompt)
    assert "Grüße, 世界!" in rendered["data"][0]["prompt"]


async def test_rendering_shows_every_prompt_and_generates_nothing(gateway):
    body = {"model": MODEL, "prompt": [[5, 6, 7], [8]], "max_tokens": 9, "n": 2}

    status, rendered, _ = await gateway.post("/v1/completions/render", body)

    assert status == 200 and gateway.source.started == []
    assert [prompt["prompt_token_ids"] for prompt in rendered["data"]] == [[5, 6, 7], [8]]
    assert [prompt["max_tokens"] for prompt in rendered["data"]] == [9, 9]
    assert rendered["data"][0]["prompt"] == gateway.tokenizer.decode([5, 6, 7], skip_special_tokens=False)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": [10**9]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/v1/completions/render", {"model": MODEL, "prompt": "x", "n": 0}, 400, "n"),
        (
            "/v1/chat/completions/render",
            {"model": MODEL, "messages": MESSAGES, "stream_options": {}},
            400,
            "stream_options",
        ),
    ],
)
async def test_wrong_bodies_are_refused_by_name(gateway, path, body, status, param):
    got, reply, _ = await gateway.post(path, body)

    assert (got, reply["error"]["param"]) == (status, param)
