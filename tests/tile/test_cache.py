"""The on-disk cache: private, whole or absent, and never in the way."""

from __future__ import annotations

import os
import stat
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tessera.util import disk as cache
from tessera.util.config import override
from tessera.util.errors import OptionError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_round_trip() -> None:
    assert cache.load("object", "a") is None
    cache.store("object", "a", b"\0\1binary")
    cache.store("object", "b", b"")
    cache.store("schedule", "a", b"other kind")
    assert cache.load("object", "a") == b"\0\1binary"
    assert cache.load("object", "b") == b""
    assert cache.load("schedule", "a") == b"other kind"
    cache.store("object", "a", b"newer")
    assert cache.load("object", "a") == b"newer"


def test_entries_and_clear(folder: Path) -> None:
    cache.store("object", "a", b"xyz")
    cache.store("schedule", "b", b"")
    cache.write_source("source", "kernel", "x = 1\n")
    (folder / "object" / "notes.txt").write_text("not ours")
    assert [(e.kind, e.digest) for e in cache.entries()] == [
        ("object", cache.digest("a")),
        ("schedule", cache.digest("b")),
    ]
    assert [e.kind for e in cache.entries("schedule")] == ["schedule"]
    cache.clear()
    assert list(cache.entries()) == []
    assert [p.name for p in folder.glob("*/*")] == ["notes.txt"]


def test_what_was_used_longest_ago_goes_first(folder: Path) -> None:
    for k, name in enumerate("abcd"):
        cache.store("object", name, bytes(1000))
        (entry,) = (e for e in cache.entries() if e.digest == cache.digest(name))
        os.utime(entry.path, (k, k))
    (folder / "object" / "notes.txt").write_text("not ours")
    each = next(cache.entries()).bytes
    assert cache.trim(4 * each) == 0
    assert cache.load("object", "a") is not None  # used just now
    assert cache.trim(4 * each - 1) == 2  # down to three quarters
    assert [cache.load("object", name) is not None for name in "abcd"] == [True, False, False, True]
    assert (folder / "object" / "notes.txt").exists()


def test_storing_keeps_the_folder_within_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "TRIM_EVERY", 1)
    with override(cache_size="10KB"):
        for k in range(40):
            cache.store("object", str(k), bytes(1000))
        assert sum(e.bytes for e in cache.entries()) <= 10_000
        assert cache.load("object", "39") is not None
    with override(cache_size=""):
        for k in range(40):
            cache.store("object", str(k), bytes(1000))
        assert len(list(cache.entries())) == 40
    with pytest.raises(OptionError, match="plenty"), override(cache_size="plenty"):
        pass


def test_private_to_the_user(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    cache.store("object", "a", b"x")
    for path in (folder, folder / "object"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    (entry,) = cache.entries()
    assert stat.S_IMODE(entry.path.stat().st_mode) == 0o600


@pytest.mark.parametrize("damage", [b"", b"garbage", "cut", "flip"])
def test_damaged_entry_is_absent_and_rewritten(damage: bytes | str) -> None:
    cache.store("object", "a", b"the right bytes")
    (entry,) = cache.entries()
    whole = entry.path.read_bytes()
    match damage:
        case "cut":
            entry.path.write_bytes(whole[:-1])
        case "flip":
            entry.path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        case bytes():
            entry.path.write_bytes(damage)
    assert cache.load("object", "a") is None
    cache.store("object", "a", b"the right bytes")
    assert cache.load("object", "a") == b"the right bytes"


def test_entry_under_a_wrong_name_is_absent() -> None:
    cache.store("object", "a", b"for a")
    (entry,) = cache.entries()
    entry.path.rename(entry.path.with_name(cache.digest("b") + cache.SUFFIX))
    assert cache.load("object", "b") is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folder_that_cannot_be_written(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o500)
    cache.store("object", "a", b"x")
    assert cache.load("object", "a") is None


def test_folder_that_is_a_file(folder: Path) -> None:
    folder.write_text("in the way")
    cache.store("object", "a", b"x")
    assert cache.load("object", "a") is None
    assert cache.write_source("source", "kernel", "x = 1\n").read_text() == "x = 1\n"


def test_a_full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for names, but for no contents."""
    assert cache.store("object", "a", b"x")
    make = tempfile.mkstemp

    def full(dir: Path, prefix: str) -> tuple[int, str]:
        handle, path = make(dir=dir, prefix=prefix)
        if not str(dir).startswith(str(folder)):
            return handle, path
        os.close(handle)
        return os.open("/dev/full", os.O_WRONLY), path

    monkeypatch.setattr(tempfile, "mkstemp", full)
    assert not cache.store("object", "b", b"x" * 100_000)
    assert cache.load("object", "b") is None and cache.load("object", "a") == b"x"
    made = cache.write_source("source", "kernel", "x = 1\n")
    assert made.read_text() == "x = 1\n" and not str(made).startswith(str(folder))
    assert not [entry for entry in cache.files() if entry.path.name.startswith(cache.PENDING)]


def test_source_files_are_named_by_content() -> None:
    first = cache.write_source("source", "kernel", "x = 1\n")
    assert first == cache.write_source("source", "kernel", "x = 1\n")
    assert first != cache.write_source("source", "kernel", "x = 2\n")
    first.write_text("edited")
    assert cache.write_source("source", "kernel", "x = 1\n").read_text() == "x = 1\n"


def _write_many(worker: int) -> int:
    whole = 0
    for turn in range(50):
        cache.store("object", "shared", bytes([worker]) * 10_000)
        data = cache.load("object", "shared")
        whole += data is not None and len(data) == 10_000 and len(set(data)) == 1
        cache.store("object", f"{worker}-{turn}", b"x")
    return whole


def test_many_processes() -> None:
    with ProcessPoolExecutor(3) as pool:
        assert list(pool.map(_write_many, range(3))) == [50, 50, 50]
    assert len(list(cache.entries())) == 151
