"""Which objects of a schema are closed, and that what is left satisfies the schema as it was written."""

from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.closed_schema import closed

STRING = {"type": "string"}
CITY: dict[str, Any] = {"type": "object", "properties": {"name": STRING}, "required": ["name"]}


def test_an_object_that_says_nothing_of_further_members_gets_none() -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/City"}, "all": {"type": "array", "items": CITY}},
        "$defs": {"City": CITY, "Free": {"type": "object"}},
    }

    result = closed(schema)

    assert result["additionalProperties"] is False
    assert result["$defs"]["City"] == result["properties"]["all"]["items"] == {**CITY, "additionalProperties": False}
    assert result["$defs"]["Free"] == {"type": "object"}


def test_each_alternative_is_closed_where_they_share_no_members() -> None:
    result = closed({"anyOf": [CITY, {"type": "null"}]})

    assert result == {"anyOf": [{**CITY, "additionalProperties": False}, {"type": "null"}]}


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "object"},
        {**CITY, "additionalProperties": True},
        {**CITY, "additionalProperties": STRING},
        {**CITY, "patternProperties": {"^x": STRING}},
        {**CITY, "minProperties": 2},
        {**CITY, "required": ["name", "size"]},
        {**CITY, "anyOf": [{"properties": {"a": STRING}}, {"properties": {"b": STRING}}]},
        {"allOf": [CITY, {"type": "object", "properties": {"size": STRING}}]},
        {"$defs": {"City": CITY}, "$ref": "#/$defs/City", "properties": {"size": STRING}},
        {"type": "object", "properties": {}, "if": {"required": ["a"]}, "then": {"properties": {"b": STRING}}},
        {"properties": {"a": {"const": {"properties": {}}}}, "additionalProperties": True},
    ],
)
def test_what_asks_for_more_members_or_is_described_twice_stays_open(schema: Any) -> None:
    assert closed(schema) == schema


MEMBERS = st.dictionaries(st.sampled_from("abc"), st.deferred(lambda: SCHEMAS), max_size=3)
OBJECTS = st.builds(
    lambda members, required, more: {
        "type": "object",
        "properties": members,
        **({"required": sorted(set(required) & members.keys())} if required else {}),
        **more,
    },
    MEMBERS,
    st.lists(st.sampled_from("abc"), max_size=2),
    st.sampled_from([{}, {"additionalProperties": True}, {"minProperties": 1}, {"anyOf": [{"required": ["d"]}, {}]}]),
)
SCHEMAS: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([{"type": "integer"}, STRING, {}]),
    OBJECTS,
    st.builds(lambda items: {"type": "array", "items": items}, st.deferred(lambda: SCHEMAS)),
    st.builds(lambda some: {"anyOf": some}, st.lists(st.deferred(lambda: SCHEMAS), min_size=1, max_size=2)),
)
VALUES = st.recursive(
    st.integers(0, 3) | st.text("xy", max_size=2),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=5,
)


@given(SCHEMAS, VALUES)
def test_whatever_the_closed_schema_allows_satisfies_the_schema(schema: Any, value: Any) -> None:
    if jsonschema.Draft202012Validator(closed(schema)).is_valid(value):
        jsonschema.validate(value, schema)
