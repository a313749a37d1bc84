"""The load generator: streams completions from any OpenAI-compatible server and notes when each event came.

Knows HTTP and the clock only: nothing here depends on who serves.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from pdserve.cli.errors import CliError
from pdserve.cli.load_plan import PlannedRequest

_CONNECT_TIMEOUT_S = 10.0
_MAX_EVENT_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Target:
    """The server under load."""

    url: str
    model: str | None = None
    api_key: str | None = None
    request_timeout_s: float = 600.0


@dataclass(slots=True)
class StreamRecord:
    """What was seen of one request. Times are of the monotonic clock; `events` holds (time, tokens in the event).

    `sent_at` is when the request was due: a generator that runs late does not flatter the server.
    """

    num_prompt: int
    num_asked: int
    sent_at: float = 0.0
    ended_at: float = 0.0
    events: list[tuple[float, int]] = field(default_factory=list)
    usage_output: int | None = None
    usage_cached: int | None = None
    error: str | None = None

    @classmethod
    def of(cls, request: PlannedRequest) -> "StreamRecord":
        """Return the record of a request that was not sent yet."""
        return cls(len(request.prompt), request.num_output)

    @property
    def has_ended(self) -> bool:
        """Whether its answer, or its failure, is complete."""
        return self.ended_at > 0.0

    @property
    def num_output(self) -> int:
        """Tokens that came: by the server's usage where it tells one, else as counted in the events."""
        counted = sum(count for _, count in self.events)
        return counted if self.usage_output is None else self.usage_output


class LoadClient:
    """One HTTP session to one server."""

    def __init__(self, session: aiohttp.ClientSession, target: Target, model: str) -> None:
        self._session = session
        self._target = target
        self.model = model

    @classmethod
    @asynccontextmanager
    async def open(cls, target: Target) -> AsyncIterator["LoadClient"]:
        """Connect; without a model in `target` the first that the server lists is asked for.

        Raises:
            CliError: the server does not answer, or lists no model.
        """
        timeout = aiohttp.ClientTimeout(total=target.request_timeout_s, sock_connect=_CONNECT_TIMEOUT_S)
        headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
        # The plan bounds what is open. Connections are not kept: servers end idle ones at any time, also just when the
        # next request is written.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(
            timeout=timeout, headers=headers, connector=connector, read_bufsize=_MAX_EVENT_BYTES
        ) as session:
            yield cls(session, target, target.model or await _first_model(session, target.url))

    async def run(self, plan: Sequence[PlannedRequest], concurrency: int | None = None) -> list[StreamRecord]:
        """Send every request of `plan`; return their records in its order.

        With `concurrency` the loop is closed: so many are open at a time. Without, each is sent when it arrives.
        """
        records = [StreamRecord.of(request) for request in plan]
        await self.fill(records, plan, concurrency)
        return records

    async def fill(
        self, records: Sequence[StreamRecord], plan: Sequence[PlannedRequest], concurrency: int | None
    ) -> None:
        """Do as `run`; who is cancelled has the records of what was done until then."""
        started_at = time.monotonic()
        waiting = iter(zip(plan, records, strict=True))
        async with asyncio.TaskGroup() as tasks:
            if concurrency is not None:
                for index in range(min(concurrency, len(plan))):
                    tasks.create_task(self._work_off(waiting), name=f"load {index}")
            else:
                for index, (request, record) in enumerate(waiting):
                    due_at = started_at + (request.arrives_at_s or 0.0)
                    tasks.create_task(self._send_when_due(request, record, due_at), name=f"load {index}")

    async def _work_off(self, waiting: Iterator[tuple[PlannedRequest, StreamRecord]]) -> None:
        for request, record in waiting:
            record.sent_at = time.monotonic()
            await self.stream(request, record)

    async def _send_when_due(self, request: PlannedRequest, record: StreamRecord, due_at: float) -> None:
        await asyncio.sleep(due_at - time.monotonic())
        record.sent_at = due_at
        await self.stream(request, record)

    async def stream(self, request: PlannedRequest, record: StreamRecord) -> None:
        """Send one request and fill its record as it goes; a failure is noted there and is no reason to stop."""
        try:
            async with self._session.post(f"{self._target.url}/v1/completions", json=self._body(request)) as reply:
                if reply.status != 200:
                    record.error = f"{reply.status}: {(await reply.text())[:300]}"
                else:
                    async for line in reply.content:
                        _note(record, line)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            record.error = f"{type(error).__name__}: {error}"
        record.ended_at = time.monotonic()
        if record.error is None and record.num_output != request.num_output:
            record.error = f"{record.num_output} tokens came, {request.num_output} were asked for"

    def _body(self, request: PlannedRequest) -> dict[str, object]:
        return {
            "model": self.model,
            "prompt": list(request.prompt),
            "max_tokens": request.num_output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,  # pdserve and vLLM; others leave it aside and are counted by event and usage
        }


def _note(record: StreamRecord, line: bytes) -> None:
    """Take one line of the event stream.

    Raises:
        ValueError: it is no event of this API.
    """
    if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
        return
    now = time.monotonic()
    event: Any = json.loads(line.removeprefix(b"data:"))
    if not isinstance(event, dict):
        raise ValueError("an event is not an object")
    try:
        _note_event(record, event, now)
    except (AttributeError, TypeError) as error:
        raise ValueError(f"an event is of another form: {error}") from error


def _note_event(record: StreamRecord, event: dict[str, Any], now: float) -> None:
    if event.get("error"):
        record.error = f"error in the stream: {str(event['error'])[:300]}"
        return
    num_tokens = sum(_tokens_in(choice) for choice in event.get("choices") or ())
    if num_tokens:
        record.events.append((now, num_tokens))
    usage = event.get("usage")
    if usage:
        record.usage_output = usage.get("completion_tokens")
        record.usage_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


def _tokens_in(choice: dict[str, Any]) -> int:
    """Return the tokens of a choice: as listed, else one if it has text."""
    token_ids = choice.get("token_ids")
    return len(token_ids) if token_ids is not None else int(bool(choice.get("text")))


async def _first_model(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(f"{url}/v1/models") as reply:
            listed: Any = await reply.json()
            return str(listed["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, IndexError, TypeError) as error:
        raise CliError(
            f"{url}/v1/models names no model ({type(error).__name__}: {error}); is the server running? Or give --model"
        ) from error
