"""Spatial machines: the files that are shipped, what they owe to whom, and what is said of wrong ones."""

from __future__ import annotations

import tomllib

import pytest

import tessera
from tessera.machines.find import spatial_machine, spatial_machines
from tessera.machines.spatial import Core, read
from tessera.machines.spatial.read import vary
from tessera.util.errors import MachineError, OptionError

TOY = spatial_machine("toy").text


@pytest.mark.parametrize("name", ["toy", "systolic", "tsp", "lpx", "wse3", "wormhole", "tpu-v5e"])
def test_a_shipped_machine_names_a_source_for_every_number(name):
    m = tessera.machine(name)
    assert name in spatial_machines() and m.kind == "spatial"
    printed = str(m)
    for field, source in m.sources.items():
        assert field in printed and source in printed
        dated = any(f" {year}" in source or f"{year}" in source for year in range(2014, 2027))
        assert source.startswith("assumed: ") or dated or "SCALE-Sim" in source, f"{name} {field}: {source}"
    assert m.assumptions
    assert tomllib.loads(m.text)["sram"]["size"][0] in printed and tomllib.loads(m.text)["chip"]["clock"][0] in printed


def test_published_peaks_follow_from_the_files():
    rates = {"lpx": ("float8_e4m3fn", 315e15 / 256), "tsp": ("int8", 750e12), "wormhole": ("float8_e4m3fn", 233e12)}
    for name, (kind, published) in {**rates, "tpu-v5e": ("bfloat16", 197e12)}.items():
        m = spatial_machine(name)
        arrays = m.matrix.rows * m.matrix.columns * m.matrix.count * m.chip.grid[0] * m.chip.grid[1]
        assert 2 * arrays * m.chip.clock / m.matrix.passes[kind] == pytest.approx(published, rel=0.15)


def test_one_function_reads_all_machines(tmp_path):
    assert tessera.machine("h200").kind == "gpu"
    (tmp_path / "mine.toml").write_text(TOY)
    assert tessera.machine(tmp_path / "mine.toml") == spatial_machine("toy")
    with pytest.raises(OptionError, match="there are .*toy"):
        tessera.machine("nothing")
    with pytest.raises(OptionError, match="did you mean wormhole"):
        tessera.machine("wormhol")
    with pytest.raises(OptionError, match="h200 is a gpu"):
        spatial_machine("h200")


@pytest.mark.parametrize(
    "old, new, said",
    [
        ('"64 KiB"', "64", 'line 21: sram.size: expected a number with its unit'),
        ('"64 KiB"', '"64 KiHz"', "sram.size: expected a number with its unit"),
        ('width = ["32 B", "assumed: as a link"]', 'width = ["0 B", "x"]', "host.width: expected a whole number of"),
        ("banks", "bank", "sram.bank: unknown; expected one of size, banks"),
        ("banks", "bank", "did you mean banks?"),
        ("[vector]", "[vectors]", "line 16: vectors: unknown"),
        ('lanes = [32, "assumed: small"]', "", "line 16: vector.lanes: is missing"),
        (', "assumed: round"', "", "line 5: chip.clock: expected [value, \"source\"]"),
        ('"assumed: round"', '"assumed"', "chip.clock: expected why it is assumed"),
        ('"assumed: round"', '" "', "chip.clock: expected [value, \"source\"]"),
        ("[2, 2]", "[2, 0]", "chip.grid: expected [rows, columns], each 1 or more"),
        ("[[[0, 0]]", "[[[2, 0]]", "host: expected places within 1 × 2×2; got [2, 0]"),
        ('banks = [1,', 'banks = [3,', "sram.banks: expected a divisor"),
        ("default = 1", "exp = 1", "vector.cycles: expected a default"),
        ("default = 1", "default = 1, gellu = 2", "gellu is none (did you mean gelu?)"),
        ("read_ports = [1,", "read_ports = [9999999999,", "1 or more and at most 4096; got 9999999999"),
        ("lanes = [32,", "lanes = [1000000000,", "at most 1048576; got 1000000000"),
        ("latency = [2,", "latency = [100000000000000,", "link.latency: expected a whole number, 1"),
        ("float64 = 1", "float65 = 1", "float65 is none"),
        ('"mesh"', '"star"', "link.topology: expected one of mesh, torus"),
        ('kind = "spatial"', 'kind = "gpu"', 'expected kind = "spatial"'),
        ("[chip]", "[chip", "expected TOML"),
        ("rows = [16,", f"rows = [{'9' * 5000},", "expected TOML: Exceeds the limit"),
        ("[chip]", f"{'a.' * 20000}a = 1\n[chip]", "line 4: expected keys of fewer than 16 parts"),
        ('"64 KiB"', '"٦٤ KiB"', "sram.size: expected a number with its unit"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_told_where_and_what(old, new, said):
    assert old in TOY
    with pytest.raises(MachineError) as caught:
        read("toy.toml", TOY.replace(old, new, 1))
    assert said in str(caught.value) and str(caught.value).startswith("toy.toml")


def test_dead_cores_and_links_must_leave_the_rest_connected():
    toy = spatial_machine("toy")
    three = vary(toy, {"dead.cores": [[1, 1]]})
    assert three.cores() == (Core(0, 0, 0), Core(0, 0, 1), Core(0, 1, 0))
    assert three.edge(Core(0, 0, 1), Core(0, 1, 1)) is None
    with pytest.raises(MachineError, match="connected; nothing reaches 1,1"):
        vary(toy, {"dead.cores": [[0, 1], [1, 0]]})
    with pytest.raises(MachineError, match="connected; nothing reaches 1,0"):
        vary(toy, {"dead.links": [[[0, 0], [1, 0]], [[0, 1], [1, 1]]]})
    with pytest.raises(MachineError, match=r"expected a link that the machine has; \[0, 0\] to \[1, 1\] is none"):
        vary(toy, {"dead.links": [[[0, 0], [1, 1]]]})
    with pytest.raises(MachineError, match=r"expected places within .* got \[5, 5\]"):
        vary(toy, {"dead.cores": [[5, 5]]})


def test_neighbours_on_a_torus_and_between_chips():
    torus = vary(spatial_machine("toy"), {"chip.grid": [4, 2], "link.topology": "torus"})
    assert {e.unit: str(c) for c, e in torus.neighbours(Core(0, 0, 0)).items()} == {
        "north": "3,0", "east": "0,1", "south": "1,0",
    }  # fmt: skip
    lpx = spatial_machine("lpx")
    gates = [core for core in lpx.cores(17) if any(other.chip != 17 for other in lpx.neighbours(core))]
    assert len(gates) == 4
    for core in gates:
        for other, edge in lpx.neighbours(core).items():
            back = lpx.edge(other, core)
            assert back is not None and (back.unit, back.arrives) == (edge.arrives, edge.unit)
            assert edge.unit in lpx.units(core)


def test_a_variant_says_that_it_is_one():
    m = vary(spatial_machine("toy"), {"sram.size": "1 MiB"})
    assert m.sram.size == 2**20 and m != spatial_machine("toy")
    assert m.sources["sram.size"] == "assumed: a variant of toy"
    assert m.sources["sram.banks"] == spatial_machine("toy").sources["sram.banks"]
