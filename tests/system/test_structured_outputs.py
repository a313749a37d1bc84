"""Structured outputs of the demo model over the disaggregated path: at temperature 1, whatever the seed, the answer has
the form that was asked for, and is the one that the offline engine gives."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from pdserve import LLM, SamplingParams, StructuredOutputsParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_PROMPT = "A person as JSON: "
_MAX_TOKENS = 48
_SCHEMA: dict[str, Any] = {
    "$defs": {"tag": {"enum": ["red", "green", "blue"]}},
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
        "email": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-z]{1,8}@x[.]org$"}]},
    },
    "required": ["name", "age", "tags", "email"],
    "additionalProperties": False,
}
_GRAMMAR = 'root ::= sum\nsum ::= term ("+" term)?\nterm ::= [0-9]{1,3} | "(" sum ")"\n'
_NUM_SEEDS = 8


async def _ask(client: openai.AsyncOpenAI, seed: int, extra: dict[str, Any], **fields: Any) -> Any:
    options = {"max_tokens": _MAX_TOKENS, "temperature": 1.0, "seed": seed, **fields}
    return await client.completions.create(model="test", prompt=_PROMPT, extra_body=extra, **options)


async def _over_http(url: str) -> dict[str, Any]:
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=300) as client:
        by_schema = await asyncio.gather(*(_ask(client, seed, {"guided_json": _SCHEMA}) for seed in range(_NUM_SEEDS)))
        regex, grammar, choice, cut = await asyncio.gather(
            _ask(client, 1, {"guided_regex": "[A-Z][a-z]{2,5}-[0-9]{2}"}),
            _ask(client, 2, {"structured_outputs": {"grammar": _GRAMMAR}}, n=3),
            _ask(client, 3, {"guided_choice": ["positive", "negative", "neutral"]}, logprobs=2),
            _ask(client, 4, {"guided_json": _SCHEMA}, max_tokens=3),
        )
        stream = await _ask(client, 0, {"guided_json": _SCHEMA}, stream=True)
        streamed = "".join([chunk.choices[0].text async for chunk in stream])
        chat = await client.chat.completions.create(
            model="test",
            messages=[{"role": "user", "content": "Describe a person."}],
            response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": _SCHEMA, "strict": True}},
            max_tokens=_MAX_TOKENS,
            seed=5,
        )
    return {
        "by_schema": [answer.choices[0] for answer in by_schema],
        "regex": regex.choices[0],
        "grammar": grammar.choices,
        "choice": choice.choices[0],
        "cut": cut.choices[0],
        "streamed": streamed,
        "chat": chat.choices[0],
    }


def _is_whole(text: str) -> bool:
    jsonschema.validate(json.loads(text), _SCHEMA)
    return True


def test_answers_have_the_form_and_are_those_of_the_offline_engine(disaggregated: Any, demo_model_dir: Path) -> None:
    """C103, C100: whole answers stop by themselves and validate; a cut one says so."""
    routes = disaggregated.status()["routes"]
    got = asyncio.run(_over_http(disaggregated.url))
    disaggregated.wait_idle()

    assert disaggregated.status()["routes"]["disaggregated"] > routes.get("disaggregated", 0)
    finished = [answer for answer in got["by_schema"] if answer.finish_reason == "stop"]
    assert len(finished) >= _NUM_SEEDS // 2
    assert all(_is_whole(answer.text) for answer in finished)
    assert got["streamed"] == got["by_schema"][0].text
    assert re.fullmatch("[A-Z][a-z]{2,5}-[0-9]{2}", got["regex"].text)
    assert all(re.fullmatch(r"[0-9+()]+", answer.text) for answer in got["grammar"])
    assert got["choice"].text in ("positive", "negative", "neutral")
    assert all(logprob <= 0 for logprob in got["choice"].logprobs.token_logprobs)
    assert got["cut"].finish_reason == "length"
    assert got["chat"].finish_reason == "length" or _is_whole(got["chat"].message.content)
    llm = LLM(demo_model_dir)
    sampling = [
        SamplingParams(
            max_tokens=_MAX_TOKENS, temperature=1.0, seed=seed, structured_outputs=StructuredOutputsParams(json=_SCHEMA)
        )
        for seed in range(2)
    ]
    offline = llm.generate([_PROMPT] * 2, sampling, use_tqdm=False)
    assert [answer.text for answer in got["by_schema"][:2]] == [output.outputs[0].text for output in offline]
