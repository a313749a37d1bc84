"""The model's chat template: messages in, prompt text out. Knows text, not tokens.

Rendered by sandboxed Jinja with the environment that Hugging Face templates are written for.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdserve.engine.errors import InvalidRequest, ModelError

RESERVED_VARIABLES = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "documents",
        "messages",
        "tokenize",
        "tools",
    }
)
_END_OF_FINAL_MESSAGE = "PDSERVE-END-OF-FINAL-MESSAGE "

ChatMessage = Mapping[str, Any]


class ChatTemplate:
    """A compiled template and the special tokens it may print."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise ModelError(f"the chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text of `messages`; `variables` are further names the template may read.

        Raises:
            InvalidRequest: the template refuses these messages, or they do not have the shape it needs.
        """
        reserved = RESERVED_VARIABLES & set(variables or {})
        if reserved:
            raise InvalidRequest("chat_template_kwargs", f"{min(reserved)!r} cannot be set here")
        if add_generation_prompt and continue_final_message:
            raise InvalidRequest("continue_final_message", "cannot be combined with add_generation_prompt")
        conversation = [dict(message) for message in messages]
        if continue_final_message:
            _mark_final_message(conversation)
        names = {**self._special_tokens, **(variables or {})}
        try:
            text = self._template.render(
                names,
                messages=conversation,
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except TemplateError as error:
            raise InvalidRequest("messages", f"the chat template refuses them: {error}") from error
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError) as error:
            message = f"the chat template cannot render them: {type(error).__name__}: {error}"
            raise InvalidRequest("messages", message) from error
        return _cut_at_final_message(text) if continue_final_message else text


def find_chat_template(model_dir: Path, tokenizer_config: Mapping[str, Any], override: str | None) -> str | None:
    """Return the source: the override, chat_template.jinja, then tokenizer_config.json; None without one."""
    if override is not None:
        return override
    file = model_dir / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    configured = tokenizer_config.get("chat_template")
    if isinstance(configured, list):
        named = {entry["name"]: entry["template"] for entry in configured}
        configured = named.get("default")
    return configured if isinstance(configured, str) else None


def _mark_final_message(conversation: list[dict[str, Any]]) -> None:
    content = conversation[-1].get("content") if conversation else None
    if not isinstance(content, str):
        raise InvalidRequest("continue_final_message", "the last message has no text to continue")
    conversation[-1]["content"] = content + _END_OF_FINAL_MESSAGE


def _cut_at_final_message(text: str) -> str:
    """Cut at the mark behind the last message; where its space was trimmed, the message is trimmed too."""
    start = text.rfind(_END_OF_FINAL_MESSAGE.strip())
    if start < 0:
        raise InvalidRequest("continue_final_message", "the chat template does not show the last message")
    is_kept_whole = text.startswith(_END_OF_FINAL_MESSAGE, start)
    return text[:start] if is_kept_whole else text[:start].rstrip()


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; here it is just rendered."""

    tags = {"generation"}  # noqa: RUF012  (the type that Jinja declares)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which a model has not seen in training.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
