import random

from prometheus_client import CollectorRegistry, Histogram

from pdserve.gateway.token_times import TokenTimes

_BOUNDS = (0.005, 0.05, 1.0)


def test_it_counts_as_the_histogram_of_prometheus_client_does() -> None:
    random.seed(7)
    times = TokenTimes("between_tokens_seconds", "Time between tokens", _BOUNDS)
    theirs = Histogram("between_tokens_seconds", "Time between tokens", buckets=_BOUNDS, registry=CollectorRegistry())

    for _ in range(500):
        duration_s, count = random.choice([*_BOUNDS, random.uniform(0, 2)]), random.randint(1, 4)
        times.observe(duration_s, count)
        for _ in range(count):
            theirs.observe(duration_s)

    assert _samples(times) == _samples(theirs)


def _samples(metrics: TokenTimes | Histogram) -> dict[tuple[str, str], float]:
    (metric,) = metrics.collect()
    return {
        (sample.name, sample.labels.get("le", "")): round(sample.value, 6)
        for sample in metric.samples
        if not sample.name.endswith("_created")
    }
