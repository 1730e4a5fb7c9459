"""Weights in a file beside the artifact: shared by several, found by its name, size and hash, and nowhere else."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hostile import Parts
from torch import nn

import tessera
from tessera.artifact.container import Container
from tessera.tools import cli
from tessera.util.errors import ArtifactError, OptionError

safetensors = pytest.importorskip("safetensors.torch")
X = torch.linspace(-1, 1, 12).view(3, 4)
NAME = "weights.safetensors"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu() + self.table * torch.tensor([1.0, 2.0, 3.0, 4.0]))


class Part(nn.Module):
    """Some of the same weights, and one of its own."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.first, self.own = net.first, nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) * self.own


@pytest.fixture
def net() -> Net:
    return Net().eval()


@pytest.fixture
def files(net: Net, tmp_path: Path) -> Path:
    tessera.export(net, (X,), tmp_path / "net.tess", weights=NAME)
    tessera.export(Part(net).eval(), (X,), tmp_path / "part.tess", weights=NAME)
    return tmp_path


def test_two_artifacts_share_a_file(net: Net, files: Path) -> None:
    stored = safetensors.load_file(files / NAME)
    assert sorted(n for n in stored if not n.startswith("_padding")) == sorted(net.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(tessera.load(files / "net.tess")(X), net(X))
        torch.testing.assert_close(tessera.load(files / "part.tess", verify=True)(X), net.first(X))
    with Container.open(files / "part.tess") as file:
        assert file.manifest["beside"]["tensors"] == ["first.weight", "first.bias"]


def test_moved_together(net: Net, files: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    for path in (NAME, "net.tess"):
        (files / path).rename(tmp_path / "other" / path)
    with torch.no_grad():
        torch.testing.assert_close(tessera.load(tmp_path / "other" / "net.tess")(X), net(X))


def test_a_file_that_others_wrote(net: Net, tmp_path: Path) -> None:
    safetensors.save_file(net.state_dict(), tmp_path / NAME, metadata={"format": "pt"})
    tessera.export(net, (X,), tmp_path / "net.tess", weights=NAME)
    with torch.no_grad():
        torch.testing.assert_close(tessera.load(tmp_path / "net.tess")(X), net(X))


def test_a_file_of_other_weights_is_not_used(net: Net, files: Path) -> None:
    before = (files / NAME).read_bytes()
    with torch.no_grad():
        net.first.weight += 1
    with pytest.raises(OptionError, match="holds another 'first.weight' than the model"):
        tessera.export(net, (X,), files / "new.tess", weights=NAME)
    assert (files / NAME).read_bytes() == before and not (files / "new.tess").exists()


@pytest.mark.parametrize("name", ["../w.safetensors", "/tmp/w.safetensors", "w.bin", "a/w.safetensors", ""])
def test_names_are_plain(net: Net, tmp_path: Path, name: str) -> None:
    with pytest.raises(OptionError, match="expected the name of a file beside the artifact"):
        tessera.export(net, (X,), tmp_path / "net.tess", weights=name)


def test_inspect_and_verify(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(files / "net.tess"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert f"{NAME} (beside)" in [row[0] for row in facts["members"]]
    assert "first.weight" in [row[0] for row in facts["weights"]]
    assert cli.main(["verify", str(files / "net.tess")]) == 0
    flipped(files)
    assert cli.main(["verify", str(files / "net.tess")]) != 0


# --- hostile ---


def flipped(folder: Path) -> None:
    data = bytearray((folder / NAME).read_bytes())
    data[-1] ^= 1
    (folder / NAME).write_bytes(data)


def replaced(make: Callable[[Path, Path], object]) -> Callable[[Path], None]:
    """Another thing under the file's name; the file itself lies outside."""

    def change(folder: Path) -> None:
        (folder / "outside").mkdir()
        (folder / NAME).rename(folder / "outside" / NAME)
        make(folder / NAME, folder / "outside" / NAME)

    return change


def renamed(name: object) -> Callable[[Path], None]:
    return listed(lambda beside: beside.update(file=name))


def listed(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        parts = Parts.of(folder / "net.tess")
        change(parts.manifest["beside"])
        parts.write(folder / "net.tess")

    return apply


HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda folder: (folder / NAME).unlink(), "cannot be opened"),
    "changed": (flipped, "SHA-256"),
    "cut off": (lambda folder: os.truncate(folder / NAME, 100), "expected .* bytes, got 100"),
    "a link": (replaced(lambda here, there: here.symlink_to(there)), "cannot be opened"),
    "a hard link": (replaced(lambda here, there: os.link(there, here)), "several names"),
    "a pipe": (replaced(lambda here, there: os.mkfifo(here)), "no regular file"),
    "a folder": (replaced(lambda here, there: here.mkdir()), "no regular file"),
    "a device": (replaced(lambda here, there: here.symlink_to("/dev/zero")), "cannot be opened"),
    "a name above": (renamed(f"../{NAME}"), "expected a file's name"),
    "an absolute name": (renamed("/etc/passwd.safetensors"), "expected a file's name"),
    "a name of a folder": (renamed(f"a/{NAME}"), "expected a file's name"),
    "a name with a zero byte": (renamed("a\0.safetensors"), "expected a file's name"),
    "no name": (renamed(7), "expected a file's name"),
    "a negative size": (listed(lambda b: b.update(size=-1)), "expected a file's name"),
    "no hash": (listed(lambda b: b.update(sha256="00")), "expected a file's name"),
    "a tensor that it has not": (listed(lambda b: b["tensors"].append("x")), "expected the tensor 'x'"),
    "no list of tensors": (listed(lambda b: b.update(tensors={})), "expected a file's name"),
    "tensors that are no names": (listed(lambda b: b.update(tensors=[[1]])), "expected a file's name"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file_beside(name: str, files: Path) -> None:
    change, expected = HOSTILE[name]
    change(files)
    with pytest.raises(ArtifactError, match=expected) as caught:
        tessera.load(files / "net.tess", compile=False)
    assert str(caught.value).startswith(str(files / "net.tess")) and len(str(caught.value)) < 1000


def test_a_tensor_in_both(files: Path) -> None:
    parts = Parts.of(files / "part.tess")
    parts.members["weights.safetensors"] = (files / NAME).read_bytes()
    parts.write(files / "part.tess")
    with pytest.raises(ArtifactError, match="expected 'first.bias' once"):
        tessera.load(files / "part.tess")
