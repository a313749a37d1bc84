"""Calls in the text of an answer: each syntax, any way of cutting the text, and what is no call after all."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.gateway.answer_part import AnswerContent, CallArguments, WholeCall, merged_parts
from pdserve.gateway.answer_reader import AnswerReader, AnswerReading, FreeCalls, NamedCall, RequiredCalls
from pdserve.gateway.tool_parsers import ToolCallParser, tool_syntax

NAMES = frozenset({"weather", "time_of-day"})
PARSERS = ("hermes", "llama3_json", "mistral", "pythonic")


def reading(parser: str, **fields) -> AnswerReading:
    return AnswerReading(FreeCalls(tool_syntax(ToolCallParser(parser), None), NAMES), **fields)


def parts_of(chunks, how: AnswerReading):
    reader = AnswerReader(how)
    parts = [part for number, chunk in enumerate(chunks, 1) for part in reader.push(chunk, number)]
    return merged_parts([*parts, *reader.finish()])


def content_of(text: str, how: AnswerReading) -> AnswerContent:
    return AnswerContent.of(parts_of([text], how))


def calls_of(text: str, parser: str) -> list[tuple[str, object]]:
    content = content_of(text, reading(parser))
    assert content.text == ""
    assert [call.index for call in content.calls] == list(range(len(content.calls)))
    return [(call.name, json.loads(call.arguments)) for call in content.calls]


PARIS = ("weather", {"city": "Paris"})
TIME = ("time_of-day", {"zones": ["a", "b"], "at": None, "n": 2})
HERMES_TIME = (
    '<tool_call>\n{"name": "time_of-day", "arguments": {"zones": ["a", "b"], "at": null, "n": 2}}\n</tool_call>'
)


@pytest.mark.parametrize(
    ("parser", "text", "calls"),
    [
        ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>', [PARIS]),
        (
            "hermes",
            f'<tool_call>{{"arguments": {{"city": "Paris"}}, "name": "weather"}}</tool_call>\n{HERMES_TIME}\n',
            None,
        ),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}', [PARIS]),
        ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}', [PARIS]),
        ("hermes", '<tool_call>{"name": "weather"}</tool_call>', [("weather", {})]),
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments": {"city": "</tool_call> \\"}"}}</tool_call>',
            [("weather", {"city": '</tool_call> "}'})],
        ),
        ("llama3_json", '{"name": "weather", "parameters": {"city": "Paris"}}', [PARIS]),
        (
            "llama3_json",
            '\n<|python_tag|>{"type": "function", "name": "weather", "parameters": {"city": "Paris"}}',
            [PARIS],
        ),
        (
            "llama3_json",
            '{"name": "weather", "parameters": {"city": "Paris"}}; '
            '{"name": "time_of-day", "arguments": {"zones": ["a", "b"], "at": null, "n": 2}}',
            None,
        ),
        ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}]', [PARIS]),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}, "id": "abcdefghi"}, '
            '{"name": "time_of-day", "arguments": {"zones": ["a", "b"], "at": null, "n": 2}}]',
            None,
        ),
        (
            "mistral",
            '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}'
            '[TOOL_CALLS]time_of-day[CALL_ID]abcdefghi[ARGS]{"zones": ["a", "b"], "at": null, "n": 2}',
            None,
        ),
        ("mistral", '[TOOL_CALLS]weather{"city": "Paris"}', [PARIS]),
        ("pythonic", '[weather(city="Paris")]', [PARIS]),
        ("pythonic", "[weather(city='Paris'), time_of-day(zones=['a', \"b\",], at=None, n=2)]", None),
        ("pythonic", '<|python_start|>[weather(city="Paris")]<|python_end|>', [PARIS]),
        ("pythonic", "[weather()]", [("weather", {})]),
        ("pythonic", '[weather(city="Paris")', [PARIS]),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"a": "1\n\t2"}}', [("weather", {"a": "1\n\t2"})]),
        (
            "pythonic",
            r"""[weather(a='it\'s [{(', b=-1.5e3, c={'k': (1, true)}, d="\u00e9\n\d")]""",
            [("weather", {"a": "it's [{(", "b": -1500.0, "c": {"k": [1, True]}, "d": "é\n\\d"})],
        ),
    ],
)
def test_calls_are_found_in_every_syntax(parser, text, calls):
    assert calls_of(text, parser) == ([PARIS, TIME] if calls is None else calls)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", "<tool_call>{'name': 'weather', 'arguments': {}}</tool_call>"),
        ("hermes", '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
        ("hermes", "<tool_call>weather</tool_call> or <tool_cal"),
        ("hermes", " \n "),
        ("hermes", "<<tool_call"),
        ("hermes", '<tool_call>{"name": "weather", "argu'),
        ("hermes", '<tool_call>{"arguments": {"n": NaN}, "name": "weather"}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"n": "\\ud800"}, "name": "weather"}</tool_call>'),
        ("mistral", '[TOOL_CALLS][{"name": "unknown", "arguments": {}}]'),
        ("pythonic", "[unknown(a=1)]"),
        ("pythonic", "[weather(=1)]"),
        ("llama3_json", '{"name": "weather"}'),
        ("llama3_json", '{"name": "somebody", "parameters": {}}'),
        ("llama3_json", 'As JSON: {"name": "weather", "parameters": {}}'),
        ("llama3_json", '{"answer": 42} and more {'),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", "[TOOL_CALLS]no name at all {}"),
        ("mistral", "[TOOL_CALLS]weather, please"),
        ("mistral", "[TOOL_CALLS]" + "weather" * 40),
        ("pythonic", "[1, 2]"),
        ("pythonic", "[weather('Paris')]"),
        ("pythonic", '[link](http://x) "'),
    ],
)
def test_what_is_no_call_is_text_to_the_last_character(parser, text):
    content = content_of(text, reading(parser))

    assert (content.text, content.calls) == (text, ())


@pytest.mark.parametrize(
    ("parser", "text", "arguments", "said"),
    [
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Par', '{"city": "Par', ""),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"n": 12', '{"n": 12', ""),
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments": {"n": NaN}}</tool_call>',
            '{"n":',
            " NaN}}</tool_call>",
        ),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"n": "\\ud800"}}', '{"n": "', '\\ud800"}}'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"n": 1e999}}', '{"n":', " 1e999}}"),
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments": {"n": ' + "9" * 5000 + "}}",
            '{"n":',
            f" {'9' * 5000}}}}}",
        ),
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments": ' + '{"a":' * 100 + "1" + "}" * 101,
            '{"a":' * 64,
            '{"a":' * 36 + "1" + "}" * 101,
        ),
        ("llama3_json", '{"name": "weather", "parameters": {"a" "b"}}', '{"a"', ' "b"}}'),
        ("llama3_json", '{"name": "weather", "parameters": {"a": 1,}}', '{"a": 1,', "}}"),
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"a": [tru]}', '{"a": [', "tru]}"),
        ("pythonic", "[weather(city=print(1))]", '{"city": ', "print(1))]"),
        ("pythonic", "[weather(a=1, a=2)]", '{"a": 1', ", a=2)]"),
        ("pythonic", "[weather(a='x', b='y", '{"a": "x", "b": "y', ""),
        ("pythonic", "[weather(a=1, b=Tru", '{"a": 1, "b": ', ""),
        ("pythonic", "[weather(a=" + "1" * 500 + ")]", '{"a": ', "1" * 500 + ")]"),
        ("pythonic", r"[weather(a='x\ud800')]", '{"a": "x', r"\ud800')]"),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_arguments_that_cannot_go_on_end_there_and_the_rest_is_text(parser, text, arguments, said, size):
    """Nothing is lost, and such a call is known to be none that can be made."""
    reader = AnswerReader(reading(parser))
    parts = [part for start in range(0, len(text), size) for part in reader.push(text[start : start + size], 1)]

    content = AnswerContent.of([*parts, *reader.finish()])

    assert (content.text, [call.arguments for call in content.calls]) == (said, [arguments])
    assert reader.num_calls == 0


def test_a_further_call_of_an_unknown_function_is_text():
    text = '[TOOL_CALLS][{"name": "weather", "arguments": {}}, {"name": "unknown", "arguments": {}}]'

    content = content_of(text, reading("mistral"))

    assert content.calls == (WholeCall(0, "weather", "{}"),)
    assert content.text == ', {"name": "unknown", "arguments": {}}]'


def test_text_may_stand_before_and_behind_calls():
    text = f'Let me see.\n<tool_call>{{"name": "weather", "arguments": {{}}}}</tool_call>\n\n{HERMES_TIME} Done \n'

    content = content_of(text, reading("hermes"))

    assert content.text == "Let me see. Done \n"
    assert [call.name for call in content.calls] == ["weather", "time_of-day"]


def test_only_the_first_call_is_kept_where_they_must_not_be_parallel():
    reader = AnswerReader(reading("pythonic", is_only_first=True))

    parts = [*reader.push("[weather(a=1), weather(a=2)][weather(a=3)]", 9), *reader.finish()]

    assert AnswerContent.of(parts).calls == (WholeCall(0, "weather", '{"a": 1}'),)
    assert reader.num_calls == 1


PIECES = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|python_tag|>",
        "<|python_start|>",
        "<|python_end|>",
        '{"name": "weather", "arguments": {"city": "Paris \\" é"}}',
        '{"name": "time_of-day", "parameters": {}}',
        '[{"name": "weather", "arguments": {}}]',
        'weather[ARGS]{"a": [1]}',
        "[weather(city='P[a', n=1), time_of-day()]",
        "<think>",
        "</think>",
        "hello",
        *' \n;,{}[]()"\\<a',
    ]
)
TEXTS = st.one_of(st.lists(PIECES, max_size=12).map("".join), st.text(max_size=40))


@given(TEXTS, st.data(), st.sampled_from(PARSERS), st.booleans())
def test_how_an_answer_is_cut_changes_nothing(text, data, parser, has_thoughts):
    how = reading(parser, has_thoughts=has_thoughts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    chunks = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    whole = parts_of([text], how)

    assert parts_of(chunks, how) == whole
    assert parts_of(text, how) == whole
    for call in AnswerContent.of(whole).calls:
        assert call.name in NAMES and call.arguments.startswith("{")


@given(TEXTS, st.sampled_from(PARSERS))
def test_an_answer_without_calls_is_told_as_it_is(text, parser):
    content = content_of(text, reading(parser))

    assert content.calls or content.text == text


CALLS = st.lists(
    st.tuples(
        st.sampled_from(sorted(NAMES)),
        st.dictionaries(
            st.text(st.characters(codec="utf-8"), max_size=5),
            st.recursive(
                st.none() | st.integers(-(2**70), 2**70) | st.text(st.characters(codec="utf-8"), max_size=8),
                lambda inner: st.lists(inner, max_size=2),
                max_leaves=4,
            ),
            max_size=3,
        ),
    ),
    min_size=1,
    max_size=3,
)


def as_python(value: object) -> str:
    """Return a literal of every kind of string that there is."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{as_python(key)}: {as_python(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + "".join(f"{as_python(inner)}," for inner in value) + "]"
    return ascii(value) if isinstance(value, str) and len(value) % 2 else repr(value)


