"""States that others wrote, in one process: plain safetensors, and what torch.distributed.checkpoint wrote."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from models import token_batches, token_loss
from ranks import model_of, optimizer_of
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import tessera
from tessera.util.errors import InputError


@pytest.fixture(scope="module")
def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = model_of(0)
    optimizer = optimizer_of(model)
    token_loss(model, *token_batches(1)[0]).backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.25
    return model, optimizer


def same(model: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def same_state(trained: tuple, other: nn.Module, by: torch.optim.Optimizer) -> bool:
    model, optimizer = trained
    pairs = [(optimizer.state[p], by.state[q]) for p, q in zip(model.parameters(), other.parameters(), strict=True)]
    slots = ("step", "exp_avg", "exp_avg_sq")
    return by.param_groups[0]["lr"] == 0.25 and all(torch.equal(a[slot], b[slot]) for a, b in pairs for slot in slots)


@pytest.mark.parametrize("name", ["words.weight", "head.weight"])
def test_a_plain_file_in(tmp_path: Path, trained: tuple, name: str) -> None:
    """A weight that two modules share goes by either name."""
    model, _ = trained
    tensors = {key: x for key, x in model.state_dict().items() if key not in ("words.weight", "head.weight")}
    safetensors.torch.save_file({**tensors, name: model.words.weight.detach()}, tmp_path / "model.safetensors")
    other = model_of(1)
    tessera.load_state(tmp_path / "model.safetensors", other)
    assert same(model, other)


def test_a_folder_of_plain_files(tmp_path: Path, trained: tuple) -> None:
    model, _ = trained
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    first = dict(list(tensors.items())[:3])
    for file, part in (
        ("a.safetensors", first),
        ("b.safetensors", {k: v for k, v in tensors.items() if k not in first}),
    ):
        safetensors.torch.save_file(part, tmp_path / file)
    files = {name: "a.safetensors" if name in first else "b.safetensors" for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    other = model_of(1)
    tessera.load_state(tmp_path, other)
    assert same(model, other)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../a.safetensors"}}))
    with pytest.raises(InputError, match="expected files beside the index"):
        tessera.load_state(tmp_path, other)


def test_a_plain_file_out(tmp_path: Path, trained: tuple) -> None:
    model, optimizer = trained
    tessera.save_state(tmp_path / "model.safetensors", model)
    held = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert held.keys() == dict(model.named_parameters()).keys() and os.listdir(tmp_path) == ["model.safetensors"]
    assert all(torch.equal(held[name], p) for name, p in model.named_parameters())
    with pytest.raises(InputError, match="expected no optimizer beside a plain file"):
        tessera.save_state(tmp_path / "model.safetensors", model, optimizer)
    with pytest.raises(InputError, match="has no optimizer's options for words.weight"):
        tessera.load_state(tmp_path / "model.safetensors", model, optimizer)


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optim": state}


def flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    return {**weights, "optimizer": state, "train_state": {"step": torch.tensor(3)}, "note": "a text"}


def by_number(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    weights = {f"module.{name}": x for name, x in model.state_dict().items()}
    return {"app": {"net": weights}, "by": optimizer.state_dict()}


@pytest.mark.parametrize("form", [by_name, flat, by_number])
def test_what_torch_saved(tmp_path: Path, trained: tuple, form) -> None:
    model, optimizer = trained
    dcp.save(form(model, optimizer), checkpoint_id=tmp_path)
    other = model_of(1)
    by = optimizer_of(other)
    tessera.load_state(tmp_path, other, by)
    assert same(model, other) and same_state(trained, other, by) and by.param_groups[0]["betas"] == (0.9, 0.999)
    with pytest.raises(InputError, match="has no weight, bias, which the model has"):
        tessera.load_state(tmp_path, nn.Linear(2, 2))


def test_torch_reads_what_was_saved(tmp_path: Path, trained: tuple) -> None:
    """By its own reader of safetensors, without any pickle."""
    model, optimizer = trained
    tessera.save_state(tmp_path, model, optimizer)
    p = model.words.weight
    state = {name: torch.zeros_like(x) for name, x in model.named_parameters()}
    state["optimizer.words.weight.exp_avg"] = torch.zeros_like(p)
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "state")))
    assert all(torch.equal(state[name], x) for name, x in model.named_parameters())
    assert torch.equal(state["optimizer.words.weight.exp_avg"], optimizer.state[p]["exp_avg"])


def test_torch_saved_safetensors(tmp_path: Path, trained: tuple) -> None:
    model, _ = trained
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    dcp.save({name: p.detach() for name, p in model.named_parameters()}, storage_writer=writer)
    other = model_of(1)
    tessera.load_state(tmp_path, other)
    assert same(model, other)


# --- hostile files --------------------------------------------------------------------------------


class Runs:
    """What a pickle may say: call this with that."""

    def __init__(self, fn: object, *args: object) -> None:
        self.call = fn, args

    def __reduce__(self) -> tuple:
        return self.call


@pytest.mark.parametrize("call", [(os.system, "true"), (eval, "1"), (getattr, "", "join"), (torch.load, "x")])
def test_a_pickle_that_wants_to_run_something(tmp_path: Path, call: tuple) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Runs(*call)))
    with pytest.raises(InputError, match="expected DCP's data classes alone, got "):
        tessera.load_state(tmp_path, nn.Linear(2, 2))


@pytest.mark.parametrize("data", [b"", b"\x80\x04.", b"nonsense", pickle.dumps({"a": 1}), pickle.dumps([()] * 3)])
def test_metadata_that_is_none(tmp_path: Path, data: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(InputError, match=r"\.metadata"):
        tessera.load_state(tmp_path, nn.Linear(2, 2))


def test_parts_that_run_something_or_lie_elsewhere(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    size = file.stat().st_size
    file.write_bytes(pickle.dumps(Runs(os.system, "true")).ljust(size, b"\0"))
    with pytest.raises(InputError, match="expected a tensor or plain data at"):
        tessera.load_state(tmp_path, nn.Linear(2, 2))
    known = (tmp_path / ".metadata").read_bytes()
    (tmp_path / ".metadata").write_bytes(known.replace(b"__0_0.distcp", b"../_0.distcp"))
    with pytest.raises(InputError, match="expected files beside the metadata"):
        tessera.load_state(tmp_path, nn.Linear(2, 2))
