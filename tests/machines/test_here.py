"""The machine at hand: the nearest description with what the driver tells, or the one that is named."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from tessera.machines import here, known, machine, machine_of
from tessera.machines.here import PROPERTIES, described_cpu, described_gpu
from tessera.machines.measure import rates
from tessera.util.config import override
from tessera.util.errors import OptionError

GPUS = [name for name in known() if machine(name).kind == "gpu"]


def properties(name: str, capability: int, units: int, **told: int) -> SimpleNamespace:
    """As PyTorch gives them; a driver need not tell everything."""
    major, minor = divmod(capability, 10)
    return SimpleNamespace(name=name, major=major, minor=minor, multi_processor_count=units, **told)


@pytest.mark.parametrize("key", GPUS)
def test_a_described_gpu_is_found_by_its_own_properties(key: str) -> None:
    m = machine(key)
    told = {theirs: m.size(ours) for theirs, ours in PROPERTIES.items() if ours != "units"}
    found = described_gpu(properties(m.name, m.capability, m.units, **told))
    assert found.key == key and {n: f.value for n, f in found.figures.items()} == {
        n: f.value for n, f in m.figures.items()
    }


@pytest.mark.parametrize(
    ("name", "capability", "units", "nearest"),
    [
        ("NVIDIA H200", 90, 132, "h200"),
        ("NVIDIA A100-SXM4-80GB", 80, 108, "a100"),
        ("NVIDIA H100 80GB HBM3", 90, 132, "h100"),
        ("NVIDIA GB200", 100, 148, "gb200-nvl72"),
        ("NVIDIA B200", 100, 148, "b200"),
        ("NVIDIA A10G", 86, 80, "rtx3090"),
        ("NVIDIA L4", 89, 58, "rtx4090"),
        ("NVIDIA GH200 480GB", 90, 132, "h200"),
        ("NVIDIA B300 SXM6", 103, 148, "b200"),
        ("NVIDIA GB10", 121, 48, "rtx5090"),
        ("Tesla T4", 75, 40, "a100"),
    ],
)
def test_the_nearest_description(name: str, capability: int, units: int, nearest: str) -> None:
    found, like = described_gpu(properties(name, capability, units)), machine(nearest)
    assert found.key == nearest and found.units == units and found.capability == capability
    assert found.matrix_flops == pytest.approx(like.matrix_flops * units / like.units)


def test_two_of_one_name_are_told_apart_by_their_memory() -> None:
    for memory, key in ((85_000_000_000, "h100"), (99_900_000_000, "h100-96gb")):
        assert described_gpu(properties("NVIDIA H100", 90, 132, total_memory=memory)).key == key


def test_figures_that_the_driver_tells() -> None:
    told = {"shared_memory_per_block_optin": 101376, "memory_clock_rate": 6_251_000, "memory_bus_width": 192}
    found = described_gpu(properties("NVIDIA L4", 89, 58, **told))
    assert found["shared_block"] == 101376 and found.figures["shared_block"].source == "the driver"
    assert found["peak_bandwidth"] == pytest.approx(300e9, rel=0.01) and found.bandwidth < found["peak_bandwidth"]
    assert found.name == "NVIDIA L4" and "rtx4090" in found.figures["matrix.bfloat16"].source


@pytest.mark.parametrize(
    ("arm", "bits", "key"),
    [(False, 512, "xeon_avx512"), (False, 256, "epyc_avx2"), (True, 128, "neoverse_n1"), (True, 256, "neoverse_v1")],
)
def test_cpus_by_family_and_registers(arm: bool, bits: int, key: str) -> None:
    assert described_cpu(arm, bits).key == key


def test_this_cpu() -> None:
    found = machine_of("cpu")
    assert found.kind == "cpu" and found.figures["units"].source == "the operating system"
    assert found is machine_of("cpu")


def test_a_machine_may_be_named(tmp_path) -> None:
    with override(machine="a100"):
        assert machine_of("cuda") is machine("a100") and machine_of("cuda:1") is machine("a100")
        assert machine_of("cpu").kind == "cpu"
    path = tmp_path / "mine.json"
    figures = {"units": [3, "counted"], "bandwidth": [5e9, "measured here"]}
    path.write_text(json.dumps({"name": "mine", "kind": "cpu", "architecture": "armv8.2-a", "figures": figures}))
    with override(machine=str(path)):
        assert machine_of("cpu").units == 3
        assert rates("cpu") is machine_of("cpu")  # nothing is measured again
    with override(machine="h300"), pytest.raises(OptionError, match="unknown 'h300'"):
        machine_of("cuda")


def test_without_a_gpu_it_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    here._gpu.cache_clear()
    with override(machine="auto"), pytest.raises(OptionError, match="no GPU here.*a100.*h200"):
        machine_of("cuda")
    with pytest.raises(OptionError, match="'meta'"):
        machine_of("meta")


def test_rates_are_measured() -> None:
    found = rates("cpu")
    assert found.bandwidth > 0 and found.matrix_flops == found.flops > 0 and found is rates("cpu")
    assert {found.figures[n].source for n in ("bandwidth", "flops.float32")} == {"measured here"}
    with override(machine="h200"):
        assert rates("cuda") is machine("h200")
