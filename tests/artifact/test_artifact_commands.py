"""`tessera convert`, `inspect`, `verify`, `sign` and `keys`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import tessera
from tessera.artifact import trust
from tessera.ir.equation import Special
from tessera.tools import cli, convert
from tessera.tools.first_difference import of_kernels, of_programs, portable
from tessera.util.errors import OptionError

SCRIPT = """
import torch

def net():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 2).eval(), (torch.ones(3, 4),)
"""


def test_convert_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.py").write_text(SCRIPT)
    path = tmp_path / "net.tess"
    source = f"{tmp_path / 'net.py'}:net"
    assert cli.main(["convert", source, str(path), "--dynamic", "input:0=batch:1..8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == path.stat().st_size
    assert tessera.load(path)(torch.ones(7, 4)).shape == (7, 2)


def test_convert_an_exported_program(tmp_path: Path) -> None:
    model, x = torch.nn.Linear(4, 2).eval(), torch.ones(3, 4)
    torch.export.save(torch.export.export(model, (x,), strict=False), tmp_path / "net.pt2")
    assert cli.main(["convert", str(tmp_path / "net.pt2"), str(tmp_path / "net.tess")]) == 0
    with torch.no_grad():
        torch.testing.assert_close(tessera.load(tmp_path / "net.tess")(x), model(x))


def test_sizes() -> None:
    assert convert.sizes(["x:0=batch:1..64", "x:1=length", "y:0=n:2..", "z:0=8*n"]) == {
        "z": {0: "8*n"},
        "x": {0: ("batch", 1, 64), 1: "length"},
        "y": {0: ("n", 2, None)},
    }
    with pytest.raises(OptionError, match="expected ARG:DIM=NAME"):
        convert.sizes(["x=batch"])


@pytest.mark.parametrize("source", ["model.bin", "model.py"])
def test_sources_that_are_none(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["convert", source, str(tmp_path / "m.tess")]) == 2
    assert "expected" in capsys.readouterr().err


def test_inspect(mlp_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(mlp_file), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["entries"][0][0] == "main" and "1..64" in facts["entries"][0][2]
    assert {name for name, *_ in facts["weights"]} >= {"norm.weight", "a.weight", "b.bias"}
    assert cli.main(["inspect", str(mlp_file)]) == 0
    assert "weights.safetensors" in capsys.readouterr().out
    assert cli.main(["inspect", str(mlp_file), "--program", "main/portable"]) == 0
    assert "aten.layer_norm" in capsys.readouterr().out
    assert cli.main(["inspect", str(mlp_file), "--program", "main/nothing"]) == 2
    assert "there are main/" in capsys.readouterr().err


def test_verify(mlp_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", str(mlp_file)]) == 0
    assert "built by this user" in capsys.readouterr().out
    path = tmp_path / "damaged.tess"
    data = bytearray(mlp_file.read_bytes())
    data[4096 + 4096 + 3] ^= 1  # among the weights
    path.write_bytes(data)
    assert cli.main(["verify", str(path)]) == 2
    assert "weights.safetensors: its SHA-256" in capsys.readouterr().err


@pytest.mark.skipif(trust._ed25519() is None, reason="cryptography is not installed")
def test_sign_and_keys(
    mlp_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.tess"
    path.write_bytes(mlp_file.read_bytes())
    monkeypatch.setenv("TESSERA_KEYS", str(tmp_path / "builder"))
    assert cli.main(["sign", str(path), "--json"]) == 0
    key = json.loads(capsys.readouterr().out)["key"]
    monkeypatch.setenv("TESSERA_KEYS", str(tmp_path / "user"))
    assert cli.main(["verify", str(path)]) == 1
    assert cli.main(["keys", "--trust", key, "--name", "builder"]) == 0
    assert cli.main(["verify", str(path)]) == 0
    assert "signed by builder" in capsys.readouterr().out
    assert cli.main(["keys", "--forget", key]) == 0
    assert cli.main(["verify", str(path)]) == 1


def _told(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict]:
    code = cli.main(["run", "--json", *map(str, arguments)])
    out = capsys.readouterr().out
    return code, json.loads(out) if out else {}


def test_run_an_artifact(mlp_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry = tessera.load(mlp_file).entries["main"]
    (size,) = entry.arguments.leaves.ranges
    code, facts = _told(capsys, mlp_file, "--random", "--size", f"{size}=5", "--compare", "eager")
    assert code == 0 and facts["agrees"] and facts["outputs"]["output"][0] == 5
    (leaf,) = entry.arguments.leaves.leaves
    x = np.ones([3, leaf.shape[1]], np.float32)  # type: ignore[union-attr]
    np.savez(tmp_path / "x.npz", **{leaf.name: x})
    code, facts = _told(capsys, mlp_file, "--inputs", tmp_path / "x.npz", "--compare", mlp_file)
    assert code == 0 and facts["agrees"] and facts["outputs"]["output"][0] == 3


class Cache(torch.nn.Module):
    """Writes an argument, and gives a dict; `factor` makes two files differ."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = torch.nn.Buffer(torch.tensor(factor))

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        cache[0].add_(x * self.factor)
        return {"sum": cache[0].sum(), "rows": x + 1}


