"""Programs that come from the cache compute what was stored, bit for bit, and can be looked into as others can."""

from __future__ import annotations

import io
import json
import os
import time
import zlib
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cached import called, check_loaded, counting, forget, trained
from programs import same_bits
from torch import nn

import tessera
from tessera.just_in_time.compiled import compiled_state
from tessera.ops.rows import limits
from tessera.store import program
from tessera.tools.llama import Cache, Llama, LlamaConfig
from tessera.tools.models import GPT, GPTConfig
from tessera.util import disk as cache
from tests.distributed.launch import start


class Norms(nn.Module):
    """In-place buffers, dropout, and a last layer with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.last(F.dropout(F.gelu(self.norm(self.first(x))), 0.5, self.training)), y)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))


def gpt() -> tuple[nn.Module, tuple]:
    torch.manual_seed(0)
    tokens = torch.randint(64, (2, 17))
    return GPT(GPTConfig(1, 32, 2, 16, 64)), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


# --- the same bits ---


def test_training() -> None:
    model, args = gpt()
    check_loaded(lambda: trained(model, args))


def test_training_with_executors_of_no_kernels() -> None:
    model, args = gpt()
    check_loaded(lambda: trained(model, args, executors=["sdpa", "aten"], recompute="views"))


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_training_in_8_bits(scaling: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4))).to(torch.bfloat16)
    recipe = tessera.FP8(scaling=scaling, smallest=16)
    args = (torch.randn(32, 32, dtype=torch.bfloat16),)
    model(*args)  # PyTorch's first product of 16 bits may turn oneDNN off for good, which is part of the key
    check_loaded(lambda: trained(model, args, precision=recipe))


@pytest.mark.parametrize("random", ["off", "on"])
def test_buffers_and_random_numbers(random: str) -> None:
    torch.manual_seed(0)
    model, args = Norms(), (torch.randn(6, 8), torch.randint(4, (6,)))
    with tessera.override(fused_random=random):
        check_loaded(lambda: trained(model, args))
        check_loaded(lambda: trained(model.eval(), args))


def test_inference() -> None:
    model, x = mlp(), torch.randn(3, 8)
    with torch.no_grad():
        check_loaded(lambda: called(model, (x,)))


def test_autocast() -> None:
    model, x = mlp(), torch.randn(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        check_loaded(lambda: trained(model, (x,)))


def test_results_that_are_views_of_arguments_and_of_each_other() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> tuple:
        z = y * 2
        x.add_(1)
        return x[1:], z, z.view(-1)[2:], 3, x.t()

    x, y = torch.randn(3, 4), torch.randn(2, 4)
    _, loaded = check_loaded(lambda: called(f, (x, y)))
    a, b = x.clone(), y.clone()
    rows, z, tail, three, turned = loaded(a, b)  # type: ignore[operator]
    assert rows.data_ptr() == a[1:].data_ptr() and turned.data_ptr() == a.data_ptr() and three == 3
    assert tail.data_ptr() == z.view(-1)[2:].data_ptr()


def test_control_flow() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = torch.cond(x.sum() > 0, lambda x: x.sin() * 2, lambda x: x.cos() - 1, (x,))
        return y * x

    check_loaded(lambda: called(f, (torch.ones(4),)))
    check_loaded(lambda: called(f, (-torch.ones(5),)))


def test_checkpoints() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False).sum()

    model, x = Again(), torch.randn(3, 8)
    check_loaded(lambda: trained(model, (x,)))


def test_tensors_in_the_program() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([1.0, 2.0, 3.0]) + torch.arange(3) * 2

    x = torch.randn(3)
    check_loaded(lambda: called(f, (x,)))


def test_tensors_closed_over_stay_the_same_tensors() -> None:
    held = torch.randn(3)

    def f(x: torch.Tensor) -> torch.Tensor:
        return x * held

    x = torch.randn(3)
    _, loaded = check_loaded(lambda: called(f, (x,)))
    held.mul_(2)
    assert same_bits(loaded(x), f(x))  # type: ignore[operator]


def test_a_cache_written_in_place() -> None:
    config = LlamaConfig(layers=2, width=32, heads=4, kv_heads=2, hidden=64, vocab=64)
    torch.manual_seed(0)
    model = Llama(config).eval()

    def run() -> list:
        held = Cache.empty(config, batch=1, length=8, like=model.tokens.weight)
        decode = tessera.jit(model.decode, strict=True)
        with torch.no_grad():
            out = decode(torch.tensor([[3]]), torch.tensor([0]), held)
        return [out, *held.keys, *held.values, decode]

    check_loaded(run)


def test_a_program_over_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators that an executor put in after claiming find their callables again."""
    monkeypatch.setattr(limits, "runs", lambda device: True)
    config = LlamaConfig(layers=1, width=64, heads=2, kv_heads=1, hidden=64, vocab=64)
    torch.manual_seed(0)
    model = Llama(config).bfloat16().eval()

    def run() -> list:
        held = Cache.empty(config, batch=2, length=8, like=model.tokens.weight)
        decode = tessera.jit(model.decode, strict=True)
        with torch.no_grad():
            out = decode(torch.tensor([[3], [4]]), torch.tensor([5]), held)
        return [out, *held.keys, *held.values, decode]

    _, loaded = check_loaded(run)
    (program,) = loaded.__tessera__.compilations()[0].account.programs  # type: ignore[attr-defined]
    operators = {str(eqn.op) for eqn in program.trace.equations}
    assert {"rows.cached_attention", "rows.rows_linear"} <= operators


