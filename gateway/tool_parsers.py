"""Which syntax a model writes calls in: as configured, or as its chat template gives it away."""

from enum import StrEnum

from pdserve.gateway.hermes_calls import HermesSyntax
from pdserve.gateway.llama3_calls import Llama3JsonSyntax
from pdserve.gateway.mistral_calls import MistralSyntax
from pdserve.gateway.pythonic_calls import PythonicSyntax
from pdserve.gateway.tool_syntax import ToolSyntax


class ToolCallParser(StrEnum):
    """The values of --tool-call-parser."""

    AUTO = "auto"
    NONE = "none"
    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"
    MISTRAL = "mistral"
    PYTHONIC = "pythonic"


class ReasoningParser(StrEnum):
    """The values of --reasoning-parser."""

    NONE = "none"
    THINK = "think"


# Templates of other formats use the same tag, with something else inside.
_NOT_HERMES = ("<function=", "<arg_key>", "<parameter=")


def tool_syntax(parser: ToolCallParser, chat_template: str | None) -> ToolSyntax | None:
    """Return the syntax; None if there is none, or if the template does not say which."""
    if parser is ToolCallParser.AUTO:
        parser = _of_template(chat_template or "")
    match parser:
        case ToolCallParser.HERMES:
            return HermesSyntax()
        case ToolCallParser.LLAMA3_JSON:
            return Llama3JsonSyntax()
        case ToolCallParser.MISTRAL:
            return MistralSyntax()
        case ToolCallParser.PYTHONIC:
            return PythonicSyntax()
        case _:
            return None


def _of_template(template: str) -> ToolCallParser:
    if "tools" not in template:
        return ToolCallParser.NONE
    if "[TOOL_CALLS]" in template:
        return ToolCallParser.MISTRAL
    if "<tool_call>" in template:
        has_other = any(mark in template for mark in _NOT_HERMES)
        return ToolCallParser.NONE if has_other else ToolCallParser.HERMES
    is_pythonic = "<|python_start|>" in template or "func_name1(" in template
    is_json = "<|python_tag|>" in template or '"parameters": dictionary of argument name' in template
    if is_pythonic == is_json:
        return ToolCallParser.NONE
    return ToolCallParser.PYTHONIC if is_pythonic else ToolCallParser.LLAMA3_JSON
