"""What `export` writes, `load` runs: the same numbers, writes, views and structure as the model itself."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tessera
from tessera.artifact.container import Container
from tessera.artifact.inspect import facts_of
from tessera.tile.targets.cpu.levels import LEVELS, levels_here
from tessera.util.errors import CaptureError, InputError, OptionError

WAYS = ("kernels", "aten", "compiled")


def loaded(path: Path, way: str) -> Callable:
    return tessera.load(path, trust=way == "kernels", compile=way == "compiled")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_same_numbers(mlp: nn.Module, mlp_file: Path, way: str, batch: int) -> None:
    x = torch.randn(batch, 16)
    with torch.no_grad():
        torch.testing.assert_close(loaded(mlp_file, way)(x), mlp(x))


def test_kernels_of_the_file_run(mlp_file: Path) -> None:
    if not levels_here():
        pytest.skip("this machine is of no level that is known")
    told = tessera.load(mlp_file).explain()
    assert "built by this user" in told and f"kernels for cpu:{levels_here()[0]}" in told and "mapped" in told
    assert "every operator by PyTorch" in tessera.load(mlp_file, trust=False, compile=False).explain()


UNIMPORTABLE = """
import importlib, json, sys
BLOCKED = ("torch._dynamo", "torch._inductor", "sympy", "xdsl", "llvmlite", "triton", "cuda.tile", "rich")

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(BLOCKED):
            raise ImportError(name)

sys.meta_path.insert(0, Refuses())
import torch
import tessera
torch.manual_seed(0)
args = torch.randn(3, 16), torch.tensor(2)
for path in sys.argv[1:]:
    m = tessera.load(path)
    with torch.no_grad():
        y = m(*args[:m.main.arguments.count])
    y = y[0] if isinstance(y, tuple) else y
    present = [name for name in BLOCKED if name in sys.modules]
    print(json.dumps({"y": y.tolist(), "told": m.explain(), "present": present}))
from tessera.artifact.specials import OVERLOADS, SPECIALS
for module in sorted({*SPECIALS.values(), *OVERLOADS.values()}):
    importlib.import_module(module)
"""


def test_runs_without_the_compiler(mlp: nn.Module, mlp_file: Path, tmp_path: Path) -> None:
    """With everything that compiles made unimportable, and no C compiler on the path: a model, one that makes claims
    about numbers, and every operator that a file may name."""
    tessera.export(Chooses(), (torch.randn(4, 16), torch.tensor(3)), tmp_path / "m.tess", dynamic={"x": {0: "length"}})
    environment = {**os.environ, "PATH": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", UNIMPORTABLE, str(mlp_file), str(tmp_path / "m.tess")]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    plain, claiming = map(json.loads, run.stdout.splitlines())
    torch.manual_seed(0)
    x = torch.randn(3, 16)
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(plain["y"]), mlp(x))
    torch.testing.assert_close(torch.tensor(claiming["y"]), Chooses()(x, torch.tensor(2))[0])
    assert plain["present"] == claiming["present"] == []
    if levels_here():
        assert "regions by kernels of the file" in plain["told"]


LIGHT = """
import importlib, sys, torch, tessera
tessera.load(sys.argv[1])
from tessera.artifact.specials import OVERLOADS, SPECIALS
for module in sorted({*SPECIALS.values(), *OVERLOADS.values(), "tessera.serve.engine", "tessera.serve.invariant"}):
    importlib.import_module(module)
