"""Descriptions of machines: every file is read, every figure makes sense and says where it comes from."""

from __future__ import annotations

import json
import re

import pytest

from tessera.machines import known, machine
from tessera.machines.find import machine as any_machine
from tessera.machines.find import spatial_machine
from tessera.util.errors import MachineError, OptionError

GPUS = [name for name in known() if machine(name).kind == "gpu"]
CPUS = [name for name in known() if machine(name).kind == "cpu"]


def test_the_machines_that_people_have_are_described():
    assert {"h100-96gb", "gb200-nvl72", "rubin-nvl72"} <= set(known("gpu"))
    assert {"a100", "h100", "h200", "b200", "l40s", "rtx4090", "xeon_avx512", "neoverse_n1", "neoverse_v1"} <= set(
        known()
    )
    assert {machine(name).architecture for name in GPUS} >= {"sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"}


@pytest.mark.parametrize("name", GPUS)
def test_figures_of_a_gpu_agree_with_each_other(name):
    m = machine(name)
    assert m["bandwidth"] <= m["peak_bandwidth"]
    assert m["shared_block"] < m["shared"] < m["l2"] < m["memory"]
    assert m.flops < m.matrix_flops
    assert m["matrix.float16"] >= m["matrix.bfloat16"] >= m["matrix.tfloat32"]
    # A multiply-add a lane and cycle: 64 or 128 lanes of float32 a multiprocessor.
    lanes = m["flops.float32"] / (2 * m.units * m["clock"])
    assert 55 < lanes < 135


@pytest.mark.parametrize("name", CPUS)
def test_figures_of_a_cpu_agree_with_each_other(name):
    m = machine(name)
    assert m["flops.float32"] == 2 * m["flops.float64"]
    assert m["vector_bits"] in (128, 256, 512) and m["vector_registers"] in (16, 32)
    assert m["l1"] < m["l2"]


def test_a_machine_prints_every_number_with_its_source():
    m = machine("H200")
    lines = str(m).splitlines()
    assert len(lines) == 1 + len(m.figures)
    assert any("bandwidth" in line and "4 TB/s" in line and "measured" in line for line in lines)
    assert repr(m) == "<Machine h200: NVIDIA H200 SXM, sm_90>"


def test_a_file_describes_a_machine(tmp_path):
    told = {"name": "mine", "kind": "gpu", "architecture": "sm_90", "figures": {"units": [4, "counted"]}}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(told))
    m = machine(path)
    assert m.units == 4 and m.key == "mine"
    with pytest.raises(OptionError, match="mine: nothing is known of 'bandwidth'"):
        _ = m.bandwidth


@pytest.mark.parametrize(
    ("figures", "told"),
    [
        ({"speed": [1, "x"]}, "unknown figure 'speed'"),
        ({"units": [-1, "x"]}, "positive"),
        ({"units": [1, ""]}, "source"),
        ({"units": 3}, "expected name, kind"),
    ],
)
def test_a_wrong_description_is_refused(figures, told, tmp_path):
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps({"name": "w", "kind": "gpu", "architecture": "sm_90", "figures": figures}))
    with pytest.raises(OptionError, match=told):
        machine(path)


TOML = 'name = "mine"\nkind = "gpu"\narchitecture = "sm_90"\n[device]\n'


def test_a_toml_file_describes_a_machine_of_any_kind(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        TOML + 'units = [4, "counted"]\nlaunch = ["2.5 us", "measured"]\n[link]\nnic = ["50 GB/s", "told"]\n'
    )
    m = any_machine(path)
    assert m is machine(path) and (m.units, m["launch"], m["link.nic"]) == (4, 2.5e-6, 50e9)
    path.with_name("toy.toml").write_text(spatial_machine("toy").text)
    assert any_machine(path.with_name("toy.toml")) == spatial_machine("toy")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('speed = [1, "x"]', "unknown figure 'speed'"),
        ('memory = [80, "x"]', 'memory: expected a number with its unit, such as "16 B"'),
        ('memory = ["80 GW", "x"]', "memory: expected a number with its unit"),
        ('units = ["4 B", "x"]', "units: expected a whole number"),
        ("units = 4", 'units: expected .value, "source".'),
        ('units = [4, ""]', "with a source"),
        ("units = [", "expected TOML"),
    ],
)
def test_a_wrong_toml_file_is_refused(line, told, tmp_path):
    path = tmp_path / "wrong.toml"
    path.write_text(TOML + line)
    with pytest.raises(MachineError if "source." in told or "TOML" in told else OptionError, match=told):
        machine(path)


@pytest.mark.parametrize("name", known())
def test_sources_say_who_and_when_or_that_it_is_assumed(name):
    for figure, of in machine(name).figures.items():
        source = of.source
        assert source.startswith(("assumed: ", "computed: ")) or re.search(r"\b20[0-2][0-9]\b", source), (
            f"{figure}: {source}"
        )


@pytest.mark.parametrize("name", ["a100", "h100", "h100-96gb", "h200", "b200", "gb200-nvl72", "rubin-nvl72"])
def test_gpus_of_a_cluster_have_links_by_the_same_names(name):
    kinds = {figure for figure in machine(name).figures if figure.startswith("link.")}
    assert {"link.nvlink", "link.network"} <= kinds <= {"link.nvlink", "link.network", "link.pcie"}


def test_an_unknown_name_lists_the_known_ones(tmp_path):
    with pytest.raises(OptionError, match="h200"):
        machine("h300")
    with pytest.raises(OptionError, match="no file"):
        machine(tmp_path / "none.json")
