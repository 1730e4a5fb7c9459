"""Metrics: what is exposed is well-formed, and the dashboard shows what is exposed."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

parser = pytest.importorskip("prometheus_client.parser")

from tessera.serve.http.exposition import Exposition  # noqa: E402
from tessera.serve.metrics import Metrics  # noqa: E402

DASHBOARD = Path(__file__).parents[2] / "docs" / "serve_grafana.json"


def exposed() -> str:
    now = Metrics(new_tokens=7, blocks=10, used_blocks=5)
    now.first_token.add(0.003)
    now.first_token.add(1e9)
    plain = {**asdict(now), "ended": {"stop": 2}}
    made = Exposition(SimpleNamespace(metrics=plain, starts=1))  # type: ignore[arg-type]
    made.requests["/v1/completions", 200] += 1
    return made.text().decode()


def test_histograms_and_counts() -> None:
    found = {f.name: f for f in parser.text_string_to_metric_families(exposed())}
    assert all(f.documentation and f.type in ("counter", "gauge", "histogram") for f in found.values())
    assert all(re.fullmatch(r"tessera_[a-z0-9_]+", name) for name in found)
    buckets = [s.value for s in found["tessera_time_to_first_token_seconds"].samples if s.name.endswith("_bucket")]
    assert buckets == sorted(buckets) and buckets[0] == 0 and buckets[-2:] == [1, 2]
    assert found["tessera_kv_cache_usage_ratio"].samples[0].value == 0.5
    assert found["tessera_generation_tokens"].samples[0].value == 7


def test_the_dashboard_asks_for_what_there_is() -> None:
    names = {s.name for f in parser.text_string_to_metric_families(exposed()) for s in f.samples}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = {name for p in panels for t in p["targets"] for name in re.findall(r"tessera_\w+", t["expr"])}
    assert len(asked) > 15 and asked <= names