def test_changing_sizes() -> None:
    def run() -> list:
        model = mlp()
        fast = tessera.jit(model, strict=True, dynamic=True)
        outs = []
        for rows in (3, 5, 7):
            out = fast(torch.full((rows, 8), 0.5))
            out.sum().backward()
            outs.append(out)
        return [*outs, *(p.grad for p in model.parameters()), fast]

    _, loaded = check_loaded(run)
    symbols = compiled_state(loaded).compilations()[0].account.programs[0].trace.symbols  # type: ignore[union-attr]
    assert symbols


def test_what_compiling_finds_out_about_sizes_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be a guard that nobody checks where the program comes from the disk."""
    monkeypatch.setattr(program, "facts_of", lambda env: "s0 is even")
    forget()
    with counting() as found, tessera.override(log=1), redirect_stderr(io.StringIO()) as written:
        called(torch.sin, (torch.randn(3),))
    assert found == {"stored": 0, "loaded": 0} and "which guards must check" in written.getvalue()


def test_other_ways_to_capture() -> None:
    model, x = mlp(), torch.randn(3, 8)
    check_loaded(lambda: trained(model, (x,), frontend="functional"))
    program = torch.export.export(model, (x,))

    def exported() -> list:
        fast = tessera.jit(program)
        return [fast(x), fast]

    check_loaded(exported)


# --- whole steps ---


def stepped(clip: float | None = None, accumulate: int = 1, steps: int = 3, amsgrad: bool = False) -> list:
    model, args = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=amsgrad)
    step = tessera.train_step(model, None, optimizer, clip_norm=clip, accumulate=accumulate, strict=True)
    losses = [step(*args) for _ in range(steps)]
    moments = [v for state in optimizer.state.values() for v in state.values()]
    return [*losses, *model.parameters(), *moments, step]


def test_train_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is loaded, its stages can be asked for, nothing is lowered again, and another optimizer is another program."""
    _, step = check_loaded(lambda: stepped(clip=0.1))
    made = compiled_state(step).compilations()[0]  # type: ignore[union-attr]
    plan, call = made.plan, made.executable.call
    assert "step" in dict(made.account.stages) and made.account.programs[0].name == "step"
    assert made.plan is plan and made.executable.call is call  # though the optimizer has gone on
    forget()
    with counting() as found:
        stepped(clip=0.1, steps=1, amsgrad=True)
    assert found == {"stored": 1, "loaded": 0}
    forget()
    for place in ("tile.build", "tile.batch", "tile_saved.lower", "tile_saved.flat_kernel"):  # the latter share regions
        monkeypatch.setattr(f"tessera.executors.{place}", lambda *a, **k: pytest.fail("lowered again"))
    with counting() as found:
        stepped(clip=0.1, steps=1)
    assert found == {"stored": 0, "loaded": 1}


