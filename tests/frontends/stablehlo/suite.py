"""Runs a folder of self-checking StableHLO programs: python tests/frontends/stablehlo/suite.py FOLDER [--half]
[--compiled].

Each file runs in a forked process with a time limit. A program passes when its `check.expect_*` calls hold. At the
end stands a table: pass, wrong, unsupported, error, timeout.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import resource
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

import tessera
from tessera.frontends.stablehlo import operators  # noqa: F401
from tessera.frontends.stablehlo.parse import parse
from tessera.frontends.stablehlo.registry import CUSTOM_CALLS, NoMeaningError, custom_call
from tessera.frontends.stablehlo.run import Interpreter
from tessera.frontends.stablehlo.values import tensor_of
from tessera.util.errors import CaptureError

_CONST = re.compile(r"check\.(expect_\w+)_const (%[\w#]+),\s*(.*?>)\s*:\s*(tensor<[^\n]*>)(?:\n|$)", re.DOTALL)
_GENERIC = re.compile(
    r'"check\.(expect_\w+)_const"\((%[\w#]+)\) <\{value = (.*?>) : (tensor<[^\n]*?>)\}> : [^\n]*\n', re.DOTALL
)
_PAIR = re.compile(r"check\.(expect_\w+) (%[\w#]+), (%[\w#]+)(?: \{[^}]*\})? : (tensor<[^\n]*>)\n")
CHECKS: list[tuple[str, object, object, dict]] = []


def readable(text: str) -> str:
    """The check dialect, which jaxlib does not know, as constants and custom calls."""
    count = iter(range(1 << 20))

    def constant(m: re.Match) -> str:
        name = f"%expected_{next(count)}"
        return (
            f"{name} = stablehlo.constant {m[3]} : {m[4]}\n"
            f"stablehlo.custom_call @check.{m[1]}({m[2]}, {name}) {{has_side_effect = true}} : ({m[4]}, {m[4]}) -> ()\n"
        )

    def pair(m: re.Match) -> str:
        return f"stablehlo.custom_call @check.{m[1]}({m[2]}, {m[3]}) : ({m[4]}, {m[4]}) -> ()\n"

    return _PAIR.sub(pair, _CONST.sub(constant, _GENERIC.sub(constant, text)))


def _check(kind: str):  # noqa: ANN202
    def run(site, actual, expected):  # noqa: ANN001, ANN202
        CHECKS.append((kind, actual, expected, {"element": site.operand(0).element, "site": site}))
        if kind == "eq":
            return [torch.tensor(True)]
        return []

    return run


for _kind in ("expect_eq", "expect_close", "expect_almost_eq", "eq"):
    custom_call(f"check.{_kind}")(_check(_kind))


def holds(kind: str, actual: torch.Tensor, expected: torch.Tensor, element) -> str:  # noqa: ANN001
    """Nothing, or what is wrong."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"{actual.dtype}{tuple(actual.shape)} for {expected.dtype}{tuple(expected.shape)}"
    if actual.is_complex():
        actual, expected = torch.view_as_real(actual.resolve_conj()), torch.view_as_real(expected.resolve_conj())
    same = actual == expected
    if actual.is_floating_point():
        same |= actual.isnan() & expected.isnan()
    if kind == "expect_close" and actual.is_floating_point():
        same |= ulps(actual, expected) <= 3
    elif kind in ("expect_almost_eq", "expect_close") and actual.is_floating_point():
        same |= (actual.double() - expected.double()).abs() <= 1e-4 * expected.double().abs().clamp(min=1)
    if bool(same.all()):
        return ""
    bad = (~same).nonzero()[:3].tolist()
    shown = [(actual[tuple(b)].item(), expected[tuple(b)].item()) for b in bad]
    worst = f", {int(ulps(actual, expected)[~same].max())} ulps" if actual.is_floating_point() else ""
    return f"{kind}: {int((~same).sum())} of {same.numel()} differ{worst}: (got, expected) {shown}"


def ulps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    lowest = torch.iinfo(bits).min

    def ordered(x: torch.Tensor) -> torch.Tensor:
        i = x.contiguous().view(bits)
        return torch.where(i < 0, lowest - i, i).to(torch.int64)

    far = (ordered(a) - ordered(b)).abs()
    return torch.where(a.isnan() | b.isnan(), torch.where(a.isnan() & b.isnan(), 0, 1 << 40), far)


