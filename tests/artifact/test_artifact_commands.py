"""`tessera convert`, `inspect`, `verify`, `sign` and `keys`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import tessera
from tessera.artifact import trust
from tessera.tools import cli, convert
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
    assert convert.sizes(["x:0=batch:1..64", "x:1=length", "y:0=n:2.."]) == {
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
