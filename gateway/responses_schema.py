"""The body of POST /v1/responses, as OpenAI's clients send it."""

from typing import Annotated, Any

from pydantic import Field

from pdserve.gateway.schemas import OpenAIBody, StreamOptions, WholeNumber


class InputTokensBody(OpenAIBody):
    """POST /v1/responses/input_tokens: what a response would be computed from."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    input: Any
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=128)] | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    truncation: str | None = None


class ResponsesBody(InputTokensBody):
    """POST /v1/responses."""

    max_output_tokens: Annotated[WholeNumber, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    background: bool | None = None
    include: list[str] | None = None
    top_logprobs: WholeNumber | None = None
    max_tool_calls: Annotated[WholeNumber, Field(ge=1)] | None = None  # of tools that a server runs; there are none
    top_k: WholeNumber | None = None
    seed: WholeNumber | None = None
