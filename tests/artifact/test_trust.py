"""Kernels run if this user built the file, or if somebody they trust signed it; keys are the user's alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

import tessera
from tessera.artifact import trust
from tessera.artifact.container import Container, Seals, with_seals
from tessera.tile.targets.cpu.levels import levels_here
from tessera.util.errors import ArtifactError, OptionError

NEEDS_CRYPTOGRAPHY = pytest.mark.skipif(trust._ed25519() is None, reason="cryptography is not installed")
HAS_KERNELS = pytest.mark.skipif(not levels_here(), reason="this machine is of no level that is known")


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user who has built nothing yet."""
    monkeypatch.setenv("TESSERA_KEYS", str(tmp_path / "keys"))
    return tmp_path / "keys"


@pytest.fixture
def theirs(mlp_file: Path, tmp_path: Path) -> Path:
    """A file that another user built."""
    path = tmp_path / "theirs.tess"
    path.write_bytes(mlp_file.read_bytes())
    return path


def verdict(path: Path) -> trust.Verdict:
    with Container.open(path) as container:
        return trust.verdict(container)


def test_what_a_user_builds_is_trusted(keys: Path, tmp_path: Path) -> None:
    tessera.export(torch.nn.ReLU(), (torch.randn(3),), tmp_path / "m.tess")
    assert verdict(tmp_path / "m.tess") == trust.Verdict(True, "built by this user")
    assert stat.S_IMODE((keys / trust.OWN).stat().st_mode) == 0o600
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700


@HAS_KERNELS
def test_kernels_of_a_stranger_are_left_out(keys: Path, theirs: Path, mlp: torch.nn.Module) -> None:
    with pytest.warns(UserWarning, match="its kernels are left out: not built by this user, and nobody signed it"):
        m = tessera.load(theirs, compile=False)
    assert "every operator by PyTorch" in m.explain()
    x = torch.randn(2, 16)
    with torch.no_grad():
        torch.testing.assert_close(m(x), mlp(x))
    assert "regions by kernels of the file" in tessera.load(theirs, trust=True).explain()


def test_a_tag_of_another_file_says_nothing(keys: Path, theirs: Path, tmp_path: Path) -> None:
    tessera.export(torch.nn.ReLU(), (torch.randn(3),), tmp_path / "mine.tess")
    with Container.open(tmp_path / "mine.tess") as mine:
        tag = mine.seals.tag
    with_seals(theirs, Seals(tag))
    assert not verdict(theirs).trusted


@NEEDS_CRYPTOGRAPHY
def test_signatures(keys: Path, theirs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TESSERA_KEYS", str(tmp_path / "builder"))
    key = trust.sign(theirs)
    assert verdict(theirs) == trust.Verdict(True, "signed by this user")
    monkeypatch.setenv("TESSERA_KEYS", str(keys))
    assert "not in the list of trusted keys" in verdict(theirs).why
    trust.add_key(key, "the build server")
    assert verdict(theirs) == trust.Verdict(True, "signed by the build server")
    trust.sign(theirs)  # a second signature beside the first
    with Container.open(theirs) as container:
        assert [s.state for s in trust.signers(container)] == ["right", "right"]
    trust.remove_key(key)
    assert verdict(theirs).why == "signed by this user"


@NEEDS_CRYPTOGRAPHY
def test_a_wrong_signature(keys: Path, theirs: Path) -> None:
    key = trust.sign(theirs)
    with_seals(theirs, Seals(signatures=((bytes.fromhex(key), bytes(64)),)))
    assert not verdict(theirs).trusted and "its signature is wrong" in verdict(theirs).why


def test_what_was_signed_cannot_be_changed(mlp_file: Path, tmp_path: Path) -> None:
    data = bytearray(mlp_file.read_bytes())
    with Container.open(mlp_file) as container:
        member = next(m for m in container.members.values() if m.name.startswith("programs/"))
    data[member.offset + 20] ^= 1
    path = tmp_path / "changed.tess"
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match="SHA-256"), Container.open(path) as changed:
        for name in changed.members:
            changed.verify(name)


