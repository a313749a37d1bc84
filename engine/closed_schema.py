"""Objects of a JSON schema that say nothing of further members get none: a model would write on and on.

The answers that are left satisfy the schema as it was written.
"""

from collections.abc import Mapping
from typing import Any

# What else may give an object members, or ask for more of them.
_OPEN = frozenset(
    {
        "additionalProperties",
        "allOf",
        "anyOf",
        "dependentSchemas",
        "if",
        "minProperties",
        "oneOf",
        "patternProperties",
        "propertyNames",
        "unevaluatedProperties",
    }
)
_PLAIN_VALUES = frozenset({"const", "default", "enum", "examples"})
_NAMED_SCHEMAS = ("properties", "$defs", "definitions")


def closed(schema: Any) -> Any:
    """Return `schema` with its objects closed; unchanged where two parts of it may describe one object."""
    return _closed(schema) if isinstance(schema, dict) and not _is_shared(schema) else schema


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    shown = {name: _closed_part(name, part) for name, part in schema.items()}
    if "properties" in schema and not _OPEN & schema.keys():
        shown["additionalProperties"] = False
    return shown


def _closed_part(name: str, part: Any) -> Any:
    if name in _NAMED_SCHEMAS and isinstance(part, dict):
        return {key: _closed(inner) for key, inner in part.items()}
    return part if name in _PLAIN_VALUES else _closed(part)


def _is_shared(value: Any) -> bool:
    """Whether a member may be described elsewhere than where its object is."""
    if isinstance(value, list):
        return any(map(_is_shared, value))
    if not isinstance(value, Mapping):
        return False
    own = value.get("properties")
    is_object = isinstance(own, dict) and ("properties" in value or "required" in value)
    required = value.get("required")
    is_unnamed = isinstance(required, list) and not (isinstance(own, dict) and set(map(str, required)) <= own.keys())
    combines = any(name in value for name in ("allOf", "if", "dependentSchemas", "$dynamicRef"))
    mixes = is_object and any(name in value for name in ("$ref", "anyOf", "oneOf"))
    return combines or mixes or is_unnamed or any(map(_is_shared, value.values()))
