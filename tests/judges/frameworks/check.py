"""What agent frameworks ask of a server: answers that fill a model's fields, calls of tools, streams of both.

check.py URL: each framework parses the answers itself, and fails if they are not what it asked for.
"""

import asyncio
import sys
from importlib.metadata import version
from typing import Any, Literal

import agents
import instructor
import litellm
import openai
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "Describe Paris."
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]


class City(BaseModel):
    """A city in two fields, so short that a small model ends them."""

    name: str = Field(max_length=12)
    size: Literal["small", "large"]


def check_instructor(url: str, model: str) -> int:
    """Return how many things were checked: a model by a tool, by a schema, and one that fills while it streams."""
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=url + "/v1", api_key="none"), mode=mode)
        asked = {"model": model, "messages": MESSAGES, "response_model": City, "max_tokens": 90, "temperature": 0}
        assert isinstance(client.chat.completions.create(**asked, max_retries=0), City)
    last = [*client.chat.completions.create_partial(**asked)][-1]
    assert last.name is not None and last.size in ("small", "large")
    return 3


def check_litellm(url: str, model: str) -> int:
    """Return how many things were checked: whole, streamed and rebuilt, a schema, a tool."""
    litellm.suppress_debug_info = True
    asked = {"model": f"openai/{model}", "api_base": url + "/v1", "api_key": "none", "messages": MESSAGES}
    asked |= {"max_tokens": 16, "temperature": 0}
    whole = litellm.completion(**asked).choices[0].message.content
    built = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True)))
    assert built.choices[0].message.content == whole != ""
    held = litellm.completion(**{**asked, "max_tokens": 90}, response_format=City).choices[0].message.content
    City.model_validate_json(held)
    tools = [{"type": "function", "function": {"name": "city", "parameters": City.model_json_schema()}}]
    asked |= {"max_tokens": 90, "tools": tools, "tool_choice": {"type": "function", "function": {"name": "city"}}}
    City.model_validate_json(litellm.completion(**asked).choices[0].message.tool_calls[0].function.arguments)
    return 4


def check_pydantic_ai(url: str, model: str) -> int:
    """Return how many things were checked: text, a tool's output and a schema over two protocols, streamed and not."""
    provider = OpenAIProvider(base_url=url + "/v1", api_key="none")
    num_checked = 0
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        for output in (str, City, NativeOutput(City)):
            settings = {"max_tokens": 90 if output is not str else 8, "temperature": 0}
            agent = Agent(kind(model, provider=provider), output_type=output, model_settings=settings)
            expected = str if output is str else City
            assert isinstance(agent.run_sync(QUESTION).output, expected)
            assert isinstance(asyncio.run(_streamed(agent)), expected)
            num_checked += 2
    return num_checked


async def _streamed(agent: Any) -> Any:
    async with agent.run_stream(QUESTION) as stream:
        return await stream.get_output()


def check_openai_agents(url: str, model: str) -> int:
    """Return how many things were checked: an agent with an output type, and one that calls a tool and goes on."""
    agents.set_tracing_disabled(True)
    return asyncio.run(_run_agents(url, model))


async def _run_agents(url: str, model: str) -> int:
    called: list[str] = []

    @agents.function_tool
    def size_of(city: Literal["Paris"]) -> str:
        """Return how large a city is."""
        called.append(city)
        return "large"

    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
            settings = agents.ModelSettings(max_tokens=90, temperature=0, parallel_tool_calls=False)
            filled = agents.Agent(name="a", model=kind(model, client), output_type=City, model_settings=settings)
            assert isinstance((await agents.Runner.run(filled, QUESTION)).final_output, City)
            settings = agents.ModelSettings(max_tokens=60, tool_choice="required", parallel_tool_calls=False)
            caller = agents.Agent(
                name="b",
                model=kind(model, client),
                tools=[size_of],
                model_settings=settings,
                tool_use_behavior="stop_on_first_tool",
            )
            assert (await agents.Runner.run(caller, QUESTION)).final_output == "large"
            stream = agents.Runner.run_streamed(caller, QUESTION)
            async for _ in stream.stream_events():
                continue
            assert stream.final_output == "large"
    assert called == ["Paris"] * 4
    return 6


def check_llama_index(url: str, model: str) -> int:
    """Return how many things were checked: chats, streams, a structured answer and a tool."""
    llm = OpenAILike(
        model=model,
        api_base=url + "/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        max_tokens=90,
        temperature=0,
        context_window=8192,
    )
    message = ChatMessage(role="user", content=QUESTION)
    whole = llm.chat([message], max_tokens=8).message.content
    assert [*llm.stream_chat([message], max_tokens=8)][-1].message.content == whole != ""
    assert isinstance(llm.structured_predict(City, PromptTemplate(QUESTION)), City)

    def size_of(city: Literal["Paris"]) -> str:
        """Return how large a city is."""
        return city

    answer = llm.chat_with_tools([FunctionTool.from_defaults(size_of)], QUESTION, tool_required=True)
    assert llm.get_tool_calls_from_response(answer)[0].tool_kwargs == {"city": "Paris"}
    return 4


def main() -> None:
    """Check all and print a line for each."""
    url = sys.argv[1]
    model = openai.OpenAI(base_url=url + "/v1", api_key="none").models.list().data[0].id
    for name, check in (
        ("instructor", check_instructor),
        ("litellm", check_litellm),
        ("pydantic-ai-slim", check_pydantic_ai),
        ("openai-agents", check_openai_agents),
        ("llama-index-llms-openai-like", check_llama_index),
    ):
        print(f"{name} {version(name)}: {check(url, model)} checks hold", flush=True)


if __name__ == "__main__":
    main()
