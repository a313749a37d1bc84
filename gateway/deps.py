"""What the HTTP handlers of a gateway share; built once, before the application."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web

from pdserve.control.gateway_peers import GatewayPeers
from pdserve.control.messages import NodeLoad, SpeculationCounts
from pdserve.control.quota_store import QuotaStore
from pdserve.control.response_store import ResponseStore
from pdserve.engine.sampling_defaults import SamplingDefaults
from pdserve.engine.tokenizer import Tokenizer
from pdserve.gateway.api_keys import ApiKey
from pdserve.gateway.background_responses import BackgroundResponses
from pdserve.gateway.config import HttpConfig
from pdserve.gateway.errors import AdmissionRefused
from pdserve.gateway.generation import GenerationSource
from pdserve.gateway.grammar_checker import GrammarChecker
from pdserve.gateway.metrics import GatewayMetrics
from pdserve.gateway.open_requests import OpenRequests
from pdserve.gateway.prompt_encoder import PromptEncoder
from pdserve.gateway.request_cancellation import RequestCancellation
from pdserve.gateway.request_records import AnswerRecords, RequestRecords
from pdserve.gateway.tool_syntax import ToolSyntax


class ServiceStatus(Protocol):
    """What the dispatch half knows of the service as a whole."""

    def not_ready_reason(self) -> str | None:
        """Return why no token can be produced now; None when one can."""

    def request_counts(self) -> tuple[int, int]:
        """Return how many admitted requests are running, and how many are waiting for a node."""

    def context_limit(self) -> int | None:
        """Return how many tokens the nodes can hold for one request; None without a decode node."""

    def speculation(self) -> Mapping[str, SpeculationCounts]:
        """Return what each node that speculates has drafted, by node id."""

    def loads(self) -> Mapping[str, NodeLoad]:
        """Return what each node last said of its load, by node id."""

    def malformed(self) -> Mapping[str, int]:
        """Return how many messages of each node could not be read here, by node id."""

    def retries(self) -> Mapping[str, int]:
        """Return how many attempts were made again, by cause."""

    def report(self) -> dict[str, object]:
        """Return the redis, requests, routes and nodes parts of /admin/status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """The dispatch half as HTTP needs it; it outlives the application."""

    source: GenerationSource
    status: ServiceStatus
    records: RequestRecords
    peers: GatewayPeers
    quotas: QuotaStore
    responses: ResponseStore


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayDeps:
    """Everything a handler may use."""

    config: HttpConfig
    tokenizer: Tokenizer
    source: GenerationSource
    status: ServiceStatus
    answers: AnswerRecords
    cancellation: RequestCancellation
    quotas: QuotaStore
    responses: ResponseStore
    background: BackgroundResponses
    encoder: PromptEncoder
    grammars: GrammarChecker
    metrics: GatewayMetrics
    open_requests: OpenRequests
    sampling_defaults: SamplingDefaults
    tool_syntax: ToolSyntax | None  # in which the model writes calls by itself; None: not known
    started_s: float  # time.monotonic()

    def not_ready_reason(self) -> str | None:
        """Return why this gateway should not be sent requests; None when it should."""
        return "draining" if self.open_requests.is_draining else self.status.not_ready_reason()

    def max_model_len(self) -> int | None:
        """Return the context length: the configured one, unless the nodes hold less; None if neither is known."""
        known = (self.config.max_model_len, self.status.context_limit())
        return min((limit for limit in known if limit is not None), default=None)

    def required_max_model_len(self) -> int:
        """Return the context length.

        Raises:
            AdmissionRefused: it is not known before a decode node is.
        """
        limit = self.max_model_len()
        if limit is None:
            raise AdmissionRefused("no_nodes", "no decode node is ready", 2.0)
        return limit


DEPS = web.AppKey("deps", GatewayDeps)
CALLER: web.RequestKey[ApiKey | None] = web.RequestKey("caller", ApiKey)
REQUEST_ID = web.RequestKey("request_id", str)