torch.ops.tessera.uniform(torch.tensor([3]), [4], dtype=torch.float32)
pool, two = torch.zeros(2, 4, 1, 8), torch.ones(2, 1, 8)
torch.ops.tessera.paged_write(pool, two, torch.tensor([1, 2]))
assert pool.sum() == 16
torch.ops.tessera.invariant_linear(torch.ones(3, 8), torch.ones(4, 8), None)
print([m for m in sys.argv[2:] if m in sys.modules])
"""


def test_a_process_that_loads_imports_no_compiler(mlp_file: Path) -> None:
    """Whatever a file may call is there without it, and the operators of an engine are."""
    names = ["torch._dynamo", "torch._inductor", "sympy", "xdsl", "llvmlite", "triton", "tessera.api"]
    command = [sys.executable, "-c", LIGHT, str(mlp_file), *names]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == "[]", run.stderr


# --- what models do ---


class Cache(nn.Module):
    """Writes a buffer and an argument, and gives views of both."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(2, 8, 4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, at: Tensor, out: Tensor) -> dict[str, object]:
        self.calls.add_(1)
        self.cache.index_copy_(1, at, x)
        out.add_(x[:, 0])
        total = self.cache.sum(1)
        return {"total": total, "row": out[0], "cache": self.cache, "rest": (total.t(), 3, None)}


@pytest.mark.parametrize("way", WAYS)
def test_writes_views_and_structure(way: str, tmp_path: Path) -> None:
    x, at = torch.randn(2, 1, 4), torch.tensor([3])
    tessera.export(Cache().eval(), (x, at, torch.zeros(2, 4)), tmp_path / "m.tess")
    model, m = Cache().eval(), loaded(tmp_path / "m.tess", way)
    mine, theirs = torch.ones(2, 4), torch.ones(2, 4)
    with torch.no_grad():
        for step in range(3):
            place = torch.tensor([step])
            want, got = model(x + step, place, theirs), m(x + step, place, mine)
            assert list(got) == list(want) and got["rest"][1:] == (3, None)
            for key in ("total", "row", "cache"):
                torch.testing.assert_close(got[key], want[key])
            torch.testing.assert_close(mine, theirs)
    assert got["row"].data_ptr() == mine.data_ptr()
    assert got["rest"][0].data_ptr() == got["total"].data_ptr()
    assert got["cache"] is m(x, at, mine)["cache"]


def test_a_file_is_not_changed_by_what_is_written(tmp_path: Path) -> None:
    """The pages of the file are shared until somebody writes; then they are this object's own."""
    path, x = tmp_path / "m.tess", torch.randn(2, 1, 4)
    tessera.export(Cache().eval(), (x, torch.tensor([0]), torch.zeros(2, 4)), path)
    before = path.read_bytes()
    first, second = tessera.load(path), tessera.load(path)
    first(x, torch.tensor([1]), torch.zeros(2, 4))
    assert path.read_bytes() == before
    fresh = second(torch.zeros(2, 1, 4), torch.tensor([0]), torch.zeros(2, 4))
    assert fresh["total"].abs().sum() == 0


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x) + torch.randn(x.shape)


@pytest.mark.parametrize("way", WAYS)
def test_random_numbers_are_eagers(way: str, tmp_path: Path) -> None:
    x = torch.zeros(5, 3)
    tessera.export(Noise(), (x,), tmp_path / "m.tess")
    m = loaded(tmp_path / "m.tess", way)
    torch.manual_seed(3)
    got = m(x)
    torch.manual_seed(3)
    torch.testing.assert_close(got, Noise()(x))
    assert not torch.equal(m(x), m(x))


@dataclasses.dataclass
class Given:
    first: Tensor
    nothing: Tensor | None = None
    second: Tensor | None = None


torch.export.register_dataclass(Given, serialized_type_name="tests.Given")


def test_a_dataclass_comes_back_as_its_fields(tmp_path: Path) -> None:
    class Model(nn.Module):
        def forward(self, given: Given) -> Given:
            return Given(given.first * 2, second=given.first + given.second)

    x = Given(torch.randn(3), second=torch.ones(3))
    tessera.export(Model(), (x,), tmp_path / "m.tess")
    out = tessera.load(tmp_path / "m.tess")(x)
    assert out._fields == ("first", "nothing", "second") and out.nothing is None
    torch.testing.assert_close((out.first, out.second), (x.first * 2, x.first + 1))
    with pytest.raises(InputError, match="expected None"):
        tessera.load(tmp_path / "m.tess")(Given(x.first, x.first, x.first))


