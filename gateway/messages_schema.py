"""The body of POST /v1/messages, as Anthropic's clients send it."""

from typing import Annotated, Any, Literal

from pydantic import Field

from pdserve.gateway.schemas import LabelledBody, StrictBody, WholeNumber


class Metadata(StrictBody):
    """Who asks; without a meaning here."""

    user_id: str | None = None


class Thinking(StrictBody):
    """Leave to think; the budget is not kept."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[WholeNumber, Field(ge=1)] | None = None


class CountTokensBody(StrictBody):
    """POST /v1/messages/count_tokens: what a message would be computed from."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None


class MessagesBody(CountTokensBody, LabelledBody):
    """POST /v1/messages."""

    max_tokens: Annotated[WholeNumber, Field(ge=1)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: float | None = None
    top_k: WholeNumber | None = None
    metadata: Metadata | None = None