def test_train_step_that_accumulates() -> None:
    check_loaded(lambda: stepped(accumulate=2, steps=4), graphs=2)


# --- looking in ---


def test_stages_explanations_and_edits_of_a_loaded_program(tmp_path: Path) -> None:
    model, x = mlp(), torch.randn(3, 8)
    compiled, loaded = check_loaded(lambda: trained(model, (x,)))
    call = compiled_state(loaded).compilations()[0].executable.call  # type: ignore[union-attr]
    told = str(tessera.explain(loaded))
    assert "from the cache" in told and "tile fused" in told
    assert "compiled in" in str(tessera.explain(compiled))
    assert [str(s) for s in tessera.stages(loaded)] == [str(s) for s in tessera.stages(compiled)]
    assert compiled_state(loaded).compilations()[0].executable.call is call  # type: ignore[union-attr]  # what runs stays
    path = tmp_path / "edited.py"
    stage = next(s for s in tessera.stages(loaded) if s.name == "captured")
    stage.trace.save(str(path))
    text = path.read_text()
    assert "aten.gelu(" in text
    path.write_text(text.replace("aten.gelu(", "aten.relu("))
    tessera.edit(loaded, str(path), stage="captured")
    relu = nn.Sequential(*(nn.ReLU() if isinstance(m, nn.GELU) else m for m in model))
    torch.testing.assert_close(loaded(x), relu(x))  # type: ignore[operator]
    assert "from the cache" not in str(tessera.explain(loaded))


def test_check_of_a_loaded_program() -> None:
    model, x = mlp(), torch.randn(3, 8)
    _, loaded = check_loaded(lambda: trained(model, (x,)))
    assert tessera.check(loaded, x).ok


def test_flags_of_the_call_hold_for_stages_that_are_built_later() -> None:
    model, args = Norms(), (torch.randn(6, 8), torch.randint(4, (6,)))
    with tessera.override(fused_random="on"):
        _, loaded = check_loaded(lambda: trained(model, args))
    assert any("uniform" in str(stage.trace) for stage in tessera.stages(loaded))


@pytest.mark.parametrize("flags", [{"verify": True}, {"log": 2}, {"autotune": True}, {"dump": "dump"}])
def test_whoever_wants_all_stages_gets_them(flags: dict, tmp_path: Path) -> None:
    flags = {k: str(tmp_path / "dump") if k == "dump" else v for k, v in flags.items()}
    x = torch.randn(3)
    forget()
    called(torch.sin, (x,))
    with tessera.override(**flags), counting() as found, redirect_stderr(io.StringIO()):
        forget()
        called(torch.sin, (x,))
    assert found == {"stored": 0, "loaded": 0}
    if "dump" in flags:
        assert any((tmp_path / "dump").rglob("*captured.py"))


def test_the_log_says_where_a_program_came_from() -> None:
    def told() -> str:
        forget()
        with tessera.override(log=1), redirect_stderr(io.StringIO()) as written:
            called(torch.sin, (torch.randn(3),))
        return written.getvalue()

    assert "to compile" in told() and "from the cache" in told()


# --- what is on disk ---


def stored_file() -> Path:
    (entry,) = cache.entries(program.KIND)
    return entry.path


