"""What the gateway counts, in a registry of its own. Nothing here raises into the path of a request.

Names that dashboards of vLLM know are used where they mean the same; the rest starts with `pdserve_`.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pdserve.control.messages import SpeculationCounts
from pdserve.engine.errors import InvalidRequest
from pdserve.gateway.error_responses import HttpError
from pdserve.gateway.errors import AdmissionRefused
from pdserve.gateway.generation import GenerationStats
from pdserve.gateway.generation_plan import Endpoint
from pdserve.gateway.open_requests import ClientGone
from pdserve.gateway.reply_shapes import Usage
from pdserve.gateway.token_times import TokenTimes

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_INTER_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_E2E_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


_SPECULATION_LABELS = ("node_id", "method")


class Outcome(StrEnum):
    """How a request ended; the counts of all outcomes add up to the requests."""

    OK = "ok"
    INVALID = "invalid"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    FAILED = "failed"


class GatewayMetrics:
    """Owns the registry that /metrics shows."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "pdserve_requests", "Generation requests that ended", ["endpoint", "outcome"], registry=registry
        )
        self._responses = Counter("pdserve_http_responses", "HTTP responses", ["status"], registry=registry)
        self._open = Gauge("pdserve_open_requests", "Generation requests being answered", registry=registry)
        self._ready = Gauge("pdserve_ready", "1 if a token can be produced now", registry=registry)
        self._running = Gauge("vllm:num_requests_running", "Choices that a node works on", registry=registry)
        self._waiting = Gauge("vllm:num_requests_waiting", "Choices waiting for a node", registry=registry)
        self._routes = Counter(
            "pdserve_routes",
            "Finished choices by the way their tokens were made",
            ["route"],
            registry=registry,
        )
        self._cached_tokens = Counter(
            "pdserve_cached_prompt_tokens", "Prompt tokens that were not computed", registry=registry
        )
        self._prompt_tokens = Counter("vllm:prompt_tokens", "Prompt tokens of answered requests", registry=registry)
        self._output_tokens = Counter("vllm:generation_tokens", "Tokens generated", registry=registry)
        self._success = Counter("vllm:request_success", "Choices that finished", ["finished_reason"], registry=registry)
        self._ttft = _histogram("time_to_first_token", "Time to first token", _TTFT_BUCKETS, registry)
        self._queue = _histogram("request_queue_time", "Time in a node before computation", _TTFT_BUCKETS, registry)
        self.token_times = TokenTimes("vllm:inter_token_latency_seconds", "Time between tokens", _INTER_TOKEN_BUCKETS)
        registry.register(self.token_times)
        self._e2e = _histogram("e2e_request_latency", "Time to the whole answer", _E2E_BUCKETS, registry)
        for endpoint in Endpoint:
            for outcome in Outcome:
                self._requests.labels(endpoint, outcome)

    @contextmanager
    def request(self, endpoint: Endpoint) -> Iterator[None]:
        """Count the request of the body by how the body ends."""
        started_s = time.monotonic()
        outcome = Outcome.FAILED
        self._open.inc()
        try:
            yield
            outcome = Outcome.OK
            self._e2e.observe(time.monotonic() - started_s)
        except (InvalidRequest, HttpError):
            outcome = Outcome.INVALID
            raise
        except AdmissionRefused:
            outcome = Outcome.REFUSED
            raise
        except (ClientGone, asyncio.CancelledError):
            outcome = Outcome.CANCELLED
            raise
        finally:
            self._open.dec()
            self._requests.labels(endpoint, outcome).inc()

    def choice_finished(self, finish_reason: str) -> None:
        """Count a choice that got its finish reason."""
        self._success.labels(finish_reason).inc()

    def answered(self, usage: Usage, stats: Sequence[GenerationStats]) -> None:
        """Count the tokens, routes and first-token times of a complete answer."""
        self._prompt_tokens.inc(usage.num_prompt_tokens)
        self._output_tokens.inc(usage.num_output_tokens)
        self._cached_tokens.inc(max(0, usage.num_cached_tokens))
        for choice in stats:
            self._routes.labels(choice.route).inc()
            if choice.timings.first_token_ms is not None:
                self._ttft.observe(choice.timings.first_token_ms / 1000)
            if choice.queue_s is not None:
                self._queue.observe(choice.queue_s)

    def responded(self, status: int) -> None:
        """Count an HTTP response."""
        self._responses.labels(str(status)).inc()

    def page(
        self, is_ready: bool, num_running: int, num_waiting: int, speculation: Mapping[str, SpeculationCounts]
    ) -> bytes:
        """Return all metrics in Prometheus' text format, with the state of the service as it is now.

        `speculation` is what the nodes say of themselves, by node id; it starts again with a node.
        """
        self._running.set(num_running)
        self._waiting.set(num_waiting)
        self._ready.set(1 if is_ready else 0)
        return generate_latest(self._registry) + _speculation_page(speculation)


def _histogram(name: str, text: str, buckets: tuple[float, ...], registry: CollectorRegistry) -> Histogram:
    return Histogram(f"vllm:{name}_seconds", text, buckets=buckets, registry=registry)


def _speculation_page(speculation: Mapping[str, SpeculationCounts]) -> bytes:
    drafted = CounterMetricFamily(
        "vllm:spec_decode_num_draft_tokens", "Tokens drafted by speculation", labels=_SPECULATION_LABELS
    )
    accepted = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were right", labels=_SPECULATION_LABELS
    )
    for node_id, counts in speculation.items():
        drafted.add_metric((node_id, counts.method), counts.drafted)
        accepted.add_metric((node_id, counts.method), counts.accepted)
    registry = CollectorRegistry()
    registry.register(_Fixed((drafted, accepted)))
    return generate_latest(registry) if speculation else b""


class _Fixed(Collector):
    """Metrics that somebody else has counted."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics
