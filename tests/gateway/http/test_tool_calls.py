"""Calls that the model makes by itself or must make, whole and streamed, through the clients of three protocols."""

import json
from types import SimpleNamespace

import anthropic
import openai
import pytest

from pdserve.control.keyspace import Keyspace
from pdserve.control.response_store import ResponseStore
from pdserve.engine.tokenizer import Tokenizer
from pdserve.gateway.tool_parsers import ReasoningParser, ToolCallParser

MODEL = "org/demo"
ASK = [{"role": "user", "content": "Weather in Paris?"}]
SCHEMA = {"type": "object", "properties": {"city": {"$ref": "#/$defs/c"}}, "$defs": {"c": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "time"}}
TOOLS = [TIME, WEATHER]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SAID = f"I look.\n{CALL}\n{CALL.replace('Paris', 'Genève')}"
REQUIRED = '[{"name":"weather","arguments":{"city":"Paris"}}, {"name":"time","arguments":{}}]'
# Shows tools and calls as Hermes does: arguments must be an object.
TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool.function.name }}</tool>{% endfor %}"
    "{% for message in messages %}[{{ message.role }}"
    "{% if message.name is defined %} {{ message.name }}{% endif %}]{{ message.content }}"
    "{% if message.tool_calls is defined %}{% for call in message.tool_calls %}"
    "<tool_call>{{ call.function.name }}{% for name, value in call.function.arguments.items() %}"
    " {{ name }}={{ value }}{% endfor %}</tool_call>{% endfor %}{% endif %}{% endfor %}[assistant]"
)


@pytest.fixture(scope="module")
def tool_tokenizer(demo_model_dir) -> Tokenizer:
    return Tokenizer.load(demo_model_dir, TEMPLATE)


@pytest.fixture
async def gateway(start_gateway, tool_tokenizer):
    return await start_gateway(tokenizer=tool_tokenizer)


@pytest.fixture
async def client(gateway):
    async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def prompt_text(gateway, index: int = -1) -> str:
    return gateway.tokenizer.decode(list(gateway.source.started[index].request.prompt_token_ids))


async def whole_answer(client, **fields):
    """Return the message of a whole answer and why it ended."""
    answer = await client.chat.completions.create(model=MODEL, messages=ASK, **fields)
    return answer.choices[0].message, answer.choices[0].finish_reason


async def streamed_answer(client, **fields):
    """Return what the deltas of a stream add up to, and why it ended."""
    text, thoughts, calls, reasons = "", "", [], []
    async for chunk in await client.chat.completions.create(model=MODEL, messages=ASK, stream=True, **fields):
        [choice] = chunk.choices
        text += choice.delta.content or ""
        thoughts += getattr(choice.delta, "reasoning_content", None) or ""
        for delta in choice.delta.tool_calls or ():
            if delta.id is not None:
                assert delta.index == len(calls) and delta.function.name
                calls.append(SimpleNamespace(id=delta.id, name=delta.function.name, arguments=""))
            calls[delta.index].arguments += delta.function.arguments
        reasons += [choice.finish_reason] if choice.finish_reason else []
    [reason] = reasons
    return SimpleNamespace(content=text, thoughts=thoughts, calls=calls), reason


@pytest.mark.parametrize("chunk", [1, 3, 100])
async def test_calls_are_the_same_in_a_stream(gateway, client, chunk):
    """C097: the model called by itself; the reason is tool_calls, streamed or not."""
    gateway.say(SAID, chunk=chunk)

    message, reason = await whole_answer(client, tools=TOOLS)
    streamed, streamed_reason = await streamed_answer(client, tools=TOOLS, tool_choice="auto")

    assert (message.content, reason) == ("I look.", "tool_calls") == (streamed.content, streamed_reason)
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
    assert calls == [("weather", {"city": "Paris"}), ("weather", {"city": "Genève"})]
    assert calls == [(call.name, json.loads(call.arguments)) for call in streamed.calls]
    assert len({call.id for call in [*message.tool_calls, *streamed.calls]}) == 4
    assert "<tool>time</tool><tool>weather</tool>" in prompt_text(gateway)
    assert gateway.source.started[0].request.sampling.structured_outputs is None


