"""The engine's counts for Prometheus: vLLM's names and meanings, with `tessera_` before them in place of `vllm:`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from tessera.serve.http.remote import Remote
from tessera.serve.metrics import BOUNDS, COUNTERS, GAUGES, HISTOGRAMS


class Exposition:
    """A collector: it reads what the engine last said, whenever somebody asks."""

    def __init__(self, remote: Remote):
        self.remote = remote
        self.requests: Counter[tuple[str, int]] = Counter()  # by path and status
        self.registry = CollectorRegistry()
        self.registry.register(self)  # type: ignore[arg-type]

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        http = CounterMetricFamily("tessera_http_requests", "Requests by path and status", labels=("path", "status"))
        for (path, status), count in self.requests.items():
            http.add_metric((path, str(status)), count)
        yield http
        yield CounterMetricFamily("tessera_engine_starts", "Starts of the engine's process", value=self.remote.starts)
        if self.remote.metrics:
            yield from _engine(self.remote.metrics)


def _engine(now: Mapping) -> Iterator[Metric]:
    for name, (field, told) in GAUGES.items():
        yield GaugeMetricFamily(f"tessera_{name}", told, value=now[field])
    share = now["used_blocks"] / max(1, now["blocks"])
    yield GaugeMetricFamily("tessera_kv_cache_usage_ratio", "Share of the blocks that sequences own", value=share)
    for name, (field, told) in COUNTERS.items():
        yield CounterMetricFamily(f"tessera_{name}", told, value=now[field])
    ends = CounterMetricFamily("tessera_request_success", "Answers by how they ended", labels=("finished_reason",))
    for why, count in now["ended"].items():
        ends.add_metric((why,), count)
    yield ends
    bounds = [*(repr(round(bound, 6)) for bound in BOUNDS), "+Inf"]
    for name, (field, told) in HISTOGRAMS.items():
        kept = now[field]
        buckets = list(zip(bounds, accumulate(kept["buckets"]), strict=True))
        yield HistogramMetricFamily(f"tessera_{name}", told, buckets=buckets, sum_value=kept["total"])