def test_keys_that_others_can_read_are_refused(keys: Path, theirs: Path, tmp_path: Path) -> None:
    tessera.export(torch.nn.ReLU(), (torch.randn(3),), tmp_path / "m.tess")
    os.chmod(keys / trust.OWN, 0o644)
    told = verdict(tmp_path / "m.tess")
    assert not told.trusted and "expected to be its owner's alone" in told.why
    with pytest.raises(trust.TrustError, match="owner's alone"):
        tessera.export(torch.nn.ReLU(), (torch.randn(3),), tmp_path / "n.tess")


def test_keys_are_not_followed(keys: Path, tmp_path: Path, theirs: Path) -> None:
    keys.mkdir(mode=0o700)
    (tmp_path / "elsewhere").write_text("00" * 32)
    (keys / trust.OWN).symlink_to(tmp_path / "elsewhere")
    assert not verdict(theirs).trusted


def test_a_key_is_64_digits(keys: Path) -> None:
    with pytest.raises(OptionError, match="64 hexadecimal digits"):
        trust.add_key("abc", "nobody")
    with pytest.raises(OptionError, match="not in the list"):
        trust.remove_key("0" * 64)


def test_an_empty_secret_is_none(keys: Path, theirs: Path, tmp_path: Path) -> None:
    """Anybody can make the tag of a secret that is empty, as a write that was cut off would leave it."""
    with Container.open(theirs) as container:
        digest = container.digest
    with_seals(theirs, Seals(trust._tag("", digest)))
    keys.mkdir(mode=0o700)
    for text in ("", "\n", "00"):
        (keys / trust.OWN).write_text(text)
        (keys / trust.OWN).chmod(0o600)
        assert not verdict(theirs).trusted and "expected a key of 64" in verdict(theirs).why
        with pytest.raises(trust.TrustError, match="expected a key of 64"):
            tessera.export(torch.nn.ReLU(), (torch.randn(3),), tmp_path / "n.tess")


def test_a_secret_that_another_process_made_first_is_kept(keys: Path) -> None:
    trust._write(trust.OWN, "1" * 64, new=True)
    trust._write(trust.OWN, "2" * 64, new=True)
    assert trust._secret(trust.OWN) == "1" * 64
    assert [path.name for path in keys.iterdir()] == [trust.OWN]


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_keys_are_plain_files(kind: str, keys: Path, theirs: Path) -> None:
    keys.mkdir(mode=0o700)
    (os.mkfifo if kind == "pipe" else os.mkdir)(keys / trust.OWN, 0o700)
    assert not verdict(theirs).trusted and "expected a plain file" in verdict(theirs).why


@NEEDS_CRYPTOGRAPHY
def test_a_signing_key_that_is_none(keys: Path, theirs: Path) -> None:
    keys.mkdir(mode=0o700)
    (keys / trust.PRIVATE).write_text("no key")
    (keys / trust.PRIVATE).chmod(0o600)
    with pytest.raises(trust.TrustError, match="expected a key of 64"):
        trust.sign(theirs)


@NEEDS_CRYPTOGRAPHY
def test_a_trusted_key_needs_no_name(keys: Path, theirs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TESSERA_KEYS", str(tmp_path / "builder"))
    key = trust.sign(theirs)
    monkeypatch.setenv("TESSERA_KEYS", str(keys))
    trust.add_key(key, "")
    assert verdict(theirs).why == f"signed by {key[:16]}"


@HAS_KERNELS
def test_kernels_that_nobody_trusts_do_not_run_whoever_built_them(keys: Path, tmp_path: Path) -> None:
    tessera.export(torch.nn.GELU(), (torch.randn(3),), tmp_path / "m.tess")
    assert "regions by kernels of the file" in tessera.load(tmp_path / "m.tess").explain()
    told = tessera.load(tmp_path / "m.tess", trust=False, compile=False).explain()
    assert "the caller does not trust it" in told and "every operator by PyTorch" in told
