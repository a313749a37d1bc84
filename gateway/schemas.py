"""The bodies of the two generation endpoints, as clients send them. Strict types: nothing is coerced.

Null means "not given" everywhere. Unknown fields are kept aside, to be reported.
"""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _whole(value: object) -> object:
    """Take 5.0 for 5, as JSON has one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Messages = Annotated[list[dict[str, Any]], Field(min_length=1)]
ReasoningEffort = Annotated[str, Field(max_length=32)]
REQUEST_ID_PATTERN = r"^[A-Za-z0-9._:/+=@-]{1,128}$"
WholeNumber = Annotated[int, BeforeValidator(_whole)]


class StrictBody(BaseModel):
    """Nothing is coerced, unknown fields are kept aside."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(StrictBody):
    """What a stream carries beside text. `include_obfuscation` pads events against eavesdroppers; nothing is padded."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class LabelledBody(StrictBody):
    """What every way to ask for text understands."""

    request_id: Annotated[str, Field(pattern=REQUEST_ID_PATTERN)] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    priority: WholeNumber | None = None
    return_route_info: bool | None = None
    service_tier: str | None = None


class OpenAIBody(LabelledBody):
    """What OpenAI keeps its books by: taken and checked, and without a meaning here."""

    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class GenerationBody(OpenAIBody):
    """What both endpoints understand."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    max_tokens: WholeNumber | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: WholeNumber | None = None
    seed: WholeNumber | None = None
    stop: Any = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # extensions
    repetition_penalty: float | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    top_k: WholeNumber | None = None
    min_p: float | None = None
    min_tokens: WholeNumber | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    response_format: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None
    speculative: bool | None = None
    prompt_logprobs: WholeNumber | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: WholeNumber | None = None
    return_token_ids: bool | None = None


class TokenizeBody(StrictBody):
    """POST /tokenize: either `prompt` or `messages`."""

    model: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(StrictBody):
    """POST /detokenize."""

    model: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    tokens: Annotated[list[int], Field(max_length=2**20)]


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Any
    logprobs: WholeNumber | None = None
    echo: bool | None = None
    best_of: WholeNumber | None = None
    add_special_tokens: bool | None = None


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Messages
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: WholeNumber | None = None
    logprobs: bool | None = None
    top_logprobs: WholeNumber | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None
    verbosity: str | None = None
    add_special_tokens: bool | None = None
