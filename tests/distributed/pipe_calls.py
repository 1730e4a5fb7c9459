"""What a rank of a gloo group with a pipeline does in tests of `jit`: every part compares with one process."""

from __future__ import annotations

import copy
import os
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from generating import GREEDY, GROWING, PROMPT, language_model
from launch import join_group
from models import GPT, Llama, MoE, Pictures, picture_batches, token_batches, token_loss
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import tessera
from tessera.distributed.weights import local_of
from tessera.store.program import COUNTS
from tessera.util.errors import InputError, OptionError

ROWS = 8


def run(rank: int, world: int, folder: str, parts: list[str]) -> None:
    join_group(rank, world, f"{folder}/meet{world}")
    os.environ["TESSERA_CACHE"] = f"{folder}/cache"
    for name in parts:
        try:
            globals()[name](rank)
        except Exception:
            (Path(folder) / f"{name}_{rank}.txt").write_text(traceback.format_exc())
            break  # others would wait for this rank
    else:
        (Path(folder) / f"done{world}_{rank}").touch()
    dist.destroy_process_group()


def seeded(make: type, *args: object) -> nn.Module:
    torch.manual_seed(0)
    return make(*args).double()


def same(got: Tensor, want: Tensor) -> None:
    got, want = got.detach(), want.detach()
    assert (got - want).norm() <= 1e-11 * want.norm() + 1e-14, (got - want).norm()


def same_grads(model: nn.Module, plain: nn.Module, all_here: bool = False) -> None:
    """Of every weight that this rank has."""
    plain_grads = {name: p.grad for name, p in plain.named_parameters()}
    mine = {name: p for name, p in model.named_parameters() if not local_of(p).is_meta}
    assert 0 < len(mine) < len(plain_grads) + all_here
    for name, p in model.named_parameters():
        if name in mine:
            same(p.grad.full_tensor(), plain_grads[name])
        else:
            assert p.grad is None


def inference(rank: int) -> None:
    for word, microbatches in (("gpipe", 4), ("interleaved", None), ("dualpipe", 1), (("1f1b", ["blocks.3"]), 2)):
        model = seeded(GPT, 4)
        (ids, _), want = token_batches(1, ROWS)[0], copy.deepcopy(model)
        mesh = tessera.mesh(device="cpu", pp=2)
        fast = tessera.jit(model, mesh=mesh, plan={"pp": word}, microbatches=microbatches, executors="aten")
        with torch.no_grad():
            same(fast(ids), want(ids))
            same(fast(ids[:4]), want(ids[:4]))  # programs of another size are cut where the weights are
        text = str(tessera.explain(fast))
        assert "stage 1 on rank 1" in text and "B0" not in text


