"""The generation endpoints: plan, admit, answer whole or as a stream, end in exactly one way."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from aiohttp import web

from pdserve.control.errors import RedisUnavailable
from pdserve.control.response_store import StoredResponse
from pdserve.engine.tokenizer import Tokenizer
from pdserve.gateway.api_keys import ApiKey
from pdserve.gateway.background_responses import BackgroundJob
from pdserve.gateway.best_choices import best_choices
from pdserve.gateway.chat import plan_chat
from pdserve.gateway.choice_text import ChoicePiece
from pdserve.gateway.completions import plan_completion
from pdserve.gateway.deps import CALLER, DEPS, REQUEST_ID, GatewayDeps
from pdserve.gateway.error_responses import error_reply, json_response
from pdserve.gateway.event_stream import EventStream
from pdserve.gateway.generation_plan import Endpoint, GenerationPlan
from pdserve.gateway.messages_format import MessagesFormat
from pdserve.gateway.messages_plan import plan_messages
from pdserve.gateway.messages_schema import MessagesBody
from pdserve.gateway.open_requests import ClientGone
from pdserve.gateway.quotas import ChargedRequest, charged
from pdserve.gateway.reply_format import OpenAIFormat, ReplyFormat
from pdserve.gateway.reply_shapes import merged
from pdserve.gateway.request_body import read_body
from pdserve.gateway.responses_format import ResponsesFormat
from pdserve.gateway.responses_plan import plan_response
from pdserve.gateway.responses_schema import ResponsesBody
from pdserve.gateway.running_choices import RunningChoices, running_choices
from pdserve.gateway.schemas import ChatBody, CompletionBody, GenerationBody, LabelledBody
from pdserve.gateway.stream_event import AnyEvent
from pdserve.gateway.unsupported_fields import warning_header

logger = logging.getLogger(__name__)

_CLIENT_CLOSED_REQUEST = 499  # nginx's number; nobody is there to read it, the access log is

Body = TypeVar("Body", bound=LabelledBody)
BodyIn = TypeVar("BodyIn", bound=LabelledBody, contravariant=True)


class FormatOf(Protocol[BodyIn]):
    """Makes the format of one answer."""

    def __call__(self, plan: GenerationPlan, body: BodyIn, tokenizer: Tokenizer) -> ReplyFormat: ...


@dataclass(frozen=True, slots=True)
class GenerationKind(Generic[Body]):
    """One way to ask for text: what its body looks like, what it asks for, and how it is answered."""

    endpoint: Endpoint
    body: type[Body]
    plan: Callable[[Body, GatewayDeps], Awaitable[GenerationPlan]]
    format: FormatOf[Body]


def _openai(plan: GenerationPlan, body: GenerationBody, tokenizer: Tokenizer) -> OpenAIFormat:
    return OpenAIFormat(plan, tokenizer)


_COMPLETIONS = GenerationKind(Endpoint.COMPLETIONS, CompletionBody, plan_completion, _openai)
_CHAT = GenerationKind(Endpoint.CHAT, ChatBody, plan_chat, _openai)
_MESSAGES = GenerationKind(
    Endpoint.MESSAGES, MessagesBody, plan_messages, lambda plan, body, tokenizer: MessagesFormat(plan)
)
_RESPONSES = GenerationKind(
    Endpoint.RESPONSES,
    ResponsesBody,
    plan_response,
    ResponsesFormat,
)


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    return await _generate(request, _COMPLETIONS)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    return await _generate(request, _CHAT)


async def messages(request: web.Request) -> web.StreamResponse:
    """POST /v1/messages, Anthropic's protocol."""
    return await _generate(request, _MESSAGES)


async def create_response(request: web.Request) -> web.StreamResponse:
    """POST /v1/responses."""
    return await _generate(request, _RESPONSES)


async def _generate(request: web.Request, kind: GenerationKind[Body]) -> web.StreamResponse:
    """Answer `request`. An error before the first byte is a plain HTTP error, after it an event."""
    deps = request.app[DEPS]
    stream = EventStream(request, deps.config.slow_client_timeout_s)
    reply: ReplyFormat | None = None
    try:
        with deps.metrics.request(kind.endpoint):
            async with deps.open_requests.scope(request) as scope:
                body = await read_body(request, kind.body)
                headers = warning_header(body.model_extra or {}, deps.config)
                if body.request_id is not None:
                    request[REQUEST_ID] = body.request_id
                plan = await kind.plan(body, deps)
                reply = kind.format(plan, body, deps.tokenizer)
                scope.response_id = plan.response_id
                _log(plan, request[REQUEST_ID])
                if isinstance(reply, ResponsesFormat) and reply.is_background:
                    queued = await deps.background.start(_job(plan, reply, deps, request[CALLER]))
                    return json_response(queued, headers=headers)
                async with charged(deps.quotas, request[CALLER], plan.response_id, plan.num_charged_tokens) as charge:
                    if not plan.reply.is_stream:
                        format_of = partial(kind.format, body=body, tokenizer=deps.tokenizer)
                        return await _answer_whole(plan, format_of, deps, headers, charge)
                    closing = await _answer_stream(plan, reply, deps, stream, headers, charge)
                await _keep(reply, deps)
                await stream.send(*closing)
    except ClientGone:
        return stream.abort() if stream.is_open else web.Response(status=_CLIENT_CLOSED_REQUEST)
    except Exception as error:
        if not stream.is_open or reply is None:
            raise
        try:
            await stream.send(*reply.failure(error_reply(error, request[REQUEST_ID])))
        except ClientGone:
            return stream.abort()
    return await stream.close()


