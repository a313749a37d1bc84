"""The fields of a body that ask for an answer of a certain form -> one checked form, and the field that asked."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.engine.errors import GrammarFailed, InvalidRequest
from pdserve.engine.grammar_source import form_behind_thoughts
from pdserve.engine.structured_outputs import StructuredOutputsParams
from pdserve.gateway.schemas import GenerationBody

_FORMS = frozenset({"json", "json_object", "regex", "choice", "grammar"})
# What vLLM's object says beside the form; none of it is supported, all of it may be said to be off.
_OPTIONS = frozenset(
    {
        "disable_additional_properties",
        "disable_any_whitespace",
        "disable_fallback",
        "structural_tag",
        "whitespace_pattern",
    }
)
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


@dataclass(frozen=True, slots=True)
class AskedForm:
    """A form, and the name of the field that says it, for an error about its content."""

    params: StructuredOutputsParams
    field: str


def asked_form(body: GenerationBody) -> AskedForm | None:
    """Return the form that `body` asks for; None if it asks for none. Null is "not given", empty is not.

    Raises:
        InvalidRequest: a form is malformed or too large, or there is more than one.
    """
    asked: list[AskedForm] = []
    if body.response_format is not None and (form := _of_response_format(body.response_format)) is not None:
        asked.append(form)
    for name, form_name in _GUIDED.items():
        value = getattr(body, name)
        if value is not None:
            asked.append(_form(lambda _: name, **{form_name: value}))  # noqa: B023  (called before the next round)
    if body.structured_outputs is not None:
        asked.append(_of_structured_outputs(body.structured_outputs))
    if len(asked) > 1:
        names = " and ".join(form.field.split(".")[0] for form in asked)
        raise InvalidRequest(asked[1].field.split(".")[0], f"an answer has one form, {names} ask for several")
    return asked[0] if asked else None


def behind_thoughts(form: AskedForm, is_open: bool) -> AskedForm:
    """Return the form that holds only for what follows the thoughts; with `is_open` the prompt has begun them.

    Raises:
        InvalidRequest: it is too large, or no grammar.
    """
    try:
        return AskedForm(form_behind_thoughts(form.params, is_open), form.field)
    except InvalidRequest as error:
        raise InvalidRequest(form.field, error.message) from None
    except GrammarFailed as error:
        raise InvalidRequest(form.field, str(error)) from None


def _of_response_format(response_format: Mapping[str, Any]) -> AskedForm | None:
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return AskedForm(StructuredOutputsParams(json_object=True), "response_format")
    if kind != "json_schema":
        raise InvalidRequest("response_format.type", 'must be "text", "json_object" or "json_schema"')
    named = response_format.get("json_schema")
    if not isinstance(named, dict):
        raise InvalidRequest("response_format.json_schema", "must be an object with a schema")
    if not isinstance(named.get("strict"), bool | None):
        raise InvalidRequest("response_format.json_schema.strict", "must be true or false")
    if not isinstance(named.get("name"), str | None):
        raise InvalidRequest("response_format.json_schema.name", "must be a string")
    schema = named.get("schema")
    if not isinstance(schema, dict):
        raise InvalidRequest("response_format.json_schema.schema", "must be an object")
    return _form(lambda _: "response_format.json_schema.schema", json=schema)


def _of_structured_outputs(given: Mapping[str, Any]) -> AskedForm:
    forms = {name: value for name, value in given.items() if value not in (None, False) and name not in _OPTIONS}
    if given.get("json") is False:
        forms["json"] = False  # a schema, if one that nothing satisfies
    for name, value in given.items():
        if name not in _FORMS and not (name in _OPTIONS and value in (None, False, "")):
            raise InvalidRequest(f"structured_outputs.{name}", "is not supported by this server")
    return _form(
        lambda field: field if field == "structured_outputs" else f"structured_outputs.{field}",
        **forms,
    )


def _form(field_of: Callable[[str], str], **form: Any) -> AskedForm:
    try:
        params = StructuredOutputsParams(**form)
    except InvalidRequest as error:
        raise InvalidRequest(field_of(error.field), error.message) from None
    return AskedForm(params, field_of(params.form))