def test_what_operators_give_by_name_comes_back_by_name(tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    tessera.export(lambda x: (x.max(1), torch.linalg.slogdet(x @ x.mT)), (x,), tmp_path / "m.tess")
    most, determinant = tessera.load(tmp_path / "m.tess")(x)
    assert most._fields == ("values", "indices") and determinant._fields == ("sign", "logabsdet")
    torch.testing.assert_close(tuple(most), tuple(x.max(1)))


Pair = collections.namedtuple("Pair", ["first", "second"])


def test_structures(tmp_path: Path) -> None:
    def fn(pair: list[Tensor], named: dict[str, Tensor], flag: bool, scale: float) -> Pair:
        return Pair(pair[0] + named["b"] * scale if flag else pair[1], [named["a"]])

    a, b = torch.ones(3), torch.full((3,), 2.0)
    tessera.export(fn, ([a, b], {"a": a, "b": b}, True, 0.5), tmp_path / "m.tess")
    m = tessera.load(tmp_path / "m.tess")
    got = m([a, b], {"b": b, "a": b}, scale=0.5, flag=True)
    assert type(got).__name__ == "Pair" and got.first.tolist() == [2, 2, 2] and got.second[0] is b
    with pytest.raises(InputError, match="flag: expected True, which the program was exported for, got False"):
        m([a, b], {"a": a, "b": b}, False, 0.5)
    with pytest.raises(InputError, match="expected a dict with the keys a, b"):
        m([a, b], {"a": a}, True, 0.5)
    with pytest.raises(InputError, match="expected a list of 2, got list of 1"):
        m([a], {"a": a, "b": b}, True, 0.5)


def test_entries_share_weights(tmp_path: Path) -> None:
    first = nn.Linear(8, 8).eval()
    second = nn.Sequential(first, nn.ReLU()).eval()
    x = torch.randn(2, 8)
    tessera.export({"plain": (first, (x,)), "relu": (second, (x,), {"input": {0: "n"}})}, path=tmp_path / "m.tess")
    m = tessera.load(tmp_path / "m.tess")
    with torch.no_grad():
        torch.testing.assert_close(m.plain(x), first(x))
        torch.testing.assert_close(m.entries["relu"](x[:1].expand(5, 8)), second(x[:1].expand(5, 8)))
    with Container.open(tmp_path / "m.tess") as file:
        entries = file.manifest["entries"]
        assert entries["plain"]["held"] == entries["relu"]["held"] == ["weight", "bias"]
    with pytest.raises(InputError, match="expected one of the entries plain, relu"):
        m(x)


def test_weights_with_strides_of_their_own(tmp_path: Path) -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last).eval()
    model.register_buffer("wide", torch.ones(1).expand(7))
    model.register_buffer("part", torch.arange(20.0).view(4, 5)[:, 1:3])
    model.register_buffer("empty", torch.zeros(0, 2))

    def forward(x: Tensor) -> tuple[Tensor, ...]:
        return nn.Conv2d.forward(model, x), model.wide * 2, model.part + 1, model.empty + 1

    model.forward = forward  # type: ignore[method-assign]
    x = torch.randn(1, 3, 8, 8)
    tessera.export(model, (x,), tmp_path / "m.tess")
    with torch.no_grad():
        for got, want in zip(tessera.load(tmp_path / "m.tess")(x), model(x), strict=True):
            torch.testing.assert_close(got, want)


def test_a_size_of_two_arguments(tmp_path: Path) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    example = (torch.randn(4, 3), torch.randn(4, 1))
    tessera.export(fn, example, tmp_path / "m.tess", dynamic={"x": {0: "n"}, "y": {0: "n"}})
    m = tessera.load(tmp_path / "m.tess")
    assert m(torch.randn(9, 3), torch.randn(9, 1)).shape == (9, 3)
    with pytest.raises(InputError, match="expected n = 9, the size of another argument, got 8"):
        m(torch.randn(9, 3), torch.randn(8, 1))


