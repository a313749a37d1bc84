"""The JSON of completions and chat completions, whole and in chunks; /openapi.json describes answers by these types."""

from typing import (
    Literal,
    NotRequired,  # pydantic reads those of `typing` from Python 3.12 on only
)

from typing_extensions import TypedDict

CompletionReason = Literal["stop", "length"]
ChatReason = Literal["stop", "length", "tool_calls"]


class CachedTokens(TypedDict):
    """Of a prompt."""

    cached_tokens: int


class ReasoningTokens(TypedDict):
    """Of an answer."""

    reasoning_tokens: int


class UsageReply(TypedDict):
    """Tokens of a whole request; each prompt is counted once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: NotRequired[ReasoningTokens]


class StagesReply(TypedDict):
    """Milliseconds from admission to each stage; null for one that did not happen."""

    admitted: float | None
    prefilling: float | None
    transferring: float | None
    first_token: float | None
    decoding: float | None
    ended: float | None


class RouteReply(TypedDict):
    """How one choice was made."""

    index: int
    route: Literal["disaggregated", "local", "migrated"] | None
    prefill_node_id: str | None
    decode_node_id: str | None
    num_attempts: int
    cached_tokens: int | None
    seed: int
    stages_ms: StagesReply


class ScoredToken(TypedDict):
    """One token of a prompt, or an alternative to it."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptScores = list[dict[str, ScoredToken] | None]


class CompletionLogprobsReply(TypedDict):
    """Four lists of one length; an echoed prompt's first token has null in two of them."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One choice of a completion, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobsReply | None
    finish_reason: CompletionReason | None
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptScores]


class CompletionReply(TypedDict):
    """A whole answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageReply
    route_info: NotRequired[list[RouteReply]]


class TokenEntry(TypedDict):
    """One token with its logprob and bytes."""

    token: str
    logprob: float
    bytes: list[int]


class TokenWithTop(TokenEntry):
    """A token of an answer and its likeliest alternatives."""

    top_logprobs: list[TokenEntry]


class ChatLogprobsReply(TypedDict):
    """Of each token of an answer."""

    content: list[TokenWithTop]
    refusal: None


class FunctionReply(TypedDict):
    """A function to be called; arguments are JSON text unless the answer was cut."""

    name: str
    arguments: str


class ToolCallReply(TypedDict):
    """One call."""

    id: str
    type: Literal["function"]
    function: FunctionReply


class ChatMessageReply(TypedDict):
    """What the model answered."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: NotRequired[str | None]
    reasoning: NotRequired[str | None]
    tool_calls: NotRequired[list[ToolCallReply]]
    refusal: None


class ChatChoice(TypedDict):
    """One finished choice of a chat."""

    index: int
    message: ChatMessageReply
    logprobs: ChatLogprobsReply | None
    finish_reason: ChatReason | None
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class ChatReply(TypedDict):
    """A whole answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply
    prompt_logprobs: NotRequired[PromptScores]
    route_info: NotRequired[list[RouteReply]]


class FunctionDelta(TypedDict):
    """What is new of a call; the name comes once."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """Id and type come with the name."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class ChatDelta(TypedDict):
    """What is new of a choice of a chat."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChatChunkChoice(TypedDict):
    """One choice in a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobsReply | None
    finish_reason: ChatReason | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class CompletionChunk(TypedDict):
    """One event of a streamed completion; the last ones may have no choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[UsageReply | None]
    route_info: NotRequired[list[RouteReply]]


class ChatChunk(TypedDict):
    """One event of a streamed chat; the last ones may have no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[UsageReply | None]
    route_info: NotRequired[list[RouteReply]]