async def test_an_answer_of_calls_alone_has_no_content(gateway, client):
    gateway.say(CALL)

    message, _ = await whole_answer(client, tools=TOOLS)

    assert message.content is None and len(message.tool_calls) == 1


async def test_an_answer_without_calls_is_text(gateway, client):
    """C098: no call, so the reason is not tool_calls."""
    gateway.say("No <tool_call> today\n")

    message, reason = await whole_answer(client, tools=TOOLS)
    streamed, _ = await streamed_answer(client, tools=TOOLS)

    assert (message.content, message.tool_calls, reason) == ("No <tool_call> today\n", None, "stop")
    assert streamed.content == message.content


@pytest.mark.parametrize(("num_tokens", "is_call"), [(8, False), (20, True)])
async def test_a_cut_call_says_length(gateway, client, num_tokens, is_call):
    """C099: what max_tokens cuts is text before its arguments begin, and a call with half of them behind that."""
    gateway.say(CALL.replace("Paris", "Paris and all the towns around it, one by one"))

    message, reason = await whole_answer(client, tools=TOOLS, max_tokens=num_tokens)
    streamed, streamed_reason = await streamed_answer(client, tools=TOOLS, max_tokens=num_tokens)

    assert reason == streamed_reason == "length" and streamed.content == (message.content or "")
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    assert calls == [(call.name, call.arguments) for call in streamed.calls]
    if is_call:
        [(name, arguments)] = calls
        assert name == "weather" and arguments.startswith('{"city": "Par') and message.content is None
    else:
        assert calls == [] and message.content.startswith("<tool_call>")


@pytest.mark.parametrize(("stop", "is_call"), [("arg", False), ("and", True)])
async def test_a_stop_string_within_a_call_loses_no_text_and_makes_no_call(gateway, client, stop, is_call):
    """C035: text held for a call that does not come is told, and half a call is not a reason to make one."""
    gateway.say(CALL.replace("Paris", "Paris and more"))

    message, reason = await whole_answer(client, tools=TOOLS, stop=stop)
    streamed, streamed_reason = await streamed_answer(client, tools=TOOLS, stop=stop)

    assert reason == streamed_reason == "stop" and streamed.content == (message.content or "")
    if is_call:
        assert [call.arguments for call in streamed.calls] == ['{"city": "Paris ']
        assert [call.function.arguments for call in message.tool_calls] == ['{"city": "Paris ']
    else:
        assert message.content == '<tool_call>\n{"name": "weather", "' and not streamed.calls


async def test_arguments_are_streamed_as_they_are_written(gateway, client):
    city = "Paris and all the towns around it, one by one"
    gateway.say(CALL.replace("Paris", city), chunk=1)

    stream = await client.chat.completions.create(model=MODEL, messages=ASK, stream=True, tools=TOOLS)
    deltas = [call.function.arguments async for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()]

    assert "".join(deltas) == json.dumps({"city": city})
    assert len(deltas) > 10 and max(map(len, deltas)) < 12


async def test_none_shows_no_tool_and_reads_no_call(gateway, client):
    """C099: a call in the text stays text."""
    gateway.say(CALL)

    message, reason = await whole_answer(client, tools=TOOLS, tool_choice="none")

    assert (message.content, message.tool_calls, reason) == (CALL, None, "stop")
    assert "<tool>" not in prompt_text(gateway)