class Unrolled(nn.Module):
    """Its cell runs at every place, so several stages read it, and `decay` is read where it is cheap to cut."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cell, self.head = nn.Embedding(48, 8), nn.GRUCell(8, 8), nn.Linear(8, 48)
        self.decay = nn.Parameter(torch.rand(8))

    def forward(self, ids: Tensor) -> Tensor:
        state, states = self.words.weight.new_zeros(ids.shape[0], 8), []
        for place in range(4):
            state = self.cell(self.words(ids[:, place]), state) * torch.exp(-self.decay)
            states.append(self.head(state))
        return torch.stack(states, 1)


def sizes_that_change(rank: int) -> None:
    """Calls of two sizes in turn, with updates between: ranks that share a weight have it alike, whoever reads it."""
    ids, mesh = token_batches(1, ROWS)[0][0], tessera.mesh(device="cpu", pp=2)
    for make, args in ((Unrolled, ()), (Llama, (1,)), (GPT, (1,))):
        model = seeded(make, *args)
        plain = copy.deepcopy(model)
        fast = tessera.jit(model, mesh=mesh, plan="1f1b", executors="aten")
        updates = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (model, plain)]
        for rows in (ROWS, 4, ROWS, 4):
            got, want = fast(ids[:rows]), plain(ids[:rows])
            same(got, want)
            for out in (got, want):
                out.square().mean().backward()
            same_grads(model, plain, make is Unrolled)
            for by in updates:
                by.step()
                by.zero_grad()
        with torch.no_grad():
            same(fast.eval()(ids), plain.eval()(ids))


def gradients(rank: int) -> None:
    for word in ("1f1b", "interleaved"):
        model = seeded(GPT, 4)
        plain, batches = copy.deepcopy(model), [ids for ids, _ in token_batches(2, ROWS)]
        fast = tessera.jit(model, mesh=tessera.mesh(device="cpu", pp=2), plan=word, executors="aten")
        for f in (fast, plain):
            first, second = f(batches[0]), f(batches[1])
            first.square().sum().backward()  # two calls are under way
            (second.exp().mean() * 2).backward()
        same_grads(model, plain)
        with torch.no_grad():
            same(fast(batches[0]), plain(batches[0]))
        out = fast(batches[0]).sum()
        out.backward(retain_graph=True)
        try:
            out.backward()
        except InputError as error:
            assert "got a second" in str(error)
        else:
            raise AssertionError("a second backward went through")


class Mixed(nn.Module):
    """Its results are rows of both stages, an input, numbers that are no floats; it reads a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.bias = nn.Parameter(torch.randn(4, 6))

    def forward(self, x: Tensor, scale: Tensor) -> dict:
        y = self.first(x).tanh() * scale
        bias = self.bias.repeat(x.shape[0] // 4, 1)
        z = self.second(y) + bias
        return {"z": z, "pair": (y, z), "given": x, "best": z.argmax(-1), "kind": "mixed", "shifted": x + bias}


def forms(rank: int) -> None:
    model = seeded(Mixed)
    plain = copy.deepcopy(model)
    plan = {"pp": ("gpipe", ["second"])}
    fast = tessera.jit(model, mesh=tessera.mesh(device="cpu", pp=2), plan=plan, microbatches=2, executors="aten")
    grads = []
    for f in (fast, plain):
        x, scale = torch.linspace(-1, 1, 48).double().reshape(8, 6).requires_grad_(), torch.tensor(1.5).double()
        out = f(x, scale.requires_grad_())
        assert out["given"] is x and out["pair"][1] is out["z"] and out["kind"] == "mixed"
        assert not out["best"].requires_grad
        ((out["z"] * out["shifted"]).sum() + out["pair"][0].square().sum() + out["given"].sum()).backward()
        grads.append((x.grad, scale.grad, out["best"]))
    for got, want in zip(*grads, strict=True):
        same(got.double(), want.double())
    same_grads(model, plain)


def written(rank: int) -> None:
    """Buffers that a stage writes every rank has; microbatches write one after the other."""
    model = seeded(Pictures)
    plain = copy.deepcopy(model)
    fast = tessera.jit(model, mesh=tessera.mesh(device="cpu", pp=2), plan="1f1b", microbatches=2, executors="aten")
    for rows in (None, 4):  # the second has a program of its own, cut where the weights are
        x = picture_batches(1)[0][0][:rows]
        fast(x).square().sum().backward()
        torch.cat([plain(part) for part in x.chunk(2)]).square().sum().backward()
    same_grads(model, plain)
    for mine, want in zip(model.buffers(), plain.buffers(), strict=True):
        same(mine.double(), want.double())


def refusals(rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = tessera.mesh(device="cpu", pp=2)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x).sum()

    x = torch.ones(4, 4)
    fast = tessera.jit(Loss(), mesh=mesh, plan="1f1b", executors="aten")
    for _ in range(2):
        try:
            fast(x)
        except OptionError as error:
            assert "expected results that have its rows, got f32[]" in str(error)
        else:
            raise AssertionError("the sum of a microbatch is not that of the batch")


def generates(rank: int) -> None:
    """With a cache of a fixed size and one that grows: the tokens of one process, on every rank."""
    for name in ("llama", "gpt2"):
        model = language_model(name)
        want = [model.generate(PROMPT, **GREEDY), model.generate(PROMPT[:, :3], **GREEDY)]
        grown = model.generate(PROMPT, **GROWING)
        fast = tessera.jit(model, mesh=tessera.mesh(device="cpu", pp=2), plan="1f1b", executors="aten")
        assert fast.generate(PROMPT, **GREEDY).tolist() == want[0].tolist()
        _, token = fast.__tessera__.compilations()  # the prompt's and a token's
        pipeline = token.executable.pipeline
        on = [pipeline.stages.readers[pipeline.batch[i]] for i in token.piped.kept]
        assert len(on) == 4 and set(on) == {(0,), (1,)}  # keys and values are where their layer is
        assert fast.generate(PROMPT[:, :3], **GREEDY).tolist() == want[1].tolist()
        assert fast.generate(PROMPT, **GROWING).tolist() == grown.tolist()


class Dropping(GPT):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + nn.functional.dropout(self.words(ids), 0.5).mean(-1, keepdim=True)


def stored(rank: int) -> None:
    """What one process compiled another begins with: nothing is compiled, and everything is bit for bit the same."""
    mesh, told = tessera.mesh(device="cpu", pp=2), []
    for _ in range(2):
        before = dict(COUNTS)
        with tessera.override(program_cache=True):
            told.append([*_trained(mesh), *_called(mesh)])
        counts = {name: COUNTS[name] - before[name] for name in COUNTS}
    assert counts == {"stored": 0, "loaded": 6}, counts
    assert all(torch.equal(a, b) for a, b in zip(*told, strict=True))


def _trained(mesh: DeviceMesh) -> Iterator[Tensor]:
    model = seeded(Dropping, 2)
    by = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = tessera.train_step(
        model, token_loss, by, mesh=mesh, plan="zero-bubble", microbatches=4, clip_norm=0.5, executors="aten"
    )
    torch.manual_seed(7 + mesh.get_rank())  # what the first rank draws counts
    yield from (step(*batch).clone() for batch in token_batches(2, ROWS))
    assert "stage 1 on rank 1" in str(tessera.explain(step))  # the stages are made for whoever asks
    yield step(*token_batches(1, ROWS)[0]).clone()
    yield step(*(x[:4] for x in token_batches(1, ROWS)[0])).clone()  # cut where the weights are


def _called(mesh: DeviceMesh) -> Iterator[Tensor]:
    model, (ids, _) = seeded(GPT, 2), token_batches(1, ROWS)[0]
    fast = tessera.jit(model, mesh=mesh, plan="gpipe", executors="aten")
    fast(ids).square().sum().backward()
    assert "stage 1 on rank 1" in str(tessera.explain(fast))
    out = fast(ids)
    out.sum().backward()
    yield out.detach()
    yield from (p.grad.to_local() for p in model.parameters() if p.grad is not None)
    with torch.no_grad():
        yield fast(ids)
    fast = tessera.jit(language_model("llama"), mesh=mesh, plan="1f1b", executors="aten")
    yield fast.generate(PROMPT, **GREEDY)


# --- four ranks ---


def beside_other_axes(rank: int) -> None:
    for axes, plan, make in (
        ({"dp": 2, "pp": 2}, {"dp": "zero3", "pp": "1f1b"}, GPT),
        ({"pp": 2, "tp": 2}, {"tp": "sequence", "pp": "interleaved"}, Llama),
        ({"ep": 2, "pp": 2}, {"ep": "experts", "pp": "gpipe"}, MoE),
    ):
        model = seeded(make, 4)
        plain, (ids, _) = copy.deepcopy(model), token_batches(1, ROWS)[0]
        mesh = tessera.mesh(device="cpu", **axes)
        rows = next((axis for axis in ("dp", "ep") if axis in axes), None)
        own = ids if rows is None else ids.chunk(2)[mesh.get_local_rank(rows)]
        fast = tessera.jit(model, mesh=mesh, plan=plan, microbatches=2, executors="aten")
        want = plain(ids)
        with torch.no_grad():
            got = fast(own)
        same(got, want if rows is None else want.chunk(2)[mesh.get_local_rank(rows)])
        want.square().sum().backward()
        fast(own).square().sum().backward()
        same_grads(model, plain)


def generates_beside_heads(rank: int) -> None:
    model = language_model("llama")
    want = model.generate(PROMPT, **GREEDY)
    plan = {"pp": "1f1b", "tp": "tensor"}
    fast = tessera.jit(model, mesh=tessera.mesh(device="cpu", pp=2, tp=2), plan=plan, executors="aten")
    assert fast.generate(PROMPT, **GREEDY).tolist() == want.tolist()


TWO = ["inference", "sizes_that_change", "gradients", "forms", "written", "refusals", "generates", "stored"]
FOUR = ["beside_other_axes", "generates_beside_heads"]
