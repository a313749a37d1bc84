"""The JSON of everything but OpenAI's completions and chats; /openapi.json describes answers by these types."""

from typing import (
    Any,
    Literal,
    NotRequired,  # pydantic reads those of `typing` from Python 3.12 on only
)

from typing_extensions import TypedDict

from pdserve.gateway.reply_types import CachedTokens, ReasoningTokens, RouteReply, TokenWithTop

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class TextBlock(TypedDict):
    """Text for the user."""

    type: Literal["text"]
    text: str


class ThinkingBlock(TypedDict):
    """What the model thought."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(TypedDict):
    """One call; `input` is empty if it was cut."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(TypedDict):
    """Cached tokens are not among the input tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageReply(TypedDict):
    """A whole answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage
    route_info: NotRequired[list[RouteReply]]


class NamedEvent(TypedDict, extra_items=Any):  # type: ignore[call-arg]  # mypy does not know it yet
    """One event of a streamed message or response, by its type."""

    type: str


class CountedTokens(TypedDict):
    """The length of a prompt."""

    input_tokens: int
    object: NotRequired[Literal["response.input_tokens"]]


class OutputText(TypedDict):
    """The text of a message of a response."""

    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[TokenWithTop]


class ReasoningText(TypedDict):
    """The text of thoughts."""

    type: Literal["reasoning_text"]
    text: str


class MessageItem(TypedDict):
    """A message of a response."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(TypedDict):
    """Thoughts."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[dict[str, Any]]
    content: list[ReasoningText]


class FunctionCallItem(TypedDict):
    """A call."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class ResponseError(TypedDict):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(TypedDict):
    """Why a response was cut."""

    reason: Literal["max_output_tokens"]


class ResponseReasoning(TypedDict):
    """What was asked of reasoning."""

    effort: str | None
    summary: None


class ResponseUsage(TypedDict):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseReply(TypedDict):
    """A response, finished or not."""

    id: str
    object: Literal["response"]
    created_at: int
    status: ResponseStatus
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[MessageItem | ReasoningItem | FunctionCallItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ResponseReasoning
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float
    top_logprobs: int
    truncation: str
    usage: ResponseUsage | None
    user: str | None
    route_info: NotRequired[list[RouteReply]]


class DeletedResponse(TypedDict):
    """A response that is forgotten."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(TypedDict):
    """What a response answered, as items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class RenderedPrompt(TypedDict):
    """A prompt as it would be computed."""

    prompt: str
    prompt_token_ids: list[int]
    max_tokens: int


class RenderedPrompts(TypedDict):
    """All prompts of a body."""

    object: Literal["prompt.list"]
    model: str
    data: list[RenderedPrompt]


class Tokenized(TypedDict):
    """Token ids of a text."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: NotRequired[list[str]]


class Detokenized(TypedDict):
    """The text of token ids."""

    prompt: str


class StoryEntry(TypedDict):
    """One step of a request."""

    at_ms: int
    status: str
    note: str


class RequestChoice(TypedDict):
    """What is known of one choice."""

    index: int
    status: str
    gateway_id: str
    route: str | None
    prefill_node_id: str | None
    decode_node_id: str | None
    num_attempts: int | None
    num_prompt_tokens: int
    num_output_tokens: int | None
    finish_reason: str | None
    error_code: str | None
    created_ms: int
    updated_ms: int
    story: list[StoryEntry]


class RequestReply(TypedDict):
    """State, route and story of a request."""

    id: str
    object: Literal["request"]
    status: str
    choices: list[RequestChoice]


class CancelledRequest(TypedDict):
    """The state that a request has reached, and whether that is cancelled."""

    id: str
    object: Literal["request"]
    cancelled: bool
    status: str


class ModelCard(TypedDict):
    """One served name, in the fields of OpenAI's models and of Anthropic's at once."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int | None
    type: Literal["model"]
    display_name: str
    created_at: str
    max_input_tokens: int | None


class ModelList(TypedDict):
    """All served names, on one page."""

    object: Literal["list"]
    data: list[ModelCard]
    has_more: Literal[False]
    first_id: str
    last_id: str


class Alive(TypedDict):
    """The process lives, or can serve."""

    status: Literal["ok", "ready"]


class VersionReply(TypedDict):
    """The version of the server."""

    version: str


class RedisReply(TypedDict):
    """Whether Redis answers, and how fast."""

    ok: bool
    latency_ms: float | None


class StatusReply(TypedDict):
    """What the gateway knows of itself, of requests and nodes."""

    version: str
    ready: bool
    not_ready_reason: str | None
    uptime_s: float
    open_requests: int
    redis: RedisReply
    requests: dict[str, int]
    routes: dict[str, int]
    nodes: list[dict[str, Any]]
    attempts: NotRequired[int]
    retries: NotRequired[dict[str, int]]
    record_changes_dropped: NotRequired[int]
