"""What survivors say when a rank fails, over gloo with four processes: who is missing, at which equation, in time.

One launch a way to fail; the first step and its state on the disk are good, the second step is not.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launch import join_group, start
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import tessera
from tessera.distributed import safetensors
from tessera.distributed.watch import NO_STORE, Watch
from tessera.ir.dist import on
from tessera.ir.mesh import Mesh

WORLD, VICTIM, DEADLINE = 4, 1, 3.0
MESH = Mesh.of(dp=WORLD)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def other_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).abs().mean()


def batch(number: int, rank: int, world: int = WORLD) -> Tensor:
    draw = torch.Generator().manual_seed(number)
    return torch.randn(8, 4, generator=draw).chunk(world)[rank]


def training(world: int = WORLD, loss: Callable = loss_of) -> tuple:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    model = tessera.shard(model, tessera.mesh(device="cpu", dp=world), "zero3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, tessera.train_step(model, loss, optimizer, executors="aten")


def rank_of(rank: int, folder: str, how: str) -> None:
    """One step, a state on the disk, and then one rank fails. Ends as a script does."""
    try:
        join_group(rank, WORLD, f"{folder}/meet", DEADLINE)
        begun = time.monotonic()
        model, optimizer, step = training(loss=other_loss if (how, rank) == ("version", VICTIM) else loss_of)
        step(batch(0, rank))
        tessera.save_state(f"{folder}/saved", model, optimizer)
        if rank == VICTIM:
            fails(how)
            if how == "branch":
                step = tessera.train_step(model, other_loss, optimizer, executors="aten")
        begun = time.monotonic()
        step(batch(1, rank)[: 1 if (how, rank) == ("batch", VICTIM) else 2])
        tessera.save_state(f"{folder}/saved", model, optimizer)
    except BaseException as error:
        told = {"message": str(error), "kind": type(error).__name__, "seconds": time.monotonic() - begun}
        Path(folder, f"{rank}.json").write_text(json.dumps(told))
        sys.excepthook(*sys.exc_info())
        os._exit(3)


def fails(how: str) -> None:
    """From now on this rank fails: at the next exchange of a kind, or when it saves."""
    exchanges = on(MESH).communicator._begin

    def killed(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def raises(*_: object) -> None:
        raise ValueError("the data are bad")

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 93 GiB")

    match how:
        case "forward":
            exchanges["all_gather"] = killed
        case "backward":
            exchanges["reduce_scatter"] = killed
        case "save":
            safetensors.write = killed
        case "sleeps":
            exchanges["reduce_scatter"] = lambda *_: (time.sleep(DEADLINE + 5), killed())
        case "raises":
            exchanges["all_gather"] = raises
        case "memory":
            exchanges["reduce_scatter"] = no_memory


SAYS = {  # of survivors, and of the one that is elsewhere
    "forward": "rank 1 is gone; it was last seen at ",
    "backward": "rank 1 is gone; it was last seen at ",
    "save": "rank 1 is gone; it was last seen at ",
    "sleeps": r"rank 1 is at \S*test_failures.py:\d+, for \d+ s",
    "raises": "rank 1 ended: ValueError: the data are bad",
    "memory": "rank 1 ended: OutOfMemoryError: tried to allocate 93 GiB",
    "batch": r"rank 1 is at \S*test_failures.py:\d+, in tessera.distributed.agree.agree",
    "branch": r"rank 1 is at \S*test_failures.py:\d+, in tessera.distributed.agree.agree",
    "version": "rank 1 has another program than rank 0: it has 'abs = ",
}
WAITS = {
    "forward": "dist.all_gather of .* at `all_gather = dist_wait.*test_failures.py",
    "backward": "dist.reduce_scatter of .* at `",
    "save": r"did not meet to compare what they have, at \S*test_failures.py:\d+, in tessera.distributed.checkpoint",
    "sleeps": "dist.reduce_scatter of .* at `",
    "raises": "dist.all_gather of .* at `all_gather = dist_wait",
    "memory": "dist.reduce_scatter of .* at `",
    "batch": "dist.all_gather of .* at `all_gather = dist_wait",
    "branch": "dist.all_gather of .* at `all_gather = dist_wait",
    "version": r"rank 0 'pow = aten.pow\(linear, 2\) .*test_failures.py:\d+",
}


@pytest.mark.parametrize("how", SAYS)
def test_survivors_say_who_is_missing(tmp_path: Path, how: str) -> None:
    codes = start(WORLD, rank_of, str(tmp_path), how, seconds=60)
    survivors = [rank for rank in range(WORLD) if rank != VICTIM]
    assert [codes[rank] for rank in survivors] == [3] * len(survivors)
    told = {rank: json.loads((tmp_path / f"{rank}.json").read_text()) for rank in survivors}
    for each in told.values():
        assert each["kind"] == "MeshError" and each["seconds"] < DEADLINE + 10
        assert re.search(WAITS[how], each["message"]), each["message"]
        # who noticed late may see only that others ended because they waited
        assert re.search(SAYS[how], each["message"]) or "waited in vain at" in each["message"], each["message"]
    assert any(re.search(SAYS[how], each["message"]) for each in told.values())
    if how in ("batch", "branch"):
        lone = json.loads((tmp_path / f"{VICTIM}.json").read_text())["message"]
        assert re.search("rank 1: ranks did not meet.*rank 0 (is|waited in vain) at all_gather = dist_wait", lone), lone
    if how in ("backward", "save"):
        assert start(WORLD, restarted, str(tmp_path)) == [0] * WORLD


def test_notes_that_nobody_keeps_any_more() -> None:
    """The store has ended with its process; a rank is not said to have written nothing."""

    class Gone:
        def check(self, _: list[str]) -> bool:
            raise RuntimeError("connection reset")

    watch = object.__new__(Watch)
    watch.rank, watch.every, watch.store = 2, 0.01, Gone()
    assert watch.absent(range(4), "here") == NO_STORE


def late_rank(rank: int, port: int) -> None:
    """It starts later than a rank may be missed for later on."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    time.sleep(3 * rank)
    tessera.mesh(device="cpu", dp=2, timeout=1)
    if rank:
        os._exit(0)
    with pytest.raises(RuntimeError):
        torch.distributed.barrier()
    os._exit(4)


