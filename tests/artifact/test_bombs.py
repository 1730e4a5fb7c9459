"""Artifacts of which a few bytes ask for much time or memory, or hold text that would be code: one error each, soon."""

from __future__ import annotations

import copy
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path

import hostile
import pytest
import torch
from hostile import Parts

import tessera
from tessera.artifact import write as artifact_write
from tessera.util.errors import ArtifactError, OptionError

Change = Callable[[Parts], None]


def tables(change: Callable[[dict], object]) -> Change:
    def apply(parts: Parts) -> None:
        data = parts.program()
        change(data["tables"])
        data["program"] = len(data["tables"]["traces"]) - 1
        parts.put(data)

    return apply


def header(rows: dict, data: bytes = b"", **views: list) -> Change:
    def apply(parts: Parts) -> None:
        parts.members["weights.safetensors"] = hostile.weights(json.dumps(rows).encode(), data)
        parts.manifest["views"] = views

    return apply


def member(text: bytes) -> Change:
    return lambda parts: parts.members.__setitem__(hostile.PROGRAM, text)


# --- programs ---


def condition(text: str) -> Change:
    def apply(data: dict) -> None:
        data["ops"].append(["special", "check"])
        equations = data["traces"][-1]["equations"]
        equations.insert(0, [len(data["ops"]) - 1, [text, "no"], [], [], 0, *equations[0][5:]])

    return tables(apply)


def calls(twice: int, name: str) -> Change:
    """Programs each of which calls the one before it twice."""

    def apply(data: dict) -> None:
        last = data["traces"][-1]
        data["ops"].append(["special", name])
        result = data["values"][last["outputs"][0][1]][1]
        for turn in range(twice):
            number, equations = len(data["traces"]) - 1, []
            for half in "ab":
                data["values"].append([f"called_{turn}{half}", result])
                args = [["trace", number], *(["v", i] for i in last["inputs"])]
                equations.append([len(data["ops"]) - 1, args, [], [len(data["values"]) - 1], 1, 0, 0])
            called = {"equations": equations, "outputs": [["v", len(data["values"]) - 1]], "constants": []}
            data["traces"].append({**copy.deepcopy(last), "name": f"turn{turn}", **called})

    return tables(apply)


def constant(stored: list) -> Change:
    def apply(data: dict) -> None:
        data["values"].append(["stored", 0])
        data["traces"][-1]["constants"].append([len(data["values"]) - 1, stored])

    return tables(apply)


def operator(row: list, *args: object) -> Change:
    def apply(data: dict) -> None:
        data["ops"].append(row)
        equations = data["traces"][-1]["equations"]
        equations.insert(0, [len(data["ops"]) - 1, list(args), [], [], 0, *equations[0][5:]])

    return tables(apply)


def entries(count: int) -> Change:
    def apply(parts: Parts) -> None:
        main = parts.manifest["entries"]["main"]
        parts.manifest["entries"].update({f"e{i}": main for i in range(count)})

    return apply


