"""The file: a page of facts, members that begin at pages, and a manifest that lists them.

    page 0     magic · version · signatures · where the manifest is, its size and SHA-256 · who built it
    members    each at a multiple of 4096, none compressed, zeros between
    manifest   JSON, the last bytes of the file

There is one list of members and nothing to contradict it. `Writer` writes a file beside its place and moves it there
whole. `Container.open` checks every number before it is used; `read` gives a member whose SHA-256 is as listed, and
`map` shows one without reading it. docs/formats.md is the specification.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import stat
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tessera.artifact.text import MOST_VALUES, count_values, read_json, write_json
from tessera.util.errors import ArtifactError
from tessera.util.files import written_whole

MAGIC = b"\x89TESSERA"
VERSION = 1
READ_VERSIONS = (1,)
PAGE = 4096
HEAD = struct.Struct("<8sIIQQ32s32s")  # magic, version, signatures, manifest's offset and size, its SHA-256, own tag
SIGNATURE = 96  # a public key and what it signed
MOST_SIGNATURES = 32
MOST_MANIFEST, MOST_MEMBER, MOST_MEMBERS = 8 << 20, 64 << 20, 10_000
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,99}(/[A-Za-z0-9_][A-Za-z0-9_.:-]{0,99}){0,4}")
CHUNK = 1 << 22


@dataclass(frozen=True)
class Member:
    name: str
    offset: int
    size: int
    sha256: str


@dataclass(frozen=True)
class Seals:
    """What page 0 says of who stands behind a file: the tag of the user who built it, keys and signatures."""

    tag: bytes = bytes(32)
    signatures: tuple[tuple[bytes, bytes], ...] = ()


class Writer:
    """Members one after the other, then `finish`. Used as a context, at whose end the file is in its place."""

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        self.members: list[Member] = []
        self._whole = written_whole(self.path)

    def __enter__(self) -> Self:
        self._file = self._whole.__enter__()
        self._file.write(bytes(PAGE))
        return self

    def __exit__(self, *raised: Any) -> None:
        self._whole.__exit__(*raised)

    def add(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        assert NAME.fullmatch(name) and all(m.name != name for m in self.members), name
        self._file.write(bytes(-self._file.tell() % PAGE))
        offset, digest = self._file.tell(), hashlib.sha256()
        for chunk in chunks:
            self._file.write(chunk)
            digest.update(chunk)
        self.members.append(Member(name, offset, self._file.tell() - offset, digest.hexdigest()))

    def finish(self, manifest: dict, tag: Callable[[bytes], bytes]) -> None:
        """Write the manifest. `tag` makes the builder's of the manifest's SHA-256."""
        listed = [[m.name, m.offset, m.size, m.sha256] for m in self.members]
        data = write_json({**manifest, "members": listed})
        if len(data) > MOST_MANIFEST:
            raise ArtifactError(f"{self.path}: a manifest of {len(data)} bytes; at most {MOST_MANIFEST} are read")
        self._file.write(bytes(-self._file.tell() % PAGE))
        offset, digest = self._file.tell(), hashlib.sha256(data).digest()
        self._file.write(data)
        self._file.seek(0)
        self._file.write(HEAD.pack(MAGIC, VERSION, 0, offset, len(data), digest, tag(digest)))


class Container:
    """An open file. Its members are in `members`, by name."""

    def __init__(self, path: Path, file: int, size: int) -> None:
        self.path, self._file, self.size = path, file, size
        head = self._at("page 0", 0, PAGE)
        magic, version, count, offset, length, self.digest, tag = HEAD.unpack_from(head)
        if magic != MAGIC:
            raise self.wrong("page 0", "expected an artifact, which begins with \\x89TESSERA")
        if version not in READ_VERSIONS:
            told = ", ".join(map(str, READ_VERSIONS))
            newer = "; a newer Tessera reads it" if version > max(READ_VERSIONS) else ""
            raise self.wrong("page 0", f"expected format version {told}, got {version}{newer}")
        if count > MOST_SIGNATURES:
            raise self.wrong("page 0", f"expected at most {MOST_SIGNATURES} signatures, got {count}")
        end = HEAD.size + count * SIGNATURE
        if any(head[end:]):
            raise self.wrong("page 0", "expected zeros behind the signatures")
        pairs = (head[at : at + SIGNATURE] for at in range(HEAD.size, end, SIGNATURE))
        self.seals = Seals(tag, tuple((pair[:32], pair[32:]) for pair in pairs))
        if offset % PAGE or offset < PAGE or length > MOST_MANIFEST or offset + length != size:
            raise self.wrong("page 0", f"expected the manifest at the end of {size} bytes, got {length} at {offset}")
        data = self._at("manifest", offset, length)
        if hashlib.sha256(data).digest() != self.digest:
            raise self.wrong("manifest", "its SHA-256 is not the one in page 0: the file is damaged or was changed")
        self._values = MOST_VALUES  # that may still be read: programs that many entries share are read for each
        manifest = self._read_json(data, "manifest")
        if not isinstance(manifest, dict):
            raise self.wrong("manifest", "expected an object")
        self.manifest: dict = manifest
        self.members = self._members(manifest.get("members"), offset)

    @classmethod
    def open(cls, path: str | os.PathLike) -> Container:
        where = Path(path)
        try:
            file = os.open(where, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
        except OSError as error:
            raise ArtifactError(f"{where}: {error.strerror}") from error
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise ArtifactError(f"{where}: expected a plain file")
            return cls(where, file, status.st_size)
        except BaseException:
            os.close(file)
            raise

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wrong(self, part: str, what: str) -> ArtifactError:
        return ArtifactError(f"{self.path}: {part}: {what}")

    def _at(self, part: str, offset: int, size: int) -> bytes:
        data = os.pread(self._file, size, offset)
        if len(data) != size:
            raise self.wrong(part, f"expected {size} bytes at {offset}, got {len(data)}: the file is cut off")
        return data

    def _members(self, listed: object, end: int) -> dict[str, Member]:
        """Checked: plain names, each once; in order, at pages, none over another; nothing between them."""
        if not isinstance(listed, list) or len(listed) > MOST_MEMBERS:
            raise self.wrong("members", f"expected a list of at most {MOST_MEMBERS}")
        members: dict[str, Member] = {}
        free = PAGE
        for row in listed:
            kinds = [str, int, int, str]
            if not isinstance(row, list) or [type(x) for x in row] != kinds:
                raise self.wrong("members", f"expected a name, an offset, a size and a SHA-256, got {str(row)[:80]}")
            member = Member(*row)
            if not NAME.fullmatch(member.name) or ".." in member.name:
                raise self.wrong("members", f"expected a plain name, got {member.name[:80]!r}")
            if member.name in members:
                raise self.wrong(f"members[{member.name}]", "expected once, listed twice")
            if member.size < 0 or member.offset != free or member.size > end - member.offset:
                raise self.wrong(
                    f"members[{member.name}]",
                    f"expected at {free} and before {end}, got {member.size} bytes at {member.offset}",
                )
            if not re.fullmatch("[0-9a-f]{64}", member.sha256):
                raise self.wrong(f"members[{member.name}]", "expected a SHA-256")
            members[member.name] = member
            free = -(-(member.offset + member.size) // PAGE) * PAGE
        if free != end:
            raise self.wrong("members", f"expected the manifest at {free}, where they end, got {end}")
        return members

    def member(self, name: object) -> Member:
        if not isinstance(name, str) or name not in self.members:
            raise self.wrong("manifest", f"names the member {str(name)[:80]!r}, which is not listed")
        return self.members[name]

    def read(self, name: object, most: int = MOST_MEMBER) -> bytes:
        """The bytes of a member, as they were written."""
        member = self.member(name)
        if member.size > most:
            raise self.wrong(member.name, f"expected at most {most} bytes, got {member.size}")
        data = self._at(member.name, member.offset, member.size)
        if hashlib.sha256(data).hexdigest() != member.sha256:
            raise self.wrong(member.name, "its SHA-256 is not the one listed: the file is damaged or was changed")
        return data

    def json(self, name: object) -> object:
        return self._read_json(self.read(name), str(name))

    def _read_json(self, data: bytes, part: str) -> object:
        read = read_json(data, f"{self.path}: {part}", self._values)
        self._values -= count_values(data)
        return read

    def verify(self, name: str) -> None:
        """As `read`, of a member of any size, in pieces."""
        member, digest = self.member(name), hashlib.sha256()
        for at in range(member.offset, member.offset + member.size, CHUNK):
            size = min(CHUNK, member.offset + member.size - at)
            digest.update(self._at(member.name, at, size))
        if digest.hexdigest() != member.sha256:
            raise self.wrong(member.name, "its SHA-256 is not the one listed: the file is damaged or was changed")

    def map(self, name: object) -> memoryview:
        """A member in memory that processes share until one writes to it; each then has that page for itself."""
        member = self.member(name)
        if not member.size:
            return memoryview(b"")
        pages = mmap.mmap(self._file, member.size, access=mmap.ACCESS_COPY, offset=member.offset)
        return memoryview(pages)


def with_seals(path: str | os.PathLike, seals: Seals) -> None:
    """The same file with other signatures, put in place of the old one whole."""
    with Container.open(path) as old:
        head = bytearray(old._at("page 0", 0, PAGE))
        fields = list(HEAD.unpack_from(head))
        fields[2], fields[6] = len(seals.signatures), seals.tag
        signed = b"".join(key + signature for key, signature in seals.signatures)
        page = (HEAD.pack(*fields) + signed).ljust(PAGE, b"\0")
        if len(page) != PAGE or len(seals.signatures) > MOST_SIGNATURES:
            raise old.wrong("page 0", f"expected at most {MOST_SIGNATURES} signatures")
        with written_whole(old.path) as new:
            new.write(page)
            for at in range(PAGE, old.size, CHUNK):
                new.write(old._at("members", at, min(CHUNK, old.size - at)))