def test_ranks_may_start_later_than_the_deadline() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert start(2, late_rank, port, seconds=60) == [4, 0]


def pipelined_rank(rank: int, folder: str, how: str) -> None:
    """A pipeline of two stages, twice; before the second step one rank fails."""
    try:
        join_group(rank, WORLD, f"{folder}/meet", DEADLINE)
        torch.manual_seed(0)
        model, mesh = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), tessera.mesh(device="cpu", pp=2, dp=2)
        tessera.shard(model, mesh, {"pp": "1f1b", "dp": "zero3"}, microbatches=2)
        step = tessera.train_step(model, loss_of, torch.optim.SGD(model.parameters(), 0.1), executors="aten")
        for number in range(2):
            begun = time.monotonic()
            if (rank, number) == (VICTIM, 1):
                before_a_step(how)
            step(batch(number, rank % 2, 2))
    except BaseException as error:
        told = {"message": str(error), "kind": type(error).__name__, "seconds": time.monotonic() - begun}
        Path(folder, f"{rank}.json").write_text(json.dumps(told))
        sys.excepthook(*sys.exc_info())
        os._exit(3)


def before_a_step(how: str) -> None:
    match how:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "sleeps":
            time.sleep(DEADLINE + 5)
            os.kill(os.getpid(), signal.SIGKILL)
        case "raises":
            raise ValueError("the data are bad")


GONE = {
    "killed": "rank 1 is gone; it was last seen at ",
    "sleeps": r"rank 1 is at \S*test_failures.py:\d+, for \d+ s",
    "raises": "rank 1 ended: ValueError: the data are bad",
}


@pytest.mark.parametrize("how", GONE)
def test_stages_say_who_is_missing(tmp_path: Path, how: str) -> None:
    codes = start(WORLD, pipelined_rank, str(tmp_path), how, seconds=60)
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(WORLD) if rank != VICTIM]
    assert [code for rank, code in enumerate(codes) if rank != VICTIM] == [3] * 3
    for each in told:
        assert each["kind"] == "MeshError" and each["seconds"] < DEADLINE + 10, each
        # Rank 2 waits for rank 0, which waits for the missing one, or did so in vain.
        assert re.search(f"{GONE[how]}|rank 0 is at |waited in vain at", each["message"]), each["message"]
    assert any(re.search(GONE[how], each["message"]) for each in told)
    assert any(re.search(r"F\d.*, between the ranks \[1, 3\], did not go", each["message"]) for each in told), told


def restarted(rank: int, folder: str) -> None:
    """Goes on from the state, and beside it trains from the start without a break; both must agree bit for bit."""
    join_group(rank, WORLD, f"{folder}/meet_again")
    again, optimizer, step = training()
    tessera.load_state(f"{folder}/saved", again, optimizer)
    step(batch(1, rank))
    model, _, step = training()
    for number in range(2):
        step(batch(number, rank))
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p.to_local(), q.to_local())


EXAMPLE = str(Path(__file__).parents[2] / "examples" / "restart.py")


def run_example(*args: str) -> None:
    """As a script, in a rank that torchrun's agent has started."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", CUDA_VISIBLE_DEVICES="")
    torch.set_num_threads(1)
    sys.argv = [EXAMPLE, *args]
    runpy.run_path(EXAMPLE, run_name="__main__")


def test_torchrun_starts_ranks_again(tmp_path: Path) -> None:
    """The example: a rank dies in step 2, once. One process goes on from the state that the others left.

    This is what `torchrun --standalone --nproc-per-node=2 --max-restarts=1` does, with ranks that start quickly.
    """
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, max_restarts=1, monitor_interval=0.1, start_method="forkserver",
        run_id="again", rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        logs_specs=DefaultLogsSpecs(str(tmp_path / "logs"), redirects=Std.OUT),
    )  # fmt: skip
    elastic_launch(config, run_example)(str(tmp_path / "states"), "--steps=4", "--kill=2")
    told = [path.read_text() for path in sorted(tmp_path.glob("logs/*/attempt_*/0/stdout.log"))]
    steps = re.findall(r"step (\d) of 2 ranks: loss (\S+)", "".join(told))
    assert len(told) == 2 and [number for number, _ in steps][-2:] == ["2", "3"]
    example = runpy.run_path(EXAMPLE)
    model = example["model_of"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(4):
        optimizer.zero_grad()
        example["loss_of"](model, example["batch"](number)).backward()
        optimizer.step()
    other = example["model_of"]()
    tessera.load_state(tmp_path / "states", other)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
