"""Files with a few bytes or values changed, by the thousand: each ends in one clear error or an answer, soon and small.

    python tests/mutations.py FOLDER [--count 20000] [--part 1/4] [--kinds onnx,tables]

Seeds are worked through in chunks, each in a process of its own; a chunk that is done has a line in FOLDER/done.jsonl,
so that a run that was stopped goes on where it was. `--part` takes every n-th chunk. A fault is an error that is not
ours, a wrong answer, more than 5 seconds or 500 MB for one file, or the end of the process. At the end stands a table.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).parent
CHUNK, SECONDS, MEGABYTES = 1000, 5, 500
# Of 20,000 files, how many are of each kind.
SHARES = {"artifact": 0.3, "tables": 0.3, "onnx": 0.25, "mlir": 0.1, "bytecode": 0.05}
STRANGE = [None, True, -1, 0, 1, 2**63, 1e308, "", "x", "__import__('os')", [], {}, ["v", 0], ["size", "s0"]]
Attempt = Callable[[int], str]  # of a seed: what became of it


# --- changes ---


def changed_bytes(data: bytes, rng: random.Random) -> bytes:
    """A file with some bytes changed, taken out, or put in."""
    copy = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        if not copy:
            return b""
        at, kind = rng.randrange(len(copy)), rng.randrange(6)
        if kind == 0:
            copy[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            copy[at : at + rng.randint(1, 64)] = rng.randbytes(rng.randint(0, 64))
        elif kind == 2 and rng.random() < 0.5:
            del copy[at:]
        elif kind == 3:
            copy[at : at + 8] = struct.pack("<Q", rng.choice([0, 1, 2**31, 2**63, 2**64 - 1]))
        elif kind == 4:
            del copy[at : at + rng.randint(1, 8)]
        else:
            copy[at] = rng.randrange(256)
    return bytes(copy)


def changed_json(node: object, rng: random.Random) -> object:
    """The same JSON with one value somewhere replaced."""
    if isinstance(node, (list, dict)) and node and rng.random() < 0.9:
        key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        copy = dict(node) if isinstance(node, dict) else list(node)
        copy[key] = changed_json(copy[key], rng)  # type: ignore[index]
        return copy
    return rng.choice(STRANGE)


def changed_text(text: str, rng: random.Random) -> str:
    """A few characters replaced or taken out."""
    characters = list(text)
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(characters))
        characters[place] = rng.choice("0123456789xf<>{}()%#@, -=") if rng.random() < 0.7 else ""
    return "".join(characters)


# --- one file of each kind ---


def artifact(folder: Path) -> Attempt:
    """Bytes of an artifact: every answer is the model's."""
    import torch

    import tessera
    from tessera.util.errors import ArtifactError

    model, path, x = _exported(folder)
    data = path.read_bytes()
    with torch.no_grad():
        expected = model(x)

    def attempt(seed: int) -> str:
        target = folder / "changed.tess"
        target.write_bytes(changed_bytes(data, random.Random(seed)))
        try:
            with torch.no_grad():
                out = tessera.load(target, compile=False)(x)
        except ArtifactError:
            return "refused"
        return "answered" if torch.allclose(out, expected, atol=1e-5) else "fault: a wrong answer"

    return attempt


def tables(folder: Path) -> Attempt:
    """Values of an artifact's manifest and tables, hashed again. What a program computes that was changed is its
    author's business, and what PyTorch's operators say of arguments that do not fit is theirs to say."""
    import torch

    import tessera
    from tessera.util.errors import ArtifactError, InputError

    sys.path.insert(0, str(HERE / "artifact"))
    from hostile import Parts

    _, path, x = _exported(folder)

    def attempt(seed: int) -> str:
        rng, parts = random.Random(seed), Parts.of(path)
        if rng.random() < 0.3:
            manifest = changed_json(parts.manifest, rng)
            parts.manifest = manifest if isinstance(manifest, dict) else {}
        else:
            parts.put(changed_json(parts.program(), rng))  # type: ignore[arg-type]
        try:
            m = tessera.load(parts.write(folder / "changed.tess"), compile=False, trust=False)
        except ArtifactError:
            return "refused"
        try:
            with torch.no_grad():
                m(x)
        except (InputError, RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):
            return "refused when it was called"
        return "answered"

    return attempt


def _exported(folder: Path) -> tuple:
    import torch

    import tessera

    torch.manual_seed(0)
    layers = [torch.nn.LayerNorm(16), torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)]
    model, x = torch.nn.Sequential(*layers).eval(), torch.randn(3, 16)
    path = folder / "good.tess"
    tessera.export(model, (torch.randn(8, 16),), path, dynamic={"input": {0: ("batch", 1, 64)}})
    return model, path, x


def onnx(_: Path) -> Attempt:
    import torch

    from tessera import onnx as tessera_onnx
    from tessera.util.errors import TesseraError

    sys.path.insert(0, str(HERE / "frontends" / "onnx"))
    from graphs import convolutional

    data, x = convolutional(), torch.ones(1, 1, 4, 4)

    def attempt(seed: int) -> str:
        try:
            net = tessera_onnx.load(changed_bytes(data, random.Random(seed)), compile=False)
            net(*[x] * len(net.input_names))
        except TesseraError as error:
            return "refused" if str(error) else "fault: an error without a message"
        return "answered"

    return attempt


