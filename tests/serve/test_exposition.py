"""Metrics: what is exposed is well-formed, and the dashboard shows what is exposed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
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


UNITS = {
    "ms",
    "us",
    "ns",
    "sec",
    "s",
    "b",
    "kb",
    "mb",
    "gb",
    "m",
    "h",
    "d",
    "milliseconds",
    "minutes",
    "hours",
    "percent",
}
KINDS = {"counter", "gauge", "histogram", "summary", "untyped"}


def test_what_promtool_would_say() -> None:
    """The rules of `promtool check metrics`, of a text whose families prometheus-client reads."""
    text = exposed()
    assert text.endswith("\n")
    families = list(parser.text_string_to_metric_families(text))
    samples = [(s.name, tuple(sorted(s.labels.items()))) for f in families for s in f.samples]
    assert len({f.name for f in families}) == len(families) and len(set(samples)) == len(samples)
    for family in families:
        assert family.documentation, f"{family.name}: no help text"
        assert f"# TYPE {family.name}{'_total' * (family.type == 'counter')} {family.type}\n" in text
        words = family.name.split("_")
        assert re.fullmatch(r"[a-z][a-z0-9_]*", family.name), f"{family.name}: expected snake case, without colons"
        assert not UNITS & set(words), f"{family.name}: expected base units, in full"
        assert not KINDS & set(words), f"{family.name}: the type stands in its name"
        ends = {s.name.removeprefix(family.name) for s in family.samples}
        labels = {label for s in family.samples for label in s.labels}
        assert all(re.fullmatch(r"[a-z][a-z0-9_]*", label) for label in labels)
        if family.type == "counter":
            assert ends <= {"_total"}, f"{family.name}: counters end in _total"
        else:
            assert words[-1] != "total", f"{family.name}: only counters end in _total"
        if family.type == "histogram":
            assert ends == {"_bucket", "_count", "_sum"} and labels == {"le"}
            by_end = {s.labels["le"]: s.value for s in family.samples if s.name.endswith("_bucket")}
            (count,) = (s.value for s in family.samples if s.name.endswith("_count"))
            assert list(by_end)[-1] == "+Inf" and by_end["+Inf"] == count
        else:
            assert words[-1] not in ("bucket", "count", "sum") and not labels & {"le", "quantile"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus brings promtool")
def test_what_promtool_says() -> None:
    done = subprocess.run(["promtool", "check", "metrics"], input=exposed(), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_dashboard_asks_for_what_there_is() -> None:
    names = {s.name for f in parser.text_string_to_metric_families(exposed()) for s in f.samples}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = {name for p in panels for t in p["targets"] for name in re.findall(r"tessera_\w+", t["expr"])}
    assert len(asked) > 15 and asked <= names