BYTE = {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}
CORPUS: dict[str, tuple[Change, str]] = {
    "a string of escaped quotes without an end": (member(b'{"a":"' + b'\\"' * 3_000_000), "expected JSON"),
    "a string of escapes without an end": (member(b'["a","' + b'\\\\\\"' * 1_500_000), "expected JSON"),
    "a string of megabytes": (member(b'{"a":"' + b"a" * 8_000_000 + b'"}'), "tables of version"),
    "a fraction of a million digits": (member(b'{"a":1.' + b"9" * 1_000_000 + b"}"), "tables of version"),
    "brackets that close nothing": (member(b"]" * 8_000_000), "a bracket that nothing opened"),
    "JSON in another encoding": (member("{}".encode("utf-16")), "expected JSON"),
    "half a character": (member(b'{"version":"\\ud800"}'), "expected JSON"),
    "a million objects": (member(b"[" + b'{"a":1},' * 1_000_000 + b"1]"), "at most 500000 values"),
    "thousands of entries of one program": (entries(5000), "at most 500000 values"),
    "an entry whose name is half a character": (
        lambda p: p.manifest["entries"].__setitem__("\ud800", p.manifest["entries"]["main"]),
        "expected JSON",
    ),
    "an entry whose name is none": (
        lambda p: p.manifest["entries"].__setitem__("a b", p.manifest["entries"]["main"]),
        "plain names of entries",
    ),
    "a hundred thousand tensors": (
        header({str(i): {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(100_000)}),
        "values|a table of tensors",
    ),
    "a view whose elements nobody can count": (
        header({"w": BYTE}, bytes(64), w=["uint8", [1 << 39] * 60 + [64], [0] * 60 + [1]]),
        "a view that fits",
    ),
    "keys that are lists": (
        lambda p: p.manifest["entries"]["main"].__setitem__("out", ["dict", [["x"]], [["leaf"]]]),
        "texts or numbers as keys",
    ),
    "a power of powers": (condition("(" * 12 + "9" + "**8)" * 12 + " > 0"), "condition over sizes"),
    "programs that call others twice, and so on": (calls(40, "call"), "at most 500000 equations"),
    "checkpoints of checkpoints": (calls(40, "checkpoint"), "at most 500000 equations"),
    "a constant of four bytes over gigabytes": (
        constant(["float32", [2], [1 << 34], "cpu", "AAAAAAAAAAA="]),
        "elements",
    ),
    "an operator of TorchScript's that writes a file": (operator(["op", "aten", "save", "default"]), "no operator"),
    "an operator of TorchScript's that seeds": (operator(["op", "aten", "manual_seed", "default"], 1), "no operator"),
    "an operator claimed by nobody": (operator(["of", "dist", "f", True, ["op", "aten", "add", "Tensor"]]), "a name"),
}


@pytest.mark.parametrize("name", CORPUS)
def test_ends_in_one_error(name: str, mlp_file: Path, tmp_path: Path) -> None:
    change, expected = CORPUS[name]
    parts = Parts.of(mlp_file)
    change(parts)
    path = parts.write(tmp_path / "hostile.tess")
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ArtifactError, match=expected) as caught:
        tessera.load(path, compile=False, trust=False)
    assert str(caught.value).startswith(str(path)) and len(str(caught.value)) < 1000
    str(caught.value).encode()
    assert time.process_time() - start < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 * 1024


@pytest.mark.parametrize("text", ["1 // 0 == 0", "1e308 ** 8 > 0", "builtins.int(1e999) > 0"])
def test_a_condition_without_a_value_does_not_hold(text: str, mlp_file: Path, tmp_path: Path) -> None:
    parts = Parts.of(mlp_file)
    condition(text)(parts)
    m = tessera.load(parts.write(tmp_path / "m.tess"), compile=False, trust=False)
    with pytest.raises(RuntimeError, match="no"):
        m(torch.randn(8, 16))


@pytest.mark.parametrize("place", ["note", "module", "file"])
def test_where_an_equation_comes_from_is_no_code(place: str, mlp_file: Path, tmp_path: Path) -> None:
    """It stands in comments of what is printed, and of exchanges between processes in what is run."""
    code = f"x\n    open({str(tmp_path / 'ran')!r}, 'w')\r    #\x0b"

    def apply(data: dict) -> None:
        data["places"].append([code if place == "file" else "f.py", 1])
        told = [code if place == part else "m" for part in ("module", "note")]
        data["sources"].append([len(data["places"]) - 1, *told])
        for equation in data["traces"][-1]["equations"]:
            equation[5] = len(data["sources"]) - 1

    parts = Parts.of(mlp_file)
    tables(apply)(parts)
    m = tessera.load(parts.write(tmp_path / "m.tess"), compile=False, trust=False)
    m(torch.randn(8, 16))
    for equation in m.entries["main"].program.trace.equations:
        assert str(equation.source).isprintable()
    assert not (tmp_path / "ran").exists()


def test_what_would_not_be_read_is_not_written(
    mlp: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifact_write, "MOST_VALUES", 50)
    with pytest.raises(OptionError, match="at most 50 are read"):
        tessera.export(mlp, (torch.randn(8, 16),), tmp_path / "m.tess")
    assert list(tmp_path.iterdir()) == []