MLIR = """module {
  func.func public @main(%a: tensor<4xf32>) -> tensor<4xf32> {
    %c = stablehlo.constant dense<[1.0, 2.0, 3.0, 4.0]> : tensor<4xf32>
    %0 = stablehlo.add %a, %c : tensor<4xf32>
    %1 = func.call @twice(%0) : (tensor<4xf32>) -> tensor<4xf32>
    return %1 : tensor<4xf32>
  }
  func.func private @twice(%a: tensor<4xf32>) -> tensor<4xf32> {
    %0 = stablehlo.multiply %a, %a : tensor<4xf32>
    return %0 : tensor<4xf32>
  }
}"""


def mlir(_: Path) -> Attempt:
    return _stablehlo(lambda rng: changed_text(MLIR, rng).encode())


def bytecode(_: Path) -> Attempt:
    from tessera.frontends.stablehlo.bindings import bindings, context

    with context():
        hlo = bindings().stablehlo
        data = hlo.serialize_portable_artifact(bindings().ir.Module.parse(MLIR), hlo.get_minimum_version())
    return _stablehlo(lambda rng: data[:4] + changed_bytes(data[4:], rng))


def _stablehlo(change: Callable[[random.Random], bytes]) -> Attempt:
    import torch

    from tessera.stablehlo import load
    from tessera.util.errors import TesseraError

    def attempt(seed: int) -> str:
        try:
            load(change(random.Random(seed)))(torch.ones(4))
        except TesseraError as error:
            return "refused" if str(error) else "fault: an error without a message"
        return "answered"

    return attempt


KINDS: dict[str, Callable[[Path], Attempt]] = {f.__name__: f for f in (artifact, tables, onnx, mlir, bytecode)}


# --- a chunk, in a process of its own ---


def run_chunk(kind: str, first: int, last: int) -> None:
    """One line a seed: before it is tried its number, after it what became of it."""
    with tempfile.TemporaryDirectory() as folder:
        attempt = KINDS[kind](Path(folder))
        attempt(first)  # what is done once is nobody's time
        for seed in range(first, last):
            print(seed, end=" ", flush=True)
            before, start = _reset_peak(), time.process_time()
            try:
                said = attempt(seed)
            except BaseException:  # whatever it is, it is a fault of ours
                said = "fault: " + traceback.format_exc(limit=-4).replace("\n", " | ")
            seconds, grown = time.process_time() - start, (_memory("VmHWM") - before) / 1024
            if seconds > SECONDS or grown > MEGABYTES:
                said = f"fault: {seconds:.1f} s, {grown:.0f} MB; {said}"
            print(said, flush=True)


def _reset_peak() -> int:
    """Kilobytes that are held now, from which on the peak counts. Without /proc nothing is measured."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(field: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


# --- all of them ---


def chunks(count: int) -> Iterator[tuple[str, int, int]]:
    for kind, share in SHARES.items():
        most = round(count * share)
        for first in range(0, most, CHUNK):
            yield kind, first, min(first + CHUNK, most)


def worked_through(kind: str, first: int, last: int) -> dict[str, object]:
    """What became of the files of a chunk. A process that ended is a fault of its last file; the next goes on."""
    counts, faults = collections.Counter[str](), list[str]()
    at = first
    while at < last:
        command = [sys.executable, __file__, "--chunk", kind, str(at), str(last)]
        environment = {**os.environ, "TESSERA_KEYS": str(Path(tempfile.gettempdir()) / "tessera-mutations-keys")}
        limit = (last - at) * SECONDS
        try:
            run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit + 60)
            out, how = run.stdout, f"ended with {run.returncode}: {run.stderr[-300:]}"
        except subprocess.TimeoutExpired as error:
            out, how = (error.stdout or b"").decode(), f"took more than {limit} s"
        for line in out.splitlines():
            seed, _, said = line.partition(" ")
            said = said or f"fault: the process {how}"
            counts[said.partition(":")[0]] += 1
            faults += [f"{kind} {seed}: {said}"] if said.startswith("fault") else []
            at = int(seed) + 1
        if not out:
            raise RuntimeError(f"{kind}: nothing ran; the process {how}")
    return {"kind": kind, "first": first, "last": last, "counts": counts, "faults": faults}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--chunk", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.chunk:
        run_chunk(asked.chunk[0], int(asked.chunk[1]), int(asked.chunk[2]))
        return 0
    part, parts = map(int, asked.part.split("/"))
    asked.folder.mkdir(parents=True, exist_ok=True)
    state = asked.folder / "done.jsonl"
    done = [json.loads(line) for line in state.read_text().splitlines()] if state.exists() else []
    known = {(row["kind"], row["first"], row["last"]) for row in done}
    wanted = [c for c in chunks(asked.count) if c[0] in asked.kinds.split(",")][part - 1 :: parts]
    for chunk in wanted:
        if chunk not in known:
            done.append(worked_through(*chunk))
            with state.open("a") as file:
                file.write(json.dumps(done[-1]) + "\n")
    totals: dict[str, collections.Counter] = {}
    for row in done:
        totals.setdefault(row["kind"], collections.Counter()).update(row["counts"])
    for kind, counts in totals.items():
        print(f"{kind:10} {sum(counts.values()):6}  " + ", ".join(f"{n} {said}" for said, n in counts.most_common()))
    faults = [fault for row in done for fault in row["faults"]]
    print(*faults, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
