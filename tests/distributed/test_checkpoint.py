"""States on the disk, of one process; other meshes load them in `test_gloo.py`."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import torch
from models import token_batches, token_loss
from ranks import model_of, optimizer_of

import tessera
from tessera.distributed import checkpoint, safetensors
from tessera.distributed.boxes import Box, overlap
from tessera.util.errors import InputError


def trained(steps: int = 1) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = model_of(0)
    optimizer = optimizer_of(model)
    train(model, optimizer, steps)
    return model, optimizer


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for batch in token_batches(steps):
        optimizer.zero_grad()
        token_loss(model, *batch).backward()
        optimizer.step()


def test_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = trained(2)
    optimizer.param_groups[0]["lr"] = 0.5
    tessera.save_state(tmp_path, model, optimizer)
    other = model_of(1)
    again = optimizer_of(other)
    tessera.load_state(tmp_path, other, again)
    for m, by in ((model, optimizer), (other, again)):
        train(m, by)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert again.param_groups[0]["lr"] == 0.5 and again.param_groups[0]["betas"] == (0.9, 0.999)


def test_a_save_that_is_interrupted_leaves_the_last_good_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    tessera.save_state(tmp_path, model, optimizer)
    kept = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer)
    for name in ("write", "rename"):
        owner = safetensors if name == "write" else checkpoint.os
        monkeypatch.setattr(owner, name, interrupted(getattr(owner, name), 2 if name == "rename" else 1))
        with pytest.raises(KeyboardInterrupt):
            tessera.save_state(tmp_path, model, optimizer)
        monkeypatch.undo()
        other = model_of(1)
        tessera.load_state(tmp_path, other)
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), kept, strict=True))
    tessera.save_state(tmp_path, model, optimizer)
    tessera.load_state(tmp_path, other)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))


def test_training_goes_on_while_a_state_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    kept, may_write = [p.detach().clone() for p in model.parameters()], threading.Event()
    write = safetensors.write
    monkeypatch.setattr(safetensors, "write", lambda *args: (may_write.wait(60), write(*args)))
    saving = tessera.save_state(tmp_path, model, optimizer, wait=False)
    train(model, optimizer)
    assert not saving.done and not (tmp_path / "state").exists()
    may_write.set()
    saving.wait()
    other = model_of(1)
    tessera.load_state(tmp_path, other)
    assert saving.done and all(torch.equal(a, b) for a, b in zip(other.parameters(), kept, strict=True))


def test_a_save_that_fails_says_so_to_who_waits_or_saves_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError("no space left")

    model = torch.nn.Linear(2, 2)
    monkeypatch.setattr(safetensors, "write", full)
    with pytest.raises(OSError, match="no space left"):
        tessera.save_state(tmp_path, model, wait=False).wait()
    saving = tessera.save_state(tmp_path, model, wait=False)
    while not saving.done:
        time.sleep(0.01)
    monkeypatch.undo()
    with pytest.raises(OSError, match="no space left"):
        tessera.save_state(tmp_path, model)
    tessera.save_state(tmp_path, model)


def test_a_part_that_is_missing(tmp_path: Path) -> None:
    """A weight is filled whole or not at all."""
    tessera.save_state(tmp_path, torch.nn.Linear(4, 3))
    index = tmp_path / "state" / "index.json"
    data = json.loads(index.read_text())
    data["tensors"]["bias"]["parts"] = []
    index.write_text(json.dumps(data))
    with pytest.raises(InputError, match="bias: expected 3 elements at .0,., got 0"):
        tessera.load_state(tmp_path, torch.nn.Linear(4, 3))


def interrupted(fn, call: int):
    """As `fn`, until the call of that number."""
    left = [call]

    def run(*args: object) -> object:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return fn(*args)

    return run


def test_another_model(tmp_path: Path) -> None:
    tessera.save_state(tmp_path, torch.nn.Sequential(torch.nn.Linear(4, 3)))
    missing = r"test_checkpoint.py:\d+: .*has no 1.weight, 1.bias, which the model has; near are 0.weight"
    with pytest.raises(InputError, match=missing):
        tessera.load_state(tmp_path, torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 3)))
    with pytest.raises(InputError, match=r"0.weight: expected \[3, 5\], got \[3, 4\]"):
        tessera.load_state(tmp_path, torch.nn.Sequential(torch.nn.Linear(5, 3)))
    with pytest.raises(InputError, match="has 0.bias, which the model has not; is it of another model"):
        tessera.load_state(tmp_path, torch.nn.Sequential(torch.nn.Linear(4, 3, bias=False)))
    with pytest.raises(InputError, match="has no weight, which the model has; .*it has 0.bias, 0.weight, which the"):
        tessera.load_state(tmp_path, torch.nn.Linear(4, 3, bias=False))
    with pytest.raises(InputError, match="expected a folder that save_state or torch.distributed.checkpoint wrote"):
        tessera.load_state(tmp_path / "elsewhere", torch.nn.Linear(4, 3))


def test_another_optimizer(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    tessera.save_state(tmp_path, model, torch.optim.SGD(model.parameters()))
    with pytest.raises(InputError, match="expected an optimizer with the groups that were saved"):
        tessera.load_state(tmp_path, model, torch.optim.SGD([model.weight]))
    with pytest.raises(InputError, match="expected the state of AdamW, .* got another optimizer's, with dampening"):
        tessera.load_state(tmp_path, model, torch.optim.AdamW(model.parameters()))


def test_files_hold_data_alone(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3, dtype=torch.bfloat16)
    tessera.save_state(tmp_path, model)
    held = safetensors.read(tmp_path / "state" / "rank_0.safetensors")
    assert torch.equal(held["weight"], model.weight)
    assert json.loads((tmp_path / "state" / "index.json").read_text())["tensors"]["bias"]["dtype"] == "BF16"
    (tmp_path / "x").write_bytes(
        b"\x40\0\0\0\0\0\0\0" + b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'.ljust(64)
    )
    with pytest.raises(InputError, match="offsets within 0 bytes"):
        safetensors.read(tmp_path / "x")


def test_boxes() -> None:
    assert overlap(Box((0, 2), (4, 4)), Box((3, 0), (4, 3))) == Box((3, 2), (1, 1))
    assert overlap(Box((0,), (4,)), Box((4,), (4,))) is None
