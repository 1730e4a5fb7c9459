"""What an artifact holds, for people: read off its manifest, with nothing loaded or run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tessera.artifact import trust
from tessera.artifact.beside import beside_of, weights_of
from tessera.artifact.check import arguments_of
from tessera.artifact.container import Container
from tessera.util.errors import ArtifactError

Table = tuple[str, tuple[str, ...], list[list]]


@dataclass(frozen=True)
class Facts:
    data: dict  # as JSON holds it
    head: str
    texts: dict[tuple[str, str], str]  # (entry, target) -> the member with its text

    def tables(self) -> Iterator[Table]:
        yield "entries", ("entry", "arguments", "sizes", "programs"), self.data["entries"]
        yield "targets", ("target", "kernels", "code"), self.data["targets"]
        yield "members", ("member", "size", "SHA-256"), self.data["members"]
        yield "weights", ("weight", "dtype", "shape", "size"), self.data["weights"]


def facts_of(container: Container) -> Facts:
    manifest = container.manifest
    entries, targets = manifest.get("entries"), manifest.get("targets")
    if not isinstance(entries, dict) or not isinstance(targets, dict):
        raise container.wrong("manifest", "expected entries and targets")
    rows, texts = [], {}
    for name, entry in entries.items():
        where = f"{container.path}: entries[{name[:40]}]"
        programs = entry.get("programs") if isinstance(entry, dict) else None
        if not isinstance(programs, dict):
            raise ArtifactError(f"{where}: expected programs")
        arguments = arguments_of(entry, torch.device, where)
        rows.append([name, ", ".join(arguments.lines()), ", ".join(arguments.sizes()), ", ".join(programs)])
        for target, members in programs.items():
            if not isinstance(members, list) or len(members) != 2:
                raise ArtifactError(f"{where}.programs: expected a program and its text")
            texts[name, target] = container.member(members[1]).name
    kernels = []
    for name, target in targets.items():
        if not isinstance(target, dict) or not isinstance(target.get("images", []), list):
            raise container.wrong(f"targets[{name[:40]}]", "expected kernels")
        kernels.append([name, str(len(target.get("images", []))), container.member(target.get("code")).size])
    tensors, _ = weights_of(container, verify=False)
    weights = [[n, str(x.dtype).removeprefix("torch."), str(list(x.shape)), x.nbytes] for n, x in tensors.items()]
    members = [[m.name, m.size, m.sha256] for m in container.members.values()]
    if shared := beside_of(container):
        members.append([f"{shared.name} (beside)", shared.size, shared.sha256])
    builder, verdict = manifest.get("made_by"), trust.verdict(container)
    data = {
        "made_by": builder, "trusted": verdict.trusted, "why": verdict.why, "entries": rows, "targets": kernels,
        "members": members, "weights": weights,
        "signers": [[s.key, s.name, s.state] for s in trust.signers(container)],
    }  # fmt: skip
    told = ", ".join(f"{k} {v}" for k, v in builder.items()) if isinstance(builder, dict) else "unknown"
    return Facts(data, f"made by {told}; {verdict.why}", texts)