class Heads(torch.nn.Module):
    """Sizes of the call stand in its operators; `factor` makes two files differ."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.calls = torch.nn.Buffer(torch.tensor(factor)), torch.nn.Buffer(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        heads = x.reshape(x.shape[0], x.shape[1] * 2, 2).transpose(0, 1) * self.factor
        return heads / x.shape[1] + self.calls


def test_artifacts_of_open_sizes_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dynamic = {"x": {0: "rows", 1: "columns"}}
    for factor in (1.0, 2.0):
        tessera.export(Heads(factor), (torch.ones(3, 5, 4),), tmp_path / f"{factor}.tess", dynamic=dynamic)
    one, two = tmp_path / "1.0.tess", tmp_path / "2.0.tess"
    assert _told(capsys, one, "--random", "--compare", "eager")[1]["agrees"]
    code, facts = _told(capsys, one, "--random", "--compare", two)
    assert code == 1 and facts["first"].startswith("aten.mul.Tensor (")
    assert "random" not in str(facts["differences"])  # state is no chance


def test_artifacts_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for factor in (1.0, 2.0):
        example = torch.ones(3), [torch.zeros(3)]
        tessera.export(Cache(factor), example, tmp_path / f"{factor}.tess")
    one, two = tmp_path / "1.0.tess", tmp_path / "2.0.tess"
    assert _told(capsys, one, "--random", "--compare", "eager")[1]["agrees"]
    code, facts = _told(capsys, one, "--random", "--compare", two)
    assert code == 1 and not facts["agrees"]
    told = {line.split(":")[0]: "differ" in line for line in facts["differences"]}
    assert sum(told.values()) == 2 and any("written" in name and wrong for name, wrong in told.items())
    assert facts["first"].startswith("aten.mul.Tensor (") and "3 of 3 elements differ" in facts["first"]


def test_the_first_operator_that_differs(tmp_path: Path) -> None:
    x, paths = torch.randn(3, 4), [str(tmp_path / f"{i}.tess") for i in range(4)]
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4), torch.nn.Sigmoid()).eval()
    tessera.export(net, (x,), paths[0], targets=())
    tessera.export(net, (x,), paths[1], targets=())
    tessera.export(net[:3], (x,), paths[2], targets=())
    net[3] = torch.nn.ReLU()
    tessera.export(net, (x,), paths[3], targets=())
    one, same, shorter, another = (portable(path).entries["main"] for path in paths)
    call = (x,), {}
    assert of_programs((one, *call), (same, *call), 0).startswith("no operator by itself")
    assert of_programs((one, *call), (shorter, *call), 0).startswith("no operator: the programs have 4 and 3")
    told = of_programs((one, *call), (another, *call), 0)
    assert told.startswith("aten.sigmoid") and "the other program has aten.relu" in told


@pytest.mark.parametrize("which", [0, 1])
def test_the_first_kernel_that_differs(which: int, tmp_path: Path) -> None:
    """One gives a result, the other writes over an operand."""
    net = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 4), torch.nn.GELU()).eval()
    x, path = torch.randn(3, 4), tmp_path / "net.tess"
    tessera.export(net, (x,), path)
    entry = tessera.load(path).entries["main"]
    assert of_kernels(entry, (x,), {}, 0).startswith("no kernel by itself")
    kernels = [e for e in entry.program.trace.equations if isinstance(e.op, Special) and e.op.recipe]
    assert [bool(e.op.recipe.over) for e in kernels] == [False, True]

    def wrong(op: Special) -> Special:
        def run(*args: torch.Tensor) -> tuple:
            given = op.fn(*args)
            (given[0] if given else args[0]).mul_(2)
            return given

        return replace(op, fn=run)

    changed = [e.with_(op=wrong(e.op)) if e in kernels[which:] else e for e in entry.program.trace.equations]
    entry.program = replace(entry.program, trace=entry.program.trace.with_(equations=tuple(changed)))
    assert of_kernels(entry, (x,), {}, 0).startswith(f"{kernels[which].op} (")


def test_what_running_an_artifact_refuses(mlp_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, told in (
        ([], "expected --random"),
        (["--random", "--compare", "nobody"], "expected eager"),
        (["--random", "--size", "width=3"], "--size: expected"),
        (["--random", "--entry", "other"], "expected --entry main"),
        (["--wrong"], "expected the options above"),
    ):
        assert cli.main(["run", str(mlp_file), *arguments]) == 2
        assert told in capsys.readouterr().err