def written(parser: str, calls: list[tuple[str, dict[str, object]]]) -> tuple[str, bool]:
    """Return how a model writes `calls`, and whether their arguments are JSON there."""
    objects = [json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in calls]
    match parser:
        case "hermes":
            return "".join(f"<tool_call>\n{each}\n</tool_call>\n" for each in objects), True
        case "llama3_json":
            return "; ".join(objects), True
        case "mistral":
            return f"[TOOL_CALLS][{', '.join(objects)}]", True
    named = [
        f"{name}({', '.join(f'a{i}={as_python(value)}' for i, value in enumerate(arguments.values()))})"
        for name, arguments in calls
    ]
    return f"[{', '.join(named)}]", False


@given(st.deferred(lambda: CALLS), st.sampled_from(PARSERS), st.data())
def test_arguments_come_as_they_are_written_however_the_answer_is_cut(calls, parser, data):
    text, is_json = written(parser, calls)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    chunks = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    content = AnswerContent.of(parts_of(chunks, reading(parser)))

    assert content.text == "" and [call.name for call in content.calls] == [name for name, _ in calls]
    for call, (_, arguments) in zip(content.calls, calls, strict=True):
        expected = arguments if is_json else {f"a{i}": value for i, value in enumerate(arguments.values())}
        assert json.loads(call.arguments) == expected
        if is_json:
            assert call.arguments == json.dumps(arguments, ensure_ascii=False)


