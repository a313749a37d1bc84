"""The official Python clients of OpenAI and Anthropic, and LangChain's, against a running system.

check.py URL: fails if a stream says anything else than the whole answer.
"""

import json
import sys
from importlib.metadata import version

import anthropic
import openai
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI

QUESTION = "Name three colours of the rainbow."


def check_openai(url: str, model: str) -> int:
    """Return how many things were checked."""
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": QUESTION}]
    fixed = {"model": model, "temperature": 0, "max_tokens": 12, "seed": 1}
    whole = client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=2, **fixed)
    chunks = list(
        client.chat.completions.create(messages=messages, stream=True, stream_options={"include_usage": True}, **fixed)
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content != "", (text, whole)
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens == chunks[-1].usage.completion_tokens

    completion = client.completions.create(prompt=["One, two,", "A, B,"], n=2, **fixed)
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    pieces: dict[int, str] = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(prompt=["One, two,", "A, B,"], n=2, stream=True, **fixed):
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
    assert [pieces[choice.index] for choice in completion.choices] == [choice.text for choice in completion.choices]

    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    held = client.chat.completions.create(messages=messages, response_format=form, **{**fixed, "max_tokens": 64})
    assert held.choices[0].finish_reason != "stop" or type(json.loads(held.choices[0].message.content)["ok"]) is bool

    response = client.responses.create(model=model, input=QUESTION, temperature=0, max_output_tokens=12)
    events = list(
        client.responses.create(model=model, input=QUESTION, temperature=0, max_output_tokens=12, stream=True)
    )
    assert response.output_text == "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert client.responses.retrieve(response.id).output_text == response.output_text
    unasked = client.responses.create(model=model, input=QUESTION, max_output_tokens=400, background=True)
    assert client.responses.cancel(unasked.id).status == "cancelled"
    assert client.responses.retrieve(unasked.id).status == "cancelled"

    assert client.models.retrieve(model).id in [each.id for each in client.models.list()]
    for wrong, error in (({"model": "nope"}, openai.NotFoundError), ({"temperature": 9}, openai.BadRequestError)):
        try:
            client.chat.completions.create(messages=messages, **{**fixed, **wrong})
        except error:
            continue
        raise AssertionError(f"{wrong} was not refused")
    return 10


def check_anthropic(url: str, model: str) -> int:
    """Return how many things were checked."""
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    asked = {"model": model, "max_tokens": 12, "system": "Be short.", "extra_body": {"temperature": 0}}
    messages = [{"role": "user", "content": QUESTION}]
    whole = client.messages.create(messages=messages, **asked)
    with client.messages.stream(messages=messages, **asked) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == whole.content[0].text == last.content[0].text != ""
    assert last.usage.output_tokens == whole.usage.output_tokens and last.stop_reason == whole.stop_reason
    counted = client.messages.count_tokens(messages=messages, model=model, system="Be short.")
    used = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    assert counted.input_tokens == used, (counted, whole.usage)
    try:
        client.messages.create(messages=messages, **{**asked, "max_tokens": 0})
    except anthropic.BadRequestError:
        return 4
    raise AssertionError("max_tokens 0 was not refused")


def check_langchain(url: str, model: str) -> int:
    """Return how many things were checked."""
    chat = ChatOpenAI(
        base_url=url + "/v1", api_key="none", model=model, temperature=0, max_tokens=12, stream_usage=True
    )
    messages = [SystemMessage("Be short."), HumanMessage(QUESTION)]
    whole = chat.invoke(messages)
    chunks = list(chat.stream(messages))
    assert "".join(str(chunk.content) for chunk in chunks) == whole.content != ""
    assert whole.usage_metadata is not None
    streamed = sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata)
    assert streamed == whole.usage_metadata["output_tokens"]
    assert [each.content for each in chat.batch([messages, messages])] == [whole.content] * 2
    return 3


def main() -> None:
    """Check all three and print a line for each."""
    url = sys.argv[1]
    model = openai.OpenAI(base_url=url + "/v1", api_key="none").models.list().data[0].id
    for name, check in (
        ("openai", check_openai),
        ("anthropic", check_anthropic),
        ("langchain-openai", check_langchain),
    ):
        print(f"{name} {version(name)}: {check(url, model)} checks hold", flush=True)


if __name__ == "__main__":
    main()
