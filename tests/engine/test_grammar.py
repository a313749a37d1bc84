"""Grammars over the demo tokenizer: what is accepted, what is refused and why, positions that go back and fork."""

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pdserve.engine.errors import GrammarFailed, InvalidRequest
from pdserve.engine.grammar_compiler import GrammarCompiler
from pdserve.engine.grammar_source import form_behind_thoughts
from pdserve.engine.grammar_state import GrammarState, is_allowed
from pdserve.engine.grammar_thread import grammar_thread
from pdserve.engine.structured_outputs import MAX_GRAMMAR_CHARS, MAX_SCHEMA_CHARS, StructuredOutputsParams
from pdserve.engine.tokenizer import Tokenizer

_EOS = 2
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
_TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "boolean"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["value", "children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
_JSON_GBNF = r"""
root   ::= object # any object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""

Start = Callable[..., GrammarState]


@pytest.fixture(scope="module")
def tokenizer(demo_model_dir: Path) -> Tokenizer:
    return Tokenizer.load(demo_model_dir)


@pytest.fixture(scope="module")
def start(tokenizer: Tokenizer) -> Iterator[Start]:
    compiler = GrammarCompiler(tokenizer, frozenset({_EOS}))
    with grammar_thread("test") as thread:
        yield lambda **form: thread.submit(compiler.state, StructuredOutputsParams(**form)).result()


def _accepts(state: GrammarState, tokenizer: Tokenizer, text: str) -> bool:
    """Whether `text` is a whole answer from here; the mask and the step must agree at each token."""
    position = state.fork()
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        if position.is_over or not is_allowed(position.mask(), token_id):
            return False
        position.accept(token_id)
    return position.is_complete


def _ids(mask: bytes) -> list[int]:
    return [byte * 8 + bit for byte, bits in enumerate(mask) if bits for bit in range(8) if bits >> bit & 1]


def _walk(state: GrammarState, seed: int, num_tokens: int = 300) -> list[int]:
    """Take random allowed tokens, short ones rather, ending as soon as the answer may end."""
    random_source, position = random.Random(seed), state.fork()
    while not position.is_over and len(position.token_ids) < num_tokens:
        ids = _ids(position.mask())
        if _EOS in ids:
            break
        position.accept(random_source.choice(ids[:40]))
    assert position.is_complete or len(position.token_ids) == num_tokens
    return list(position.token_ids)


@pytest.mark.parametrize(
    ("form", "texts", "others"),
    [
        ({"json": _PERSON}, ['{"name": "é", "age": 3}', '{"name":"","age":150,"tags":["a"]}'], ['{"age": 3}', "[]"]),
        ({"json": _TREE}, ['{"value": true, "children": [{"value": false, "children": []}]}'], ['{"value": true}']),
        ({"json_object": True}, ["{}", '{"a": [1, null, {"b": "\\n"}]}'], ["[]", "1", "{}}", " {}"]),
        ({"regex": r"\d{3}/[a-z]+"}, ["123/abc"], ["12/abc", "123/", "123/abc "]),
        ({"regex": ""}, [""], ["a"]),
        ({"choice": ['é"\\\n/', "yes", "yesterday"]}, ['é"\\\n/', "yes", "yesterday"], ["ye", "no"]),
        ({"grammar": 'start: "a" | "b" start'}, ["a", "bba"], ["b", "ab"]),
        ({"grammar": _JSON_GBNF}, ['{"a": [1, 2.5, "x\\n"], "b": {"c": null}}', "{}"], ['{"a" 1}', "[]"]),
        ({"grammar": 'root ::= e\ne ::= t (("+"|"-") t)*\nt ::= [0-9]+ | "(" e ")"\n'}, ["1+(2-3)"], ["1++", "()"]),
        ({"grammar": 'root ::= "é" [é-ü]? "\\u00e9" "[" [\\]\\-a^]'}, ["éé[]", "ééé[-"], ["éé[b"]),
        ({"grammar": 'root ::= "x"{2} |\n  .{1,2} "y"'}, ["xx", "\ny"], ["x", "abcy"]),
    ],
)
def test_whole_answers_are_those_of_the_form(
    start: Start, tokenizer: Tokenizer, form: dict[str, Any], texts: list[str], others: list[str]
) -> None:
    state = start(**form)

    assert [text for text in texts if not _accepts(state, tokenizer, text)] == []
    assert [text for text in others if _accepts(state, tokenizer, text)] == []


@pytest.mark.parametrize("schema", [_PERSON, _TREE, {"type": "array", "items": {"type": "number"}, "minItems": 2}])
def test_whatever_is_sampled_validates(start: Start, tokenizer: Tokenizer, schema: dict[str, Any]) -> None:
    for seed in range(5):
        token_ids = _walk(start(json=schema), seed)
        if len(token_ids) < 300:
            jsonschema.validate(json.loads(tokenizer.decode(token_ids)), schema)


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ({"json": {"properties": {"foo": "bar"}}}, "schema must be"),
        ({"json": {"type": "strin"}}, "Invalid type"),
        ({"json": {"$ref": "#/nowhere"}}, "does not exist"),
        ({"json": {"$ref": "https://example.com/schema"}}, "not present"),
        ({"json": {"$ref": "#"}}, "no text"),
        ({"json": False}, "false"),
        ({"json": {"enum": []}}, "Unsatisfiable"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"not": {"type": "string"}}}, "not"),
        ({"regex": "("}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-ahead"),
        ({"regex": "[a&&b]"}, "no text"),
        ({"regex": "a\\x06b"}, "no tokens for"),  # this vocabulary has no token with that byte
        ({"regex": "(a{1000}){1000}"}, "too many"),
        ({"grammar": "start: /a(/"}, "unclosed group"),
        ({"grammar": "garbage"}, "Expected"),
        ({"grammar": "root ::= x"}, "line 1, column 10: there is no rule named x"),
        ({"grammar": 'x ::= "a"'}, "no rule named root"),
        ({"grammar": "root ::= root"}, "no text"),
        ({"grammar": 'root ::= "a\n'}, "does not end"),
        ({"grammar": "root ::= [a"}, "does not end"),
        ({"grammar": 'root ::= ("a"'}, "expected \\)"),
        ({"grammar": 'root ::= "a" )'}, "unexpected"),
        ({"grammar": 'root ::= "a"{3,2}'}, "counts upwards"),
        ({"grammar": 'root ::= "\\q"'}, "escape"),
        ({"grammar": 'root ::= "a"\nroot ::= "b"'}, "line 2.*twice"),
        ({"grammar": "root ::= " + "(" * 40 + '"a"' + ")" * 40}, "nested deeper"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(start: Start, form: dict[str, Any], why: str) -> None:
    """C100."""
    with pytest.raises(GrammarFailed, match=why):
        start(**form)


@pytest.mark.parametrize(
    "form",
    [
        {"json": {"type": "array", "items": [{"type": "string"}]}},  # draft 7's tuples
        {"json": {"enum": [f"value {index}" for index in range(5000)]}},
        {
            "json": {
                "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3500)} | {"d3500": {}},
                "$ref": "#/$defs/d0",
            }
        },
        {"grammar": "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(4000)), 'r4000: "a"'])},
        {"grammar": "\n".join(["start: R0", *(f"R{i}: R{i + 1}" for i in range(4000)), 'R4000: "a"'])},
        {"grammar": "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1}" for i in range(3500)), 'r3500 ::= "a"'])},
        {"regex": "(x+x+)+y"},
        {"regex": "[a-z]{5000}x"},
        {"regex": "(a|b)" * 5000},
    ],
    ids=["tuple", "enum", "refs", "rules", "terminals", "gbnf", "catastrophic", "counted", "long"],
)
def test_the_largest_and_strangest_forms_neither_hang_nor_crash(start: Start, form: dict[str, Any]) -> None:
    """C100: the chains overflow a thread's usual stack, which would end the process."""
    assert any(start(**form).mask())


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({}, "structured_outputs"),
        ({"regex": "a", "json_object": True}, "structured_outputs"),
        ({"json": "{"}, "json"),
        ({"json": 5}, "json"),
        ({"json": {"a": float("nan")}}, "json"),
        ({"json": {"enum": ["x" * MAX_SCHEMA_CHARS]}}, "json"),
        ({"regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, "regex"),
        ({"regex": 5}, "regex"),
        ({"regex": "\ud800"}, "regex"),
        ({"grammar": ""}, "grammar"),
        ({"choice": []}, "choice"),
        ({"choice": "yes"}, "choice"),
        ({"choice": ["a", ""]}, "choice.1"),
        ({"choice": ["a"] * 5000}, "choice"),
        ({"json_object": 1}, "json_object"),
    ],
)
def test_what_is_no_form_is_refused_by_name(form: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        StructuredOutputsParams(**form)

    assert refused.value.field == field


def test_a_schema_nested_too_deep_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"items": schema}

    with pytest.raises(InvalidRequest, match="nested"):
        StructuredOutputsParams(json=schema)


@pytest.mark.parametrize("schema", [{}, True])
def test_a_schema_that_says_nothing_is_any_object(start: Start, tokenizer: Tokenizer, schema: Any) -> None:
    """C102: as any JSON value, the answer could be one number without an end."""
    state = start(json=schema)

    assert _accepts(state, tokenizer, '{"a": 1}')
    assert not _accepts(state, tokenizer, "1")


def test_white_space_is_bounded_and_none_follows_the_last_brace(start: Start, tokenizer: Tokenizer) -> None:
    """C103."""
    state = start(json=_PERSON)

    assert _accepts(state, tokenizer, '{\n    "name": "x",\n    "age": 1\n}')
    assert not _accepts(state, tokenizer, '{\n\n"name": "x", "age": 1}')
    assert not _accepts(state, tokenizer, '{"name":  "x", "age": 1}')
    for token_id in tokenizer.encode('{"name": "x", "age": 1}', add_special_tokens=False):
        state.accept(token_id)
    assert state.is_over
    assert _ids(state.mask()) == [_EOS]


def test_the_end_is_allowed_exactly_where_the_answer_is_whole(start: Start, tokenizer: Tokenizer) -> None:
    state = start(choice=["yes", "yesterday"])

    assert not is_allowed(state.mask(), _EOS)
    for token_id in tokenizer.encode("yes", add_special_tokens=False):
        state.accept(token_id)
    assert is_allowed(state.mask(), _EOS)
    assert not state.is_over


def test_going_back_and_on_gives_the_masks_of_a_fresh_state(start: Start) -> None:
    random_source = random.Random(5)
    token_ids = _walk(start(json=_PERSON), 3)
    state = start(json=_PERSON)
    state.move_to(token_ids)

    for _ in range(30):
        length = random_source.randrange(len(token_ids))
        state.move_to(token_ids[:length])
        fresh = start(json=_PERSON)
        for token_id in token_ids[:length]:
            fresh.accept(token_id)
        assert state.mask() == fresh.mask()
        assert (state.is_complete, state.is_over) == (fresh.is_complete, fresh.is_over)


def test_masks_along_a_draft_are_those_of_going_there(start: Start) -> None:
    token_ids = _walk(start(json=_PERSON), 8)
    state = start(json=_PERSON)
    state.move_to(token_ids[:3])

    masks = state.masks(token_ids[3:8])
    with_wrong_token = state.masks([*token_ids[3:5], _EOS, 17])

    assert list(state.token_ids) == token_ids[:3]
    assert len(masks) == 1 + len(token_ids[3:8])
    for count, mask in enumerate(masks):
        there = state.fork()
        there.move_to(token_ids[: 3 + count])
        assert there.mask() == mask
    assert with_wrong_token == masks[:3]


def test_forks_go_their_own_ways(start: Start, tokenizer: Tokenizer) -> None:
    state = start(regex="[ab]{2}")
    first, second = state.fork(), state.fork()
    [a], [b] = tokenizer.encode("a"), tokenizer.encode("b")

    first.accept(a)
    second.accept(b)
    second.accept(b)

    assert (len(state.token_ids), len(first.token_ids), len(second.token_ids)) == (0, 1, 2)
    assert second.is_over and not first.is_complete


def test_a_token_that_may_not_follow_is_an_error_of_that_state_alone(start: Start, tokenizer: Tokenizer) -> None:
    state, other = start(choice=["a"]), start(choice=["a"])

    with pytest.raises(GrammarFailed):
        state.accept(tokenizer.encode("b")[0])

    assert any(other.mask())


def test_no_special_token_but_the_end_can_be_sampled(start: Start, tokenizer: Tokenizer) -> None:
    state = start(regex="(.|\n)*")

    allowed = _ids(state.mask())

    assert {token_id for token_id in allowed if tokenizer.is_special(token_id)} == {_EOS}
    assert re.search("\n", tokenizer.decode(allowed))


@pytest.mark.parametrize(
    ("form", "answer", "other"),
    [
        ({"json": _PERSON}, '{"name": "a", "age": 1}', '{"name": 1, "age": 1}'),
        ({"json_object": True}, '{"a": [1]}', "[1]"),
        ({"regex": "a/b\\/[0-9]\n"}, "a/b/1\n", "a/b/x\n"),
        ({"choice": ["yes", 'no "no"']}, 'no "no"', "no"),
        ({"grammar": 'root ::= "}" | "x"\n'}, "}", "y"),
        ({"grammar": 'start: "}" | "x"\n'}, "}", "y"),
    ],
)
def test_a_form_behind_thoughts_holds_only_there(
    start: Start, tokenizer: Tokenizer, form: dict[str, Any], answer: str, other: str
) -> None:
    params = StructuredOutputsParams(**form)
    closed, opened = (form_behind_thoughts(params, is_open) for is_open in (False, True))

    for thoughts in ("<think>So {it} is.\n</think>\n\n", "<think></think>", ""):
        assert _accepts(start(grammar=closed.grammar), tokenizer, thoughts + answer)
        assert not _accepts(start(grammar=closed.grammar), tokenizer, thoughts + other)
    assert _accepts(start(grammar=opened.grammar), tokenizer, f"I <think> so</think>{answer}")
    assert not _accepts(start(grammar=opened.grammar), tokenizer, f"I think so</think>{other}")
    assert not _accepts(start(grammar=opened.grammar), tokenizer, answer)
