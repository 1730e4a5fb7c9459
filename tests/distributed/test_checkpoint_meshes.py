"""States go from mesh to mesh bit for bit, over gloo with four processes; one launch serves all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from launch import join_group, start
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import tessera
from tessera.distributed.weights import whole_of

WORLD = 4
SPLIT = {"0.weight": "f/tp/dp, d", "0.bias": "f/tp", "2.weight": "f/dp, d/tp"}
FIRST = ({"dp": 2, "tp": 2}, {"dp": "zero3", "tp": "tensor", **SPLIT})
OTHERS = [
    ({"tp": 2, "dp": 2}, {"dp": "zero3", "tp": "tensor", **SPLIT}),
    ({"tp": 4}, {"tp": "tensor", "0.weight": "f/tp, d", "2.weight": "f, d/tp"}),
]


def model_of(seed: int) -> nn.Module:
    """The third layer has 6 rows: two ranks divide them, four do not."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 6), nn.Linear(6, 5))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One update, from gradients of every element's own."""
    for p in model.parameters():
        p.grad = (p.detach() * 3).sin()
    optimizer.step()
    optimizer.zero_grad()
    model[1].num_batches_tracked += 1


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Whole tensors by name."""
    tensors = dict(model.state_dict())
    for name, p in model.named_parameters():
        tensors |= {f"{name} {slot}": x for slot, x in optimizer.state[p].items()}
    return {name: whole_of(x.detach()).clone() for name, x in tensors.items()}


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    return [*(a.keys() ^ b.keys()), *(name for name in a if name in b and not torch.equal(a[name], b[name]))]


def on_mesh(seed: int, axes: dict, plan: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = tessera.shard(model_of(seed), tessera.mesh(device="cpu", **axes), plan)
    return model, optimizer_of(model)


def rank_of_four(rank: int, folder: str) -> None:
    path = Path(folder)
    join_group(rank, WORLD, f"{folder}/meet")
    model, optimizer = on_mesh(0, *FIRST)
    stepped(model, optimizer)
    want = everything(model, optimizer)
    if rank == 0:
        torch.save(want, path / "want.pt")
    saving = tessera.save_state(path / "ours", model, optimizer, wait=False)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=path / "torch")
    stepped(model, optimizer)  # while the first state may still be on its way
    saving.wait()
    tessera.save_state(path / "plain.safetensors", model)
    for form in ("ours", "torch"):
        for axes, plan in OTHERS:
            other, by = on_mesh(1, axes, plan)
            tessera.load_state(path / form, other, by)
            assert not (wrong := differing(everything(other, by), want)), (form, axes, wrong)
    read_by_torch(path, want)
    under_fully_shard(path, want)
    through_a_pipeline(path, want)
    dist.destroy_process_group()


def read_by_torch(path: Path, want: dict[str, Tensor]) -> None:
    """torch.distributed.checkpoint reads our files into DTensors of another mesh."""
    other, _ = on_mesh(2, *OTHERS[0])
    state = {name: x.detach() for name, x in other.named_parameters()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(path / "ours" / "state")))
    assert all(torch.equal(x.full_tensor(), want[name]) for name, x in state.items())


def under_fully_shard(path: Path, want: dict[str, Tensor]) -> None:
    """A fully_shard model, whose rows four ranks do not divide, loads and saves; one of ours reads it again."""
    model = fully_shard(model_of(3))
    optimizer = optimizer_of(model)
    tessera.load_state(path / "ours", model, optimizer)
    assert not differing(everything(model, optimizer), want)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=path / "fully_shard")
    tessera.save_state(path / "of_fully_shard", model, optimizer)


def through_a_pipeline(path: Path, want: dict[str, Tensor]) -> None:
    """To a mesh whose ranks have the weights and the state of their stages alone, and back."""
    model, optimizer = on_mesh(4, {"dp": 2, "pp": 2}, {"dp": "zero3", "pp": ("1f1b", ["2"])})
    step = tessera.train_step(model, lambda m, x: m(x).square().mean(), optimizer, executors="aten")
    step(torch.ones(4, 8))  # from now on, other stages' weights are gone
    tessera.load_state(path / "ours", model, optimizer)
    tessera.save_state(path / "piped", model, optimizer)
    back, by = on_mesh(5, *FIRST)
    tessera.load_state(path / "piped", back, by)
    assert not differing(everything(back, by), want)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    assert start(WORLD, rank_of_four, str(folder)) == [0] * WORLD
    return folder


@pytest.mark.parametrize("form", ["ours", "torch", "fully_shard", "of_fully_shard", "piped"])
def test_one_process_loads_what_four_saved(folder: Path, form: str) -> None:
    model = model_of(4)
    optimizer = optimizer_of(model)
    tessera.load_state(folder / form, model, optimizer)
    assert not differing(everything(model, optimizer), torch.load(folder / "want.pt"))


def test_a_plain_file_of_four(folder: Path) -> None:
    """It holds the second step, which one process makes from the first."""
    model, other = model_of(5), model_of(6)
    optimizer = optimizer_of(model)
    tessera.load_state(folder / "ours", model, optimizer)
    stepped(model, optimizer)
    tessera.load_state(folder / "plain.safetensors", other)
    for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