@pytest.mark.parametrize("parser", PARSERS)
def test_no_argument_waits_for_the_end_of_its_call(parser):
    """Behind each further word of the text its arguments have all words before it."""
    words = [f"word{i}" for i in range(50)]
    text, _ = written(parser, [("weather", {"city": " ".join(words)})])
    reader = AnswerReader(reading(parser))
    told = ""

    for index, word in enumerate(words):
        end = text.index(word) + len(word)
        start = 0 if index == 0 else text.index(words[index - 1]) + len(words[index - 1])
        told += "".join(part.text for part in reader.push(text[start:end], index) if isinstance(part, CallArguments))
        assert told.endswith(word)


@given(CALLS, st.integers(1, 7), st.booleans())
def test_required_calls_are_told_as_they_are_written(calls, size, has_spaces):
    separators = (", ", ": ") if has_spaces else (",", ":")
    listed = [{"name": name, "arguments": arguments} for name, arguments in calls]
    text = json.dumps(listed, separators=separators, indent=1 if has_spaces else None)

    parts = parts_of([text[i : i + size] for i in range(0, len(text), size)], AnswerReading(RequiredCalls()))

    content = AnswerContent.of(parts)
    assert [(call.name, json.loads(call.arguments)) for call in content.calls] == calls
    assert content.text == ""


