"""`tessera bench machine`: every figure that can be measured here, beside the description, and as a description."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from tessera.machines import machine, measure
from tessera.tools import cli
from tessera.tools.bench import machine as suite


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little of everything: how fast is not what is tested."""
    monkeypatch.setattr(suite, "LARGE", {"cpu": 1 << 16, "cuda": 1 << 22})
    monkeypatch.setattr(suite, "SIDE", {"cpu": 32, "cuda": 256})
    monkeypatch.setattr(suite, "CALLS", 3)
    monkeypatch.setattr(suite, "QUEUED", 3)


def test_a_description_is_written_that_the_flag_takes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "here.json"
    assert cli.main(["bench", "machine", "--device", "cpu", "--json", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "bandwidth" in shown and "flops.float32" in shown and "ratio" in shown
    here = machine(path)
    measured = {n for n, f in here.figures.items() if f.source.startswith(measure.MEASURED + " here")}
    assert {"bandwidth", "triad_bandwidth", "l2_bandwidth", "flops.float32", "flops.float64", "call"} <= measured
    assert here.kind == "cpu" and all(here[n] > 0 for n in measured) and "vector_bits" in here


def test_one_section_on_standard_output(capsys: pytest.CaptureFixture) -> None:
    threads = torch.get_num_threads()
    assert cli.main(["bench", "machine", "--only", "host", "--device", "cpu", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["figures"]["call"][0] > 0 and "measured here" not in data["figures"]["bandwidth"][1]
    assert torch.get_num_threads() == threads


def test_what_a_kernel_takes_behind_products() -> None:
    """The products' time is not part of it."""
    taken = suite._behind_products(lambda: time.sleep(0.01), torch.device("cpu"))
    assert 0.01 <= taken < 0.02


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    assert cli.main(["bench", "machine", "--device", "cuda", "--json", str(path)]) == 0
    here = machine(path)
    assert here.kind == "gpu" and "measured here" in here.figures["matrix.bfloat16"].source
    assert here["launch"] > 0 and here["link.pcie"] > 0 and 0 < here["kernel"] < 1e-4