def test_sizes_are_told_by_their_names(mlp_file: Path, tmp_path: Path) -> None:
    assert "main(x: float32[batch, 16] on cpu)" in tessera.load(mlp_file).explain()
    with Container.open(mlp_file) as file:
        facts = facts_of(file)
        assert facts.data["entries"][0][1:3] == ["x: float32[batch, 16] on cpu", "batch 1..64"]
        for member in facts.texts.values():
            text = file.read(member).decode()
            assert "f32[batch, 16]" in text and not re.search(r"\bs\d+\b", text)
    # A name that a value of the program has too is no name of a size there.
    tessera.export(nn.ReLU(), (torch.randn(4, 3),), tmp_path / "m.tess", dynamic={"input": {0: "input", 1: "rows"}})
    with Container.open(tmp_path / "m.tess") as file:
        assert re.search(r"input: f32\[s\d+, rows\]", file.read("texts/main/portable.py").decode())
    with pytest.raises(InputError, match=r"input: expected float32\[input, rows\] on cpu"):
        tessera.load(tmp_path / "m.tess")(torch.randn(3))


@pytest.mark.parametrize("way", WAYS)
def test_sizes_computed_from_one_that_no_argument_has(tmp_path: Path, way: str) -> None:
    pairs = 2 * torch.export.Dim("pairs", min=2, max=8)
    program = torch.export.export(nn.GELU(), (torch.randn(6, 3),), dynamic_shapes=({0: pairs},))
    tessera.export(program, path=tmp_path / "m.tess")
    m, x = loaded(tmp_path / "m.tess", way), torch.randn(10, 3)
    torch.testing.assert_close(m(x), nn.functional.gelu(x))
    for rows in (9, 18):
        with pytest.raises(InputError, match=rf"expected 2 \* pairs with pairs from 2 to 8, got {rows}"):
            m(torch.randn(rows, 3))


class Chooses(nn.Module):
    """Results whose sizes are known only when the program runs."""

    def forward(self, x: Tensor, n: Tensor) -> tuple[Tensor, ...]:
        count = n.item()
        torch._check(count >= 0)
        torch._check(count <= x.shape[0])
        return x[x > 0].sin() + 1, torch.nonzero(x).float().mean(0), x[:count] * 2, torch.zeros(count) + x.sum()


@pytest.mark.parametrize("way", WAYS)
def test_sizes_known_only_when_it_runs(tmp_path: Path, way: str) -> None:
    tessera.export(Chooses(), (torch.randn(8), torch.tensor(3)), tmp_path / "m.tess", dynamic={"x": {0: "length"}})
    m = loaded(tmp_path / "m.tess", way)
    for length, count in ((8, 3), (5, 5), (11, 0)):
        x, n = torch.randn(length), torch.tensor(count)
        torch.testing.assert_close(m(x, n), Chooses()(x, n))
    with pytest.raises(RuntimeError, match="<= length"):
        m(torch.randn(4), torch.tensor(5))