async def _answer_whole(
    plan: GenerationPlan,
    format_of: Callable[[GenerationPlan], ReplyFormat],
    deps: GatewayDeps,
    headers: dict[str, str],
    charge: ChargedRequest,
) -> web.Response:
    plan, choices, running = await _collect(plan, deps, charge)
    reply = format_of(plan)
    body = reply.whole(choices, running)
    await _keep(reply, deps)
    return json_response(body, headers={**headers, **charge.headers, "x-pdserve-route": running.route()})


async def _collect(
    plan: GenerationPlan, deps: GatewayDeps, charge: ChargedRequest
) -> tuple[GenerationPlan, list[ChoicePiece], RunningChoices]:
    """Return the choices that are shown, each in one piece, and the plan of those."""
    pieces: list[list[ChoicePiece]] = [[] for _ in range(plan.num_choices * len(plan.prompts))]
    async with running_choices(plan, deps.source, deps.tokenizer, deps.metrics) as running, charge.following(running):
        await running.follow(_Kept(pieces))
    plan, choices = best_choices(plan, [merged(of_choice) for of_choice in pieces])
    _count(running, choices, deps)
    return plan, choices, running


def _job(plan: GenerationPlan, reply: ResponsesFormat, deps: GatewayDeps, caller: ApiKey | None) -> BackgroundJob:
    async def work() -> StoredResponse:
        with deps.metrics.request(plan.endpoint):
            async with (
                deps.open_requests.scope(None) as scope,
                charged(deps.quotas, caller, plan.response_id, plan.num_charged_tokens) as charge,
            ):
                scope.response_id = plan.response_id
                _, choices, running = await _collect(plan, deps, charge)
        reply.whole(choices, running)
        assert reply.final is not None
        return reply.final

    return BackgroundJob(plan.response_id, work, reply.shown, reply.failed)


async def _keep(reply: ReplyFormat, deps: GatewayDeps) -> None:
    """Store a response that is to be stored; the answer itself does not depend on it."""
    if not isinstance(reply, ResponsesFormat) or reply.final is None or not reply.is_stored:
        return
    response_id = reply.final.response["id"]
    try:
        if not await deps.responses.put(response_id, reply.final):
            logger.warning("it is too large to be stored", extra={"request_id": response_id})
    except RedisUnavailable as error:
        logger.warning("it is not stored: %s", error, extra={"request_id": response_id})


async def _answer_stream(
    plan: GenerationPlan,
    reply: ReplyFormat,
    deps: GatewayDeps,
    stream: EventStream,
    headers: dict[str, str],
    charge: ChargedRequest,
) -> Sequence[AnyEvent]:
    """Send everything up to the last piece, and return the events that close the stream."""
    last_pieces: list[ChoicePiece] = []
    async with running_choices(plan, deps.source, deps.tokenizer, deps.metrics) as running, charge.following(running):
        planned = running.planned_route()
        await stream.open({**headers, **charge.headers, **({"x-pdserve-route": planned} if planned else {})})
        await stream.send(*reply.opening(running))
        with stream.kept_alive(deps.config.keep_alive_s):
            await running.follow(_Streamed(stream, reply, running, last_pieces))
    _count(running, last_pieces, deps)
    return reply.closing(running)


@dataclass(frozen=True, slots=True)
class _Kept:
    """Keeps the pieces of each choice for a whole answer."""

    pieces: list[list[ChoicePiece]]

    def show(self, piece: ChoicePiece) -> bool:
        self.pieces[piece.index].append(piece)
        return False

    async def caught_up(self) -> None:
        """Nobody is ever behind."""


@dataclass(frozen=True, slots=True)
class _Streamed:
    """Streams pieces as events, and keeps the last of each choice."""

    stream: EventStream
    reply: ReplyFormat
    running: RunningChoices
    last_pieces: list[ChoicePiece]

    def show(self, piece: ChoicePiece) -> bool:
        if piece.finish_reason is not None:
            self.last_pieces.append(piece)
        return self.stream.write(*self.reply.events(piece, self.running))

    async def caught_up(self) -> None:
        await self.stream.caught_up()


def _count(running: RunningChoices, last_pieces: list[ChoicePiece], deps: GatewayDeps) -> None:
    deps.metrics.answered(running.usage(), running.stats())
    for piece in last_pieces:
        assert piece.finish_reason is not None
        deps.metrics.choice_finished(piece.finish_reason)


def _log(plan: GenerationPlan, request_id: str) -> None:
    """Join the client's label to the id under which the nodes and the records know the request."""
    logger.info(
        "%s: %d prompt tokens, %d choices",
        plan.response_id,
        plan.num_prompt_tokens,
        len(plan.prompts) * plan.num_choices,
        extra={"request_id": request_id},
    )
