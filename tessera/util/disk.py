"""What compilation found, kept on disk: kernels' binaries, tuned schedules, whole programs.

An entry has a kind ("object", "schedule", …), a key (any text: it is hashed) and bytes. The folder is the user's own
($TESSERA_CACHE, or ~/.cache/tessera; mode 0700). Many processes may use it at once: an entry is written beside its
place and moved there whole, so a reader sees all of it or nothing. Every entry carries a checksum, so that a damaged
one is the same as an absent one. Bytes are never unpickled. The folder has a bound (`config.cache_size`): what was used
longest ago goes first. The cache may lose anything at any time; a disk that is full, or a folder that cannot be
written, costs time, never a result.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tessera.util.config import config, parse_bytes

MAGIC = b"tessera-cache-1\n"
SUFFIX = ".bin"
PENDING = ".tessera-new-"
TRIM_EVERY = 64  # entries that a process stores, from its first one on, between two looks at the whole folder
OURS = re.compile(rf"[0-9a-f]{{64}}{re.escape(SUFFIX)}|\w+_[0-9a-f]{{16}}\.py|{re.escape(PENDING)}.*")
_stored = itertools.count()


@dataclass(frozen=True)
class Entry:
    kind: str
    digest: str  # of the key
    bytes: int
    path: Path
    used: float  # when it was last written or read


def _entry(path: Path) -> Entry:
    status = path.stat()
    return Entry(path.parent.name, path.stem, status.st_size, path, status.st_mtime)


def folder() -> Path:
    """Where entries live; read from the environment each time, so that a test can move it."""
    chosen = os.environ.get("TESSERA_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "tessera"


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def load(kind: str, key: str) -> bytes | None:
    """The bytes stored under this key, or None if there are none or they are damaged."""
    return load_digest(kind, digest(key))


def load_digest(kind: str, of_key: str) -> bytes | None:
    """The same for whoever kept only the digest of a key."""
    path = _path(kind, of_key)
    try:
        content = _unpack(path.read_bytes(), of_key)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # `trim` goes by when a file was used
    return content


def store(kind: str, key: str, data: bytes) -> bool:
    """Keep `data` under this key, in place of what was there. False where that cannot be."""
    path = _path(kind, digest(key))
    try:
        _private(path.parent)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=PENDING)  # readable by the owner alone
    except OSError:
        return False
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_pack(data, digest(key)))
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        return False
    if next(_stored) % TRIM_EVERY == 0 and config.cache_size:
        trim(parse_bytes(config.cache_size, "cache_size"))
    return True


def entries(kind: str | None = None) -> Iterator[Entry]:
    """Everything that is stored, or everything of one kind, in a fixed order."""
    for path in sorted(folder().glob(f"{kind or '*'}/*{SUFFIX}")):
        if not OURS.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError):  # another process may have cleared it
            yield _entry(path)


def files(kind: str | None = None) -> Iterator[Entry]:
    """Every file of ours, entries and generated sources alike, in a fixed order."""
    for path in sorted(folder().glob(f"{kind or '*'}/*")):
        if OURS.fullmatch(path.name):
            with contextlib.suppress(OSError):
                yield _entry(path)


def clear(kind: str | None = None) -> int:
    """Remove everything, or everything of one kind; gives the number of files removed. Only files that this module
    wrote are touched, wherever the folder points."""
    removed = 0
    for entry in list(files(kind)):
        with contextlib.suppress(OSError):
            entry.path.unlink()
            removed += 1
    return removed


def trim(most: int) -> int:
    """Where there are more than `most` bytes, remove what was used longest ago until three quarters of that are left;
    gives the number of files removed."""
    cached = list(files())
    left, removed = sum(entry.bytes for entry in cached), 0
    if left <= most:
        return 0
    for entry in sorted(cached, key=lambda entry: (entry.used, entry.path)):
        if left <= most * 3 // 4:
            break
        with contextlib.suppress(OSError):  # another process may have removed it
            entry.path.unlink()
            removed += 1
        left -= entry.bytes
    return removed


def write_source(kind: str, stem: str, text: str) -> Path:
    """`text` as a Python file named by its content: the same text is the same file in every process."""
    path = folder() / kind / f"{stem}_{digest(text)[:16]}.py"
    try:
        _private(path.parent)
        if not _holds(path, text):
            _write_text(path, text)
    except OSError:  # no folder of our own, or no room in it: a private one for this process
        path = Path(tempfile.mkdtemp(prefix="tessera-")) / path.name
        _write_text(path, text)
    return path


def _holds(path: Path, text: str) -> bool:
    try:
        return path.read_text() == text
    except (OSError, UnicodeDecodeError):
        return False


def _write_text(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=PENDING)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def private_folder(name: str) -> Path:
    """A folder in ours for files that others write, such as Python: the user's own, like ours."""
    _private(path := folder() / name)
    return path


def _path(kind: str, of_key: str) -> Path:
    assert kind.isidentifier(), f"expected a kind that can name a folder, got {kind!r}"
    return folder() / kind / (of_key + SUFFIX)


def _private(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    root = folder()
    for level in (root, path):
        if level.stat().st_mode & 0o077:
            level.chmod(0o700)


def _pack(data: bytes, key: str) -> bytes:
    return MAGIC + _checksum(data, key) + data


def _unpack(stored: bytes, key: str) -> bytes | None:
    head = len(MAGIC) + hashlib.sha256().digest_size
    data = stored[head:]
    right = stored.startswith(MAGIC) and stored[len(MAGIC) : head] == _checksum(data, key)
    return data if right else None


def _checksum(data: bytes, key: str) -> bytes:
    return hashlib.sha256(key.encode() + data).digest()