def test_arguments_that_lie_otherwise(mlp: nn.Module, mlp_file: Path) -> None:
    m, x = tessera.load(mlp_file), torch.randn(16, 5).t()
    with torch.no_grad():
        torch.testing.assert_close(m(x), mlp(x))
        torch.testing.assert_close(m(x[::2]), mlp(x[::2]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(torch.randn(65, 16)), "x, dimension 0: expected batch from 1 to 64, got 65"),
        (lambda m: m(torch.randn(3, 17)), "x, dimension 1: expected 16, which the program was exported for, got 17"),
        (lambda m: m(torch.randn(3, 16, dtype=torch.float64)), r"x: expected float32\[batch, 16\] on cpu, got float64"),
        (lambda m: m(torch.randn(16)), "x: expected"),
        (lambda m: m([1, 2]), "x: expected a tensor"),
        (lambda m: m(), "expected the argument 'x'"),
        (lambda m: m(torch.randn(3, 16), torch.randn(3, 16)), "expected x, got 2"),
        (lambda m: m(torch.randn(3, 16), y=1), "expected x"),
        (lambda m: m(torch.randn(3, 16, requires_grad=True)), "x requires gradients"),
    ],
)
def test_arguments_are_checked(mlp_file: Path, call: Callable, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(tessera.load(mlp_file))


def test_written_arguments_must_not_overlap(tmp_path: Path) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x + y

    tessera.export(fn, (torch.zeros(3), torch.zeros(3)), tmp_path / "m.tess")
    x = torch.zeros(3)
    with pytest.raises(InputError, match="shares memory"):
        tessera.load(tmp_path / "m.tess")(x, x)


def test_what_cannot_be_compiled_here_runs_as_it_is(mlp: nn.Module, mlp_file: Path, monkeypatch: Any) -> None:
    def refuses(*_: object, **__: object) -> Callable:
        def run(*_: object) -> tuple:
            raise CaptureError("nothing can be captured today")

        return run

    monkeypatch.setattr("tessera.artifact.compile.jit", refuses)
    m, x = tessera.load(mlp_file, trust=False, compile=True), torch.randn(3, 16)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(m(x), mlp(x))
    assert "not compiled: nothing can be captured today" in m.explain()


# --- other machines ---


def other_levels() -> list[str]:
    return [level for level in LEVELS if level not in levels_here()]


def test_built_for_other_processors(mlp: nn.Module, tmp_path: Path) -> None:
    """LLVM compiles for machines that this one is not; here such a file runs by PyTorch's operators, and says so."""
    targets = [f"cpu:{level}" for level in other_levels()]
    path, x = tmp_path / "m.tess", torch.randn(8, 16)
    tessera.export(mlp, (x,), path, targets=targets)
    m = tessera.load(path, compile=False)
    with torch.no_grad():
        torch.testing.assert_close(m(x), mlp(x))
    for level in other_levels():
        assert f"they are for {level}" in m.explain()
    with Container.open(path) as file:
        for target in file.manifest["targets"].values():
            assert target["images"] and all("PyLong_AsVoidPtr" in dict(map(reversed, i[4])) for i in target["images"])


def test_every_region_by_either(mlp: nn.Module, mlp_file: Path) -> None:
    """A region whose kernel is left out runs by PyTorch's operators, beside others that have one."""
    from hostile import Parts

    parts = Parts.of(mlp_file)
    name = next((n for n in parts.members if n.startswith("programs/main/cpu")), None)
    if name is None:
        pytest.skip("no kernels for this machine")
    program = json.loads(parts.members[name])
    regions = [op for op in program["tables"]["ops"] if op[0] == "region"]
    regions[0][-1] = -1
    parts.put(program, name)
    m = tessera.load(parts.write(mlp_file.parent / "part.tess"), trust=True)
    x = torch.randn(4, 16)
    with torch.no_grad():
        torch.testing.assert_close(m(x), mlp(x))
    assert "1 by PyTorch's operators" in m.explain()


# --- what export refuses ---


def test_what_export_refuses(mlp: nn.Module, tmp_path: Path) -> None:
    x, path = torch.randn(2, 16), tmp_path / "m.tess"

    def branches(x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x

    with pytest.raises(CaptureError, match="torch.export does not capture branches"):
        tessera.export(branches, (x,), path)
    with pytest.raises(OptionError, match="dynamic: expected one of x, got 'y'"):
        tessera.export(mlp, (x,), path, dynamic={"y": {0: "n"}})
    with pytest.raises(OptionError, match="targets: expected cuda:sm_90, or cpu:LEVEL"):
        tessera.export(mlp, (x,), path, targets="tpu")
    with pytest.raises(OptionError, match="plain names of entries"):
        tessera.export({"a b": (mlp, (x,))}, path=path)
    with pytest.raises(OptionError, match="the folder .*nowhere does not exist"):  # said before the work
        tessera.export(branches, (x,), tmp_path / "nowhere" / "m.tess")
    assert os.listdir(tmp_path) == []  # nothing half written is left


def test_an_exported_program(mlp: nn.Module, tmp_path: Path) -> None:
    x = torch.randn(2, 16)
    program = torch.export.export(mlp, (x,), strict=False)
    tessera.export(program, path=tmp_path / "m.tess")
    with torch.no_grad():
        torch.testing.assert_close(tessera.load(tmp_path / "m.tess")(x), mlp(x))


def test_buckets(mlp: nn.Module, tmp_path: Path) -> None:
    tessera.export(mlp, (torch.randn(16, 16),), tmp_path / "m.tess")  # for one size alone
    m = tessera.load(tmp_path / "m.tess", buckets=tessera.Buckets((16,), {"x": 0}, {0: 0}))
    x = torch.randn(3, 16)
    with torch.no_grad():
        torch.testing.assert_close(m(x), mlp(x))
        torch.testing.assert_close(m(x=x), mlp(x))


def test_cuda_graphs_say_where_they_cannot_be(mlp_file: Path) -> None:
    m = tessera.load(mlp_file, cuda_graph=True)
    assert "no CUDA graph: " in m.explain() and "is on cpu" in m.explain()


def private_bytes(path: Path) -> int:
    """Bytes of the file's pages that this process has for itself."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line[:1] in "0123456789abcdef" and "-" in line.split(" ", 1)[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Private_Dirty:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells whose a page is")
def test_weights_are_shared_until_they_are_written(tmp_path: Path) -> None:
    model, path, x = nn.Linear(512, 512).eval(), tmp_path / "m.tess", torch.randn(2, 512)
    tessera.export(model, (x,), path)
    m = tessera.load(path)
    with torch.no_grad():
        torch.testing.assert_close(m(x), model(x))
    assert private_bytes(path) == 0
    m.main.held[0][0, 0] = 1
    assert 0 < private_bytes(path) <= 4 * os.sysconf("SC_PAGE_SIZE")


def test_operators_that_are_called_as_in_python(tmp_path: Path) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x >> 1, x << 2, x & 6, x | 1, x ^ 3

    x = torch.arange(-4, 4)
    tessera.export(fn, (x,), tmp_path / "bits.tess")
    torch.testing.assert_close(tessera.load(tmp_path / "bits.tess")(x), fn(x))


def test_arguments_whose_memory_holds_something_else(tmp_path: Path) -> None:
    """Views that negate or conjugate when they are read are read before a kernel sees them."""

    class Net(nn.Module):
        def forward(self, x, z):
            return (x.sin() * 2).exp(), (z * z).imag

    net, x, z = Net(), torch.linspace(0, 1, 5), torch.linspace(0, 1, 5) * (1 + 2j)
    tessera.export(net, (x, z), path=tmp_path / "net.tess")
    loaded, args = tessera.load(tmp_path / "net.tess"), (torch.complex(x, x).conj().imag, z.conj())
    assert args[0].is_neg() and args[1].is_conj()
    torch.testing.assert_close(loaded(*args), net(*args))

    class Writes(nn.Module):
        def forward(self, x):
            return x.add_(1).sum()

    tessera.export(Writes(), (x,), path=tmp_path / "writes.tess")
    with pytest.raises(InputError, match="negated as it is read"):
        tessera.load(tmp_path / "writes.tess")(args[0])


def test_weights_that_read_one_memory_in_several_ways(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            z = torch.linspace(1, 2, 4) * (1 + 2j)
            self.register_buffer("z", z)
            self.register_buffer("turned", z.conj())

        def forward(self, x):
            return x * self.z, x * self.turned

    net, x = Net(), torch.ones(4)
    tessera.export(net, (x,), path=tmp_path / "net.tess")
    torch.testing.assert_close(tessera.load(tmp_path / "net.tess")(x), net(x))