async def test_required_calls_are_held_to_a_form_and_streamed_as_they_are_written(gateway, client):
    """C097, C098: required is enforced, and its reason is tool_calls."""
    gateway.say(REQUIRED)

    message, reason = await whole_answer(client, tools=TOOLS, tool_choice="required")
    streamed, streamed_reason = await streamed_answer(client, tools=TOOLS, tool_choice="required")

    assert message.content is None and reason == streamed_reason == "tool_calls"
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls]
    assert calls == [("weather", '{"city":"Paris"}'), ("time", "{}")]
    assert calls == [(call.name, call.arguments) for call in streamed.calls]
    schema = json.loads(gateway.source.started[0].request.sampling.structured_outputs.json)
    assert schema["$defs"]["tool1"]["properties"]["city"] == {"$ref": "#/$defs/tool1/$defs/c"}


async def test_only_one_call_where_parallel_ones_are_not_wanted(gateway, client):
    gateway.say(SAID)
    fields = {"tools": TOOLS, "parallel_tool_calls": False}

    message, _ = await whole_answer(client, **fields)
    streamed, _ = await streamed_answer(client, **fields)
    await whole_answer(client, **fields, tool_choice="required")

    assert len(message.tool_calls) == len(streamed.calls) == 1
    assert json.loads(gateway.source.started[-1].request.sampling.structured_outputs.json)["maxItems"] == 1


async def test_logprobs_cover_every_token_of_a_call(gateway, client):
    gateway.say(SAID)
    num_tokens = len(gateway.tokenizer.encode(SAID, add_special_tokens=False)) + 1

    stream = await client.chat.completions.create(model=MODEL, messages=ASK, stream=True, tools=TOOLS, logprobs=True)
    chunks = [chunk.choices[0] async for chunk in stream]

    assert sum(len(chunk.logprobs.content) for chunk in chunks if chunk.logprobs) == num_tokens


@pytest.mark.parametrize("arguments", ['{"city": "Paris"}', "", "null", "[]"], ids=["object", "empty", "null", "list"])
async def test_calls_and_their_results_are_rendered(gateway, client, arguments):
    """C085, C086: arguments are an object in the template, and a turn without content is kept."""
    function = {"name": "weather", "arguments": arguments}
    history = [
        *ASK,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]

    await client.chat.completions.create(model=MODEL, messages=history, tools=TOOLS)

    called = "weather city=Paris" if "city" in arguments else "weather"
    assert f"[assistant]<tool_call>{called}</tool_call>[tool weather]sunny[assistant]" in prompt_text(gateway)


async def test_arguments_that_are_no_json_are_refused_by_name(gateway):
    """C085."""
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": '}}
    body = {"model": MODEL, "messages": [*ASK, {"role": "assistant", "tool_calls": [call]}]}

    status, answer, _ = await gateway.post("/v1/chat/completions", body)

    assert (status, answer["error"]["param"]) == (400, "messages.1.tool_calls.0.function.arguments")


async def test_tools_count_among_the_tokens_of_a_prompt(gateway):
    body = {"model": MODEL, "messages": ASK}

    _, plain, _ = await gateway.post("/tokenize", body)
    _, shown, _ = await gateway.post("/tokenize", {**body, "tools": TOOLS})

    assert gateway.tokenizer.decode(shown["tokens"]).startswith("<tool>time</tool>")
    assert shown["count"] > plain["count"]