@pytest.mark.parametrize("end", range(1, 60))
def test_a_required_call_that_is_cut_loses_nothing(end):
    text = '[{"name": "weather", "arguments": {"city": "Paris"}}]'[:end]

    content = content_of(text, AnswerReading(RequiredCalls()))

    if content.calls:
        [call] = content.calls
        assert call.arguments == text[len('[{"name": "weather", "arguments": ') :].removesuffix("]")[:17]
        assert content.text == ""
    else:
        assert content.text == text


def test_required_calls_that_are_none_are_text():
    text = '[{"name": "weather", "arguments": {"a": ]}'

    content = content_of(text, AnswerReading(RequiredCalls()))

    assert content.calls[0].arguments + content.text == '{"a": ]}'


@given(st.text(max_size=20), st.integers(1, 5))
def test_a_named_call_is_its_arguments(text, size):
    parts = parts_of([text[i : i + size] for i in range(0, len(text), size)], AnswerReading(NamedCall("weather")))

    assert AnswerContent.of(parts).calls == ((WholeCall(0, "weather", text),) if text else ())


@pytest.mark.parametrize(
    ("text", "is_open", "thoughts", "said"),
    [
        ("<think>\nSo it is.\n</think>\n\nYes.", False, "So it is.", "Yes."),
        ("So it is.</think>Yes.\n", True, "So it is.", "Yes.\n"),
        ("\n<think></think>\n\nYes", False, "", "Yes"),
        ("No thoughts </think>", False, "", "No thoughts </think>"),
        ("<think>never ends", False, "never ends", ""),
        ("<think>a </thin b</think>c </think>", False, "a </thin b", "c </think>"),
        ("<thi", False, "", "<thi"),
        ("<", False, "", "<"),
        ("<think>so</thi", False, "so</thi", ""),
        ("<think>so</think>a <", False, "so", "a <"),
        ("  ", False, "", "  "),
    ],
)
def test_thoughts_are_told_apart(text, is_open, thoughts, said):
    """C030: what might have begun a tag is told at the end, where it belongs, whole or in pieces."""
    how = AnswerReading(has_thoughts=True, is_thought_open=is_open)

    content = content_of(text, how)

    assert (content.thoughts.rstrip(), content.text) == (thoughts, said)
    assert parts_of(text, how) == parts_of([text], how)


def test_calls_may_follow_thoughts_and_none_is_in_them():
    how = reading("llama3_json", has_thoughts=True)

    content = content_of(
        '<think>{"name": "weather", "parameters": {}}</think>{"name": "weather", "parameters": {}}', how
    )

    assert content.thoughts == '{"name": "weather", "parameters": {}}'
    assert [call.name for call in content.calls] == ["weather"] and content.text == ""


def test_the_tokens_of_thoughts_are_counted_with_their_tags():
    reader = AnswerReader(AnswerReading(has_thoughts=True))

    for number, token in enumerate(["<think>", "a", "b", "</think>", "c", "d"], 1):
        reader.push(token, number)

    assert reader.num_thought_tokens == 4


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("{{ tools }} <tool_call>", "HermesSyntax"),
        ("{{ tools }} [TOOL_CALLS]", "MistralSyntax"),
        (
            '{{ tools }} {"name": function name, "parameters": dictionary of argument name and its value}',
            "Llama3JsonSyntax",
        ),
        ("{{ tools }} <|python_start|>", "PythonicSyntax"),
        ("{{ tools }} <tool_call><function=", "NoneType"),
        ("{{ tools }}", "NoneType"),
        ("{{ tools }} <|python_start|> <|python_tag|>", "NoneType"),
        ("<tool_call>", "NoneType"),
        (None, "NoneType"),
    ],
)
def test_a_template_gives_the_syntax_away_or_does_not(template, parser):
    assert type(tool_syntax(ToolCallParser.AUTO, template)).__name__ == parser
    assert tool_syntax(ToolCallParser.NONE, template) is None
