"""A gateway on a real port over a scripted source of tokens: the other implementation of `GenerationSource`."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import aiohttp
import pytest
from aiohttp import web

from pdserve.control.gateway_peers import GatewayPeers
from pdserve.control.keyspace import Keyspace
from pdserve.control.messages import FinishReason, NodeLoad, SpeculationCounts, TokenLogprobs
from pdserve.control.quota_store import QuotaStore
from pdserve.control.redis_connection import connect
from pdserve.control.request_state import RequestRecord
from pdserve.control.response_store import ResponseStore
from pdserve.engine.sampling_defaults import SamplingDefaults
from pdserve.engine.tokenizer import Tokenizer
from pdserve.gateway.app import create_app
from pdserve.gateway.config import HttpConfig
from pdserve.gateway.deps import DEPS, Backend
from pdserve.gateway.generation import (
    GenerationEvent,
    GenerationRequest,
    GenerationStats,
    Route,
    StageTimings,
)
from pdserve.gateway.http_server import listening
from pdserve.gateway.request_records import RequestRecords

MODEL = "org/demo"


@dataclass
class Script:
    """What the source answers: these ids, `chunk` at a time, then EOS; gates let a test hold it at a point.

    `answer` gives the ids by the request; `fail_after` raises `failure` behind that many tokens.
    """

    answer: Callable[[GenerationRequest], list[int]]
    chunk: int = 1
    fail_after: int | None = None
    failure: Exception | None = None
    refusal: Exception | None = None
    admit: asyncio.Event = field(default_factory=asyncio.Event)
    proceed: asyncio.Event = field(default_factory=asyncio.Event)
    hold_after: int | None = None
    is_endless: bool = False
    num_cached_tokens: int = 3
    logprob: Callable[[GenerationRequest], float] = lambda request: -0.5
    planned: Route | None = Route.LOCAL

    def __post_init__(self) -> None:
        self.admit.set()
        self.proceed.set()


class ScriptedGeneration:
    """One scripted generation; remembers how it ended."""

    def __init__(self, request: GenerationRequest, script: Script, eos: int) -> None:
        self.request = request
        self.ended: str | None = None
        self.num_sent = 0
        self._script = script
        self._ids = script.answer(request)
        self._eos = eos

    @property
    def stats(self) -> GenerationStats:
        return GenerationStats(
            Route.DISAGGREGATED,
            "prefill-0",
            "decode-0",
            self.request.sampling.seed or 0,
            1,
            self.num_sent,
            self._script.num_cached_tokens if self.num_sent else None,
            StageTimings(first_token_ms=5.0 if self.num_sent else None),
        )

    def planned_route(self) -> Route | None:
        return self._script.planned

    async def finish_early(self, reason: FinishReason) -> None:
        self.ended = self.ended or f"early {reason}"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, exc_type, exc, traceback) -> None:
        self.ended = self.ended or "cancelled"

    async def follow(self, take: Callable[[GenerationEvent], bool]) -> None:
        while self.ended is None:
            if take(await self._next()):
                return

    async def _next(self) -> GenerationEvent:
        script, sampling = self._script, self.request.sampling
        await asyncio.sleep(0)
        if script.hold_after is not None and self.num_sent >= script.hold_after:
            await script.proceed.wait()
        if script.fail_after is not None and self.num_sent >= script.fail_after:
            self.ended = "failed"
            assert script.failure is not None
            raise script.failure
        ids = (self._ids * 50 if script.is_endless else [*self._ids, self._eos])[self.num_sent :]
        room = sampling.max_tokens - self.num_sent
        sent = (ids if not script.is_endless else ids or self._ids)[: min(script.chunk, room)]
        start, self.num_sent = self.num_sent, self.num_sent + len(sent)
        reason = None
        if self._eos in sent:
            reason = FinishReason.STOP
        elif self.num_sent == sampling.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self.ended = f"finished {reason}"
        return GenerationEvent(start, tuple(sent), self._logprobs(sent), reason, self._prompt_logprobs(start))

    def _prompt_logprobs(self, start: int) -> tuple[TokenLogprobs, ...] | None:
        """Prompt token number i has the logprob -i and the ids 40, 41, ... beside it."""
        k = self.request.sampling.prompt_logprobs
        if k is None or start > 0:
            return None
        top = tuple((40 + rank, -0.25 - rank) for rank in range(k))
        return tuple(TokenLogprobs(-float(i), top) for i in range(1, len(self.request.prompt_token_ids)))

    def _logprobs(self, sent: list[int]) -> tuple[TokenLogprobs, ...] | None:
        k = self.request.sampling.logprobs
        if k is None:
            return None
        logprob = self._script.logprob(self.request)
        ranked = [[(token_id, logprob), *((other, -1.5 - other) for other in range(40, 60))][:k] for token_id in sent]
        return tuple(TokenLogprobs(logprob, tuple(top)) for top in ranked)


class ScriptedSource:
    """Starts scripted generations and keeps them for the test to look at."""

    def __init__(self, script: Script, eos: int) -> None:
        self.script = script
        self.started: list[ScriptedGeneration] = []
        self.has_started = asyncio.Event()
        self.num_abandoned = 0  # cancelled while waiting for admission
        self._eos = eos

    async def start_branches(self, requests: Sequence[GenerationRequest]) -> list[ScriptedGeneration]:
        try:
            await self.script.admit.wait()
        except asyncio.CancelledError:
            self.num_abandoned += 1
            raise
        if self.script.refusal is not None:
            raise self.script.refusal
        generations = [ScriptedGeneration(request, self.script, self._eos) for request in requests]
        self.started.extend(generations)
        self.has_started.set()
        return generations


class FixedStatus:
    """The service as a test wants it to be."""

    reason: str | None = None

    def not_ready_reason(self) -> str | None:
        return self.reason

    limit: int | None = None
    counts: tuple[int, int] = (0, 0)

    def request_counts(self) -> tuple[int, int]:
        return self.counts

    def context_limit(self) -> int | None:
        return self.limit

    drafted: Mapping[str, SpeculationCounts] = {}

    def speculation(self) -> Mapping[str, SpeculationCounts]:
        return self.drafted

    last_loads: Mapping[str, NodeLoad] = {}

    def loads(self) -> Mapping[str, NodeLoad]:
        return self.last_loads

    last_malformed: Mapping[str, int] = {}
    last_retries: Mapping[str, int] = {}

    def malformed(self) -> Mapping[str, int]:
        return self.last_malformed

    def retries(self) -> Mapping[str, int]:
        return self.last_retries

    def report(self) -> dict[str, object]:
        return {"nodes": [], "routes": {}, "requests": {}, "redis": {"ok": True, "latency_ms": 0.1}}


@dataclass
class KnownRecords:
    """Records as a test puts them there."""

    by_id: dict[str, RequestRecord]

    async def get(self, request_id: str) -> RequestRecord | None:
        return self.by_id.get(request_id)


@dataclass
class RunningGateway:
    """A gateway that listens, and what stands behind it."""

    url: str
    source: ScriptedSource
    status: FixedStatus
    tokenizer: Tokenizer
    app: web.Application
    session: aiohttp.ClientSession
    records: dict[str, RequestRecord]

    @property
    def script(self) -> Script:
        return self.source.script

    @property
    def open_requests(self):
        return self.app[DEPS].open_requests

    def say(self, text: str, **fields) -> None:
        """Answer every request with `text`."""
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        self.source.script = Script(answer=lambda request: token_ids, **fields)

    def say_ids(self, token_ids: list[int], **fields) -> None:
        self.source.script = Script(answer=lambda request: token_ids, **fields)

    async def post(self, path: str, body: object, **options) -> tuple[int, dict, aiohttp.ClientResponse]:
        """Return status, JSON and response of a request that is not a stream."""
        content = io.BytesIO(json.dumps(body).encode())
        async with self.session.post(self.url + path, data=content, **options) as response:
            return response.status, await response.json(), response


def unreachable_quotas() -> QuotaStore:
    """Quotas for gateways whose keys have no limits: nothing is ever asked of them."""
    return QuotaStore(connect("redis://127.0.0.1:1"), Keyspace("none"), 60.0)


def unreachable_responses() -> ResponseStore:
    """A store for gateways of which no response is asked."""
    return ResponseStore(connect("redis://127.0.0.1:1"), Keyspace("none"), 60.0)


def unreachable_peers() -> GatewayPeers:
    """For a gateway that is alone."""
    return GatewayPeers(connect("redis://127.0.0.1:1"), Keyspace("none"), "gateway-alone")


@pytest.fixture(scope="session")
def demo_tokenizer(demo_model_dir: Path) -> Tokenizer:
    return Tokenizer.load(demo_model_dir)


@pytest.fixture
def bos_tokenizer(tmp_path: Path, demo_model_dir: Path) -> Tokenizer:
    """The demo tokenizer, if it began every text with a token."""
    for file in (*demo_model_dir.glob("*.json"), *demo_model_dir.glob("*.jinja")):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    content = json.loads((tmp_path / "tokenizer.json").read_bytes())
    begin = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [begin, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    return Tokenizer.load(tmp_path)


@pytest.fixture
async def start_gateway(demo_tokenizer: Tokenizer) -> AsyncIterator[Callable]:
    """Return a function that starts a gateway with changes to its configuration."""
    async with AsyncExitStack() as stack:

        async def start(
            handler_cancellation: bool = False,
            defaults: SamplingDefaults | None = None,
            quotas: QuotaStore | None = None,
            tokenizer: Tokenizer = demo_tokenizer,
            responses: ResponseStore | None = None,
            records: RequestRecords | None = None,
            peers: GatewayPeers | None = None,
            **changes,
        ) -> RunningGateway:
            config = replace(HttpConfig(model_names=(MODEL,), port=0, max_model_len=256, keep_alive_s=5.0), **changes)
            source = ScriptedSource(Script(answer=lambda request: []), min(tokenizer.eos_token_ids))
            status = FixedStatus()
            known: dict[str, RequestRecord] = {}
            backend = Backend(
                source=source,
                status=status,
                records=records or KnownRecords(known),
                peers=peers or unreachable_peers(),
                quotas=quotas or unreachable_quotas(),
                responses=responses or unreachable_responses(),
            )
            app = create_app(config, tokenizer, backend, defaults or SamplingDefaults())
            url = await stack.enter_async_context(listening(app, config, handler_cancellation))
            session = await stack.enter_async_context(aiohttp.ClientSession())
            gateway = RunningGateway(url, source, status, tokenizer, app, session, known)
            gateway.say("Hello there, friend!")
            return gateway

        yield start


@pytest.fixture
async def gateway(start_gateway: Callable) -> RunningGateway:
    return await start_gateway()
