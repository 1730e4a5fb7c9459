"""Files that an attacker would write: a good artifact, taken apart, changed in one place, and put together again.

`Parts` holds a file as data; `write` makes a file of it whose hashes are right, so that only what was changed is wrong.
"""

from __future__ import annotations

import copy
import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tessera.artifact.container import HEAD, MAGIC, PAGE, VERSION, Container

PROGRAM = "programs/main/portable.json"


@dataclass
class Parts:
    manifest: dict
    members: dict[str, bytes]
    tag: bytes
    listed: Callable[[list], list] = field(default=lambda rows: rows)  # changes the list of members

    @staticmethod
    def of(path: Path) -> Parts:
        with Container.open(path) as container:
            members = {name: container.read(name) for name in container.members}
            manifest = {k: v for k, v in container.manifest.items() if k != "members"}
            return Parts(copy.deepcopy(manifest), members, container.seals.tag)

    def program(self) -> dict:
        return json.loads(self.members[PROGRAM])

    def put(self, program: dict, name: str = PROGRAM) -> None:
        self.members[name] = json.dumps(program).encode()

    def write(self, path: Path) -> Path:
        body, rows = bytearray(), []
        for name, data in self.members.items():
            rows.append([name, PAGE + len(body), len(data), hashlib.sha256(data).hexdigest()])
            body += data + bytes(-len(data) % PAGE)
        manifest = json.dumps({**self.manifest, "members": self.listed(rows)}).encode()
        return raw(path, bytes(body), manifest, self.tag)


def raw(path: Path, body: bytes, manifest: bytes, tag: bytes = bytes(32)) -> Path:
    """A file of these members' bytes and this text as its manifest."""
    digest = hashlib.sha256(manifest).digest()
    head = HEAD.pack(MAGIC, VERSION, 0, PAGE + len(body), len(manifest), digest, tag)
    path.write_bytes(head.ljust(PAGE, b"\0") + body + manifest)
    return path


def weights(header: bytes, data: bytes = b"") -> bytes:
    """A safetensors member with this header."""
    return struct.pack("<Q", len(header)) + header + data