def run_part(text: str, compiled: bool) -> list[str]:
    if "func.func" not in text and "func @" not in text:
        return []
    module = parse(readable(text), "program")
    starts = [module.main] if "main" in module.functions else list(module.functions.values())
    faults = []
    for function in starts:
        if function.body.arguments:
            continue
        CHECKS.clear()
        pairs = compiled_pairs(module, function) if compiled else eager_pairs(module, function)
        faults += [f for kind, a, b, element in pairs if (f := holds(kind, a, b, element))]
    return faults


def eager_pairs(module, function) -> list:  # noqa: ANN001
    cpu = torch.device("cpu")
    CHECKS.clear()
    Interpreter(module, cpu, 1 << 33, {}).call(function.name, [])
    return [(k, tensor_of(a, cpu), tensor_of(b, cpu), c["element"]) for k, a, b, c in CHECKS]


def compiled_pairs(module, function) -> list:  # noqa: ANN001
    cpu = torch.device("cpu")
    constants: dict = {}
    kinds: list = []

    def program(zero: torch.Tensor) -> list:
        CHECKS.clear()
        Interpreter(module, cpu, 1 << 33, constants).call(function.name, [])
        kinds[:] = [(k, c["element"]) for k, _, _, c in CHECKS]
        return [tensor_of(v, cpu).clone() for _, a, b, _ in CHECKS for v in (a, b)]

    try:
        out = tessera.jit(program, frontend="functional")(torch.zeros(()))
    except CaptureError:  # `tessera.stablehlo.load` interprets it, too
        return eager_pairs(module, function)
    return [(k, out[2 * i], out[2 * i + 1], e) for i, (k, e) in enumerate(kinds)]


def run_file(path: Path, compiled: bool) -> tuple[str, str]:
    try:
        faults = []
        for part in path.read_text().split("// -----"):
            faults += run_part(part, compiled)
    except NoMeaningError as error:
        return "unsupported", str(error)
    except Exception as error:  # noqa: BLE001 - the table says which
        place = traceback.extract_tb(error.__traceback__)[-1]
        return "error", f"{type(error).__name__}: {str(error)[:300]} ({Path(place.filename).name}:{place.lineno})"
    return ("wrong", "; ".join(faults)[:400]) if faults else ("pass", "")


def forked(path: Path, compiled: bool, limit: float) -> tuple[str, str]:
    """The same in a process of its own: a crash or an endless loop is one row of the table."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 5))  # the machine may be shared
        os.write(writer, json.dumps(run_file(path, compiled)).encode()[:60000])
        os._exit(0)
    os.close(writer)
    data = b""
    while chunk := os.read(reader, 1 << 16):
        data += chunk
    os.close(reader)
    _, status = os.waitpid(child, 0)
    if data:
        verdict, why = json.loads(data)
        return verdict, why
    return ("timeout", f"{limit:.0f} s") if os.WTERMSIG(status) == signal.SIGXCPU else ("error", f"status {status}")


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("folder", type=Path)
    options.add_argument("--half", action="store_true", help="files at even places of the sorted list")
    options.add_argument("--every", type=int, default=1)
    options.add_argument("--first", type=int, default=0, help="where the sample begins")
    options.add_argument("--seconds", type=float, default=1e9, help="stop after this time, with the table so far")
    options.add_argument("--only", default="")
    options.add_argument("--compiled", action="store_true")
    options.add_argument("--limit", type=float, default=30, help="CPU seconds of a file")
    options.add_argument("--show", type=int, default=400)
    given = options.parse_args()
    files = sorted(given.folder.rglob("*.mlir"))[:: 2 if given.half else 1][given.first :: given.every]
    files = [f for f in files if re.search(given.only, f.name)]
    table: collections.Counter = collections.Counter()
    start = time.time()
    for path in files:
        if time.time() - start > given.seconds:
            break
        verdict, why = forked(path, given.compiled, given.limit)
        table[verdict] += 1
        if verdict != "pass":
            print(f"{verdict:12} {path.name[:70]:70} {why[: given.show]}", flush=True)
    print({k: table[k] for k in ("pass", "wrong", "unsupported", "error", "timeout")}, f"{time.time() - start:.0f} s")
    assert CUSTOM_CALLS
    sys.exit(0)


if __name__ == "__main__":
    main()