@pytest.mark.parametrize("call_id", [["a"], {}, 1, None])
async def test_ids_of_any_type_in_the_history_crash_nothing(gateway, call_id):
    call = {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": call_id, "content": "sunny"}

    status, _, _ = await gateway.post(
        "/v1/chat/completions",
        {"model": MODEL, "messages": [*ASK, {"role": "assistant", "content": "", "tool_calls": [call]}, result]},
    )

    assert status == 200


async def test_an_empty_list_of_calls_is_none(gateway, client):
    """C087."""
    history = [*ASK, {"role": "assistant", "content": "hi", "tool_calls": []}, *ASK]

    await client.chat.completions.create(model=MODEL, messages=history)

    assert "[assistant]hi[user]" in prompt_text(gateway)


async def test_mistral_calls_have_ids_that_its_template_takes(start_gateway):
    gateway = await start_gateway(tool_call_parser=ToolCallParser.MISTRAL)
    gateway.say('[TOOL_CALLS][{"name": "weather", "arguments": {}}, {"name": "time", "arguments": {}}]')

    _, body, _ = await gateway.post("/v1/chat/completions", {"model": MODEL, "messages": ASK, "tools": TOOLS})

    ids = [call["id"] for call in body["choices"][0]["message"]["tool_calls"]]
    assert len(set(ids)) == 2 and all(len(each) == 9 and each.isalnum() for each in ids)


@pytest.fixture
async def thinking(start_gateway, tool_tokenizer):
    return await start_gateway(tokenizer=tool_tokenizer, reasoning_parser=ReasoningParser.THINK)


@pytest.mark.parametrize("chunk", [1, 100])
async def test_thoughts_are_apart_from_text_and_calls(thinking, chunk):
    thinking.say(f"<think>\nI should look.\n</think>\n\n{SAID}", chunk=chunk)
    async with openai.AsyncOpenAI(base_url=thinking.url + "/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=ASK, tools=TOOLS)
        streamed, _ = await streamed_answer(client, tools=TOOLS)

    message = answer.choices[0].message
    assert message.reasoning_content == message.reasoning == "I should look." == streamed.thoughts.rstrip()
    assert message.content == "I look." == streamed.content
    assert len(message.tool_calls) == len(streamed.calls) == 2
    details = answer.usage.completion_tokens_details
    tags = "<think>\nI should look.\n</think>"
    assert details.reasoning_tokens >= len(thinking.tokenizer.encode(tags, add_special_tokens=False))
    assert details.reasoning_tokens < answer.usage.completion_tokens


@pytest.mark.parametrize(
    "form",
    [
        {"tools": TOOLS, "tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        {"guided_regex": "[a-z]/[0-9]\\/x\n"},
        {"guided_choice": ["yes", 'no "no"']},
        {"guided_grammar": 'root ::= "a" | "{b}"\n'},
        {"guided_grammar": 'start: "a" | "}"\n'},
    ],
)
async def test_a_form_holds_behind_the_thoughts(thinking, form):
    body = {"model": MODEL, "messages": ASK, **form}

    status, answer, _ = await thinking.post("/v1/chat/completions", body)

    assert status == 200, answer
    assert "thoughts" in thinking.source.started[0].request.sampling.structured_outputs.grammar


async def test_a_form_that_is_none_is_refused_behind_thoughts_too(thinking):
    body = {"model": MODEL, "messages": ASK, "guided_regex": "("}

    status, answer, _ = await thinking.post("/v1/chat/completions", body)

    assert (status, answer["error"]["param"]) == (400, "guided_regex")


ANTHROPIC_TOOLS = [{"name": "weather", "input_schema": SCHEMA}, {"name": "time", "input_schema": {"type": "object"}}]


@pytest.mark.parametrize("choice", ["auto", "any"])
async def test_messages_have_blocks_of_tool_use(gateway, choice):
    gateway.say(SAID if choice == "auto" else REQUIRED)
    asked = {
        "model": MODEL,
        "max_tokens": 150,
        "messages": ASK,
        "tools": ANTHROPIC_TOOLS,
        "tool_choice": {"type": choice},
    }
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0) as client:
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
            for block in whole.content
            if block.type == "tool_use"
        ]
        history = [
            *ASK,
            {"role": "assistant", "content": [block.model_dump() for block in whole.content]},
            {"role": "user", "content": results},
        ]
        await client.messages.create(**{**asked, "messages": history})

    for message in (whole, streamed):
        assert message.stop_reason == "tool_use"
        uses = [(block.name, block.input) for block in message.content if block.type == "tool_use"]
        assert uses[0] == ("weather", {"city": "Paris"}) and len(uses) == 2
        assert [block.text for block in message.content if block.type == "text"] == (
            ["I look."] if choice == "auto" else []
        )
    assert "<tool_call>weather city=Paris</tool_call>" in prompt_text(gateway) and "[tool weather]sunny" in prompt_text(
        gateway
    )


async def test_messages_have_blocks_of_thinking(thinking):
    thinking.say("<think>Hm.</think>Yes.")
    asked = {"model": MODEL, "max_tokens": 50, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    async with anthropic.AsyncAnthropic(base_url=thinking.url, api_key="none", max_retries=0) as client:
        whole = await client.messages.create(messages=ASK, **asked)
        async with client.messages.stream(messages=ASK, **asked) as stream:
            streamed = await stream.get_final_message()
        said = {"role": "assistant", "content": [block.model_dump() for block in whole.content]}
        await client.messages.create(messages=[*ASK, said, *ASK], **asked)

    for message in (whole, streamed):
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert (message.content[0].thinking, message.content[1].text) == ("Hm.", "Yes.")
    assert "[assistant]Yes.[user]" in prompt_text(thinking)


async def test_a_cut_tool_use_is_shown_empty(gateway):
    gateway.say(REQUIRED)
    choice = {"type": "tool", "name": "weather"}
    body = {"model": MODEL, "max_tokens": 3, "messages": ASK, "tools": ANTHROPIC_TOOLS, "tool_choice": choice}

    _, message, _ = await gateway.post("/v1/messages", body)

    assert (message["stop_reason"], message["content"][0]["input"]) == ("max_tokens", {})


FUNCTIONS = [{"type": "function", **tool["function"]} for tool in TOOLS]


@pytest.fixture
async def remembering(start_gateway, tool_tokenizer, redis):
    return await start_gateway(
        tokenizer=tool_tokenizer,
        responses=ResponseStore(redis, Keyspace("test"), 60.0),
        reasoning_parser=ReasoningParser.THINK,
    )


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_responses_have_items_of_calls_and_reasoning(remembering, choice):
    remembering.say("<think>Hm.</think>\n" + (SAID if choice == "auto" else REQUIRED))
    asked = {"model": MODEL, "input": "Weather?", "tools": FUNCTIONS, "tool_choice": choice}
    async with openai.AsyncOpenAI(base_url=remembering.url + "/v1", api_key="none", max_retries=0) as client:
        whole = await client.responses.create(**asked)
        events = [event async for event in await client.responses.create(stream=True, **asked)]
        items = [item for item in whole.output if item.type == "function_call"]
        results = [{"type": "function_call_output", "call_id": item.call_id, "output": "sunny"} for item in items]
        continued = await client.responses.create(
            model=MODEL, previous_response_id=whole.id, input=results, tools=FUNCTIONS
        )
        listed = await client.responses.input_items.list(continued.id, order="asc")

    streamed = events[-1].response
    for response in (whole, streamed):
        kinds = [item.type for item in response.output]
        assert kinds == ["reasoning", *(["message"] if choice == "auto" else []), "function_call", "function_call"]
        assert response.output[-2].name == "weather"
        assert json.loads(response.output[-2].arguments) == {"city": "Paris"}
        assert response.output[0].content[0].text == "Hm."
        assert response.usage.output_tokens_details.reasoning_tokens > 0
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    for event in done:
        deltas = [
            other.delta
            for other in events
            if other.type == "response.function_call_arguments.delta" and other.item_id == event.item_id
        ]
        assert "".join(deltas) == event.arguments == streamed.output[event.output_index].arguments
    assert len(done) == 2
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "<tool_call>weather city=Paris</tool_call>" in prompt_text(remembering)
    assert prompt_text(remembering).endswith("sunny[assistant]")
    assert [item.type for item in listed.data][-4:] == ["function_call"] * 2 + ["function_call_output"] * 2