@pytest.mark.parametrize("damage", ["cut", "empty", "changed", "foreign"])
def test_a_damaged_file_is_no_file(damage: str) -> None:
    x = torch.randn(3)
    forget()
    called(torch.sin, (x,))
    path = stored_file()
    data = path.read_bytes()
    hurt = {"cut": data[: len(data) // 2], "empty": b"", "changed": data[:-1] + b"?", "foreign": b"something else"}
    path.write_bytes(hurt[damage])
    forget()
    with counting() as found:
        out, *_ = called(torch.sin, (x,))
    assert found == {"stored": 1, "loaded": 0} and same_bits(out, x.sin()) and path.read_bytes() == data


EMPTY = {name: [] for name in ("types", "values", "sources", "places", "tags", "ops", "traces")}
FORMS = [[1, 2], {"version": 0}, {"version": 1, "kernels": [], "tables": {}}]
FORMS += [{"version": 1, "kernels": [], "tables": EMPTY, "programs": [], "details": {}}]


@pytest.mark.parametrize("text", [None, *map(json.dumps, FORMS)])
def test_a_file_of_another_form_is_no_file(text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right by its checksum, but written by somebody else."""
    keys: list[str] = []
    store = cache.store
    monkeypatch.setattr(cache, "store", lambda kind, key, data: (keys.append(key), store(kind, key, data))[1])
    x = torch.randn(3)
    forget()
    called(torch.sin, (x,))
    store(program.KIND, keys[-1], b"not compressed" if text is None else zlib.compress(text.encode()))
    forget()
    with counting() as found:
        out, *_ = called(torch.sin, (x,))
    assert found == {"stored": 1, "loaded": 0} and same_bits(out, x.sin())


def test_kernels_that_are_gone_are_made_again() -> None:
    model, x = mlp(), torch.randn(3, 8)
    forget()
    first = trained(model, (x,))
    assert cache.clear("cpu") > 0
    forget()
    with counting() as found:
        second = trained(model, (x,))
    assert found == {"stored": 0, "loaded": 1} and all(map(same_bits, first[:-1], second[:-1]))


@pytest.mark.parametrize("place", ["save", "key_of"])
def test_a_fault_in_storing_costs_nothing_but_the_file(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("cannot be written down")

    monkeypatch.setattr(f"tessera.pipeline.compilation.{place}", broken)
    forget()
    with counting() as found, tessera.override(log=1), redirect_stderr(io.StringIO()) as written:
        out, *_ = called(torch.sin, (torch.ones(3),))
    assert same_bits(out, torch.ones(3).sin()) and found == {"stored": 0, "loaded": 0}
    assert "not kept on disk: RuntimeError: cannot be written down" in written.getvalue()


def test_constants_of_one_element_with_any_stride() -> None:
    check_loaded(lambda: called(lambda x: torch.quantile(x, 0.5, dim=0), (torch.arange(15.0).view(3, 5),)))


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "file"))
    forget()
    out, *_ = called(torch.sin, (torch.ones(3),))
    assert same_bits(out, torch.ones(3).sin())


def compiles(rank: int, folder: str, name: str, meeting: int) -> None:
    """In a process of its own: train one step, and write down what was stored, loaded and computed. So many processes
    meet just before they store: all have compiled then, however fast one is."""
    os.environ["TESSERA_CACHE"] = folder
    store = cache.store

    def meet(kind: str, *args: object) -> object:
        if kind == "program" and meeting:
            place = Path(folder, "meet")
            place.mkdir(exist_ok=True)
            (place / str(rank)).touch()
            while len(list(place.iterdir())) < meeting:
                time.sleep(0.01)
        return store(kind, *args)

    cache.store = meet
    model, before = mlp(), dict(program.COUNTS)
    with tessera.override(program_cache=True):
        loss = tessera.jit(model, strict=True)(torch.ones(3, 8)).sum()
        loss.backward()
    counts = [program.COUNTS[kind] - before[kind] for kind in ("stored", "loaded")]
    numbers = [loss.item(), *(p.grad.double().sum().item() for p in model.parameters())]
    Path(folder, f"{name}_{rank}.json").write_text(json.dumps([counts, numbers]))


def test_two_processes_at_once(tmp_path: Path) -> None:
    """Both compile the same program and store it at once; a third process finds it."""
    assert start(2, compiles, str(tmp_path), "both", 2) == [0, 0]
    assert start(1, compiles, str(tmp_path), "later", 0) == [0]
    told = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("both_0", "both_1", "later_0")]
    assert told[0][1] == told[1][1] == told[2][1] and len(told[0][1]) == 7
    assert [counts for counts, _ in told] == [[1, 0], [1, 0], [0, 1]]
    assert len(list(cache.entries("program"))) == 1
