"""Plans and meshes that cannot be: each message names what was expected and what came. DTensor's words, both ways."""

from __future__ import annotations

import re

import pytest
import torch
from steps import pretended
from torch.distributed.tensor import Replicate, Shard

import tessera
from tessera.distributed.channel import GroupChannel
from tessera.distributed.dtensors import from_dtensor, to_dtensor
from tessera.distributed.plan import Plan, lay_out
from tessera.frontends.functional.trace import trace_function
from tessera.inspection import mesh as inspection_mesh
from tessera.ir.dist import exchange_of
from tessera.ir.equation import Value
from tessera.ir.mesh import Mesh
from tessera.ir.placement import Placement
from tessera.ir.types import TensorType
from tessera.machines import machine
from tessera.machines.here import with_figures
from tessera.transforms.pipelined.cut import Stages
from tessera.util.errors import CaptureError, DoubleBackwardError, InputError, OptionError

MESH = Mesh.of(dp=2, tp=4)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ("zero3", "a word for each axis"),
        ({"dp": "zero3"}, "got none for tp"),
        ({"dp": "zero3", "tp": "tensor", "pp": "zero1"}, "expected axes of the mesh dp=2 tp=4, got 'pp'"),
        ({"dp": "zero3", "tpp": "tensor"}, "got 'tpp'; did you mean 'tp'"),
        ({"dp": "zero4", "tp": "tensor"}, "did you mean 'zero"),
        ({"dp": "hsdp", "tp": "tensor"}, "hsdp expects an axis of zero3"),
    ],
)
def test_bad_plans(plan: object, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        Plan.of(plan, MESH)  # type: ignore[arg-type]


def laid_out(patterns: dict, rows: int = 4):
    trace = trace_function(lambda w, x: x @ w.t(), (torch.randn(6, 8), torch.randn(rows, 8))).trace
    plan = Plan.of({"dp": "zero1", "tp": "tensor", **patterns}, MESH)
    return lay_out(plan, trace, {"up.weight": trace.inputs[0]}, [trace.inputs[1]])


@pytest.mark.parametrize(
    ("patterns", "says"),
    [
        ({"*.upp.weight": "f/tp, d"}, "matches no weight and no module; near are up.weight"),
        ({"*.weight": "f/tp, d"}, "which tp=4 does not divide"),
        ({"*.weight": "f"}, "expected 2 dimensions"),
        ({"*.weight": "f, d/xp"}, "up.weight is .*'f, d/xp' no placement of it: .*got 'xp'"),
        ({"*.weight": "f//tp"}, "up.weight is .* expected dimensions such as"),
        ({"*.weight": "f/tp, d/tp"}, "up.weight is .* expected every axis once, got tp twice"),
    ],
)
def test_bad_placements_by_name(patterns: dict, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        laid_out(patterns)


def test_placements_by_name() -> None:
    layout = laid_out({"*.weight": "f, d/tp"})
    assert str(layout.weights["up.weight"]) == "[6, 8/tp]" and str(layout.states["up.weight"]) == "[6/dp, 8/tp]"


def test_a_batch_that_ranks_do_not_divide() -> None:
    with pytest.raises(OptionError, match="expected a batch that dp=2 divides, got 3 rows"):
        laid_out({}, rows=3)


def test_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match=r"test_mesh_messages.py:\d+: mesh: .*torchrun --nproc-per-node=8"):
        tessera.mesh(device="cpu", dp=4, tp=2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(InputError, match="the environment has no MASTER_ADDR, MASTER_PORT"):
        tessera.mesh(device="cpu", dp=4, tp=2)


@pytest.mark.parametrize(
    ("asked", "says"),
    [({}, "expected axes .* got none"), ({"dp": 0}, "1 rank or more, got 0"), ({"dp": 2, "timeout": -1}, "got -1")],
    ids=str,
)
def test_bad_meshes(asked: dict, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        tessera.mesh(device="cpu", fake=True, **asked)


def test_a_plan_without_a_mesh() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(OptionError, match="mesh: expected what tessera.mesh gives"):
        tessera.train_step(model, None, torch.optim.SGD(model.parameters()), plan="ddp")


@pytest.mark.parametrize(
    "text", ["[8, 8]", "[8/tp/dp, 4]", "[8/dp/tp, 4]", "[8/dp, 4/tp]", "[8/dp, 4] +tp", "[8] max:tp"]
)
def test_dtensors_words_both_ways(text: str) -> None:
    placement = Placement.parse(text, MESH)
    assert from_dtensor(to_dtensor(placement), MESH, placement.shape) == placement


def test_dtensors_words() -> None:
    assert to_dtensor(Placement.parse("[8, 4/tp]", MESH)) == [Replicate(), Shard(1)]


@pytest.fixture
def alone():
    """One rank, in a group of its own."""
    yield tessera.mesh(device="cpu", fake=True, dp=1)
    torch.distributed.destroy_process_group()


def test_a_mesh_of_another_size_than_the_world(alone) -> None:
    says = r"test_mesh_messages.py:\d+: mesh: dp=2 tp=2 has 4 ranks, the process group 1; .*torchrun --nproc-per-node=4"
    with pytest.raises(InputError, match=says):
        tessera.mesh(device="cpu", dp=2, tp=2)


def test_an_optimizer_made_before_shard(alone) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    tessera.shard(model, alone, "zero3")
    with pytest.raises(InputError, match=r"test_mesh_messages.py:\d+: .*got SGD made before it, of weight, bias"):
        tessera.train_step(model, None, optimizer)
    for touch in (optimizer.step, optimizer.zero_grad):  # as a loop of one's own around a jitted model does
        with pytest.raises(InputError, match=r"test_mesh_messages.py:\d+: .*made before it, of weight"):
            touch()


def test_an_optimizer_of_some_old_parameters(alone) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    old = [*model[0].parameters()]
    tessera.shard(model, alone, "zero3")
    with pytest.raises(InputError, match=r"made before it, of 0.weight, 0.bias"):
        tessera.train_step(model, None, torch.optim.SGD([*old, *model[1].parameters()]))


@pytest.mark.parametrize("plan", [3, ["zero3"], {1: "zero3"}], ids=str)
def test_what_is_no_plan(alone, plan) -> None:
    with pytest.raises(OptionError, match=r"test_mesh_messages.py:\d+: plan: expected a word, or words and placements"):
        tessera.shard(torch.nn.Linear(2, 2), alone, plan)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"accumulate": 0}, "accumulate"),
        ({"clip_norm": -1.0}, "clip_norm"),
        ({"microbatches": 2}, "microbatches"),
    ],
)
def test_what_a_step_cannot_be_asked_for(options: dict, says: str) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(OptionError, match=rf"test_mesh_messages.py:\d+: {says}: expected"):
        tessera.train_step(model, None, torch.optim.SGD(model.parameters()), **options)


def test_a_pipeline_splits_no_weight() -> None:
    with pretended({"pp": 2}) as mesh, pytest.raises(OptionError, match="over pp, which is a pipeline"):
        tessera.shard(torch.nn.Linear(2, 2), mesh, {"pp": "1f1b", "*weight": "f/pp, d"})


def a_pipelined_step(mesh: object, layers: int) -> tessera.training.sharded.ShardedStep:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters())
    loss = lambda model, x: model(x).mean()  # noqa: E731
    return tessera.train_step(model, loss, optimizer, mesh=mesh, plan={"pp": "1f1b"}, executors="aten")


def test_more_stages_than_layers() -> None:
    with (
        pretended({"pp": 4}) as mesh,
        pytest.raises(
            OptionError, match=r"py:\d+: pipeline: expected at most 2 stages, .* got 4; the last .*_messages.py:\d+"
        ),
    ):
        a_pipelined_step(mesh, 2)(torch.ones(4, 4))


def test_a_model_is_sharded_once(alone) -> None:
    model = tessera.shard(torch.nn.Linear(2, 2), alone, "zero3")
    with pytest.raises(OptionError, match="got one on the mesh dp=1"):
        tessera.shard(model, alone, "ddp")


def test_a_module_around_a_sharded_one(alone) -> None:
    inner = tessera.shard(torch.nn.Linear(4, 4), tessera.mesh(dp=1), "zero3")
    outer = torch.nn.Sequential(inner, torch.nn.GELU())
    says = "got Sequential, of which only 0 lies on the mesh dp=1; call tessera.shard on the whole"
    with pytest.raises(OptionError, match=f"jit: .*{says}"):
        tessera.jit(outer)
    with pytest.raises(OptionError, match=f"train_step: .*{says}"):
        tessera.train_step(outer, lambda m, x: m(x).sum(), torch.optim.SGD(outer.parameters()))
    weight, x = inner.weight, torch.randn(2, 4)
    tessera.shard(outer, tessera.mesh(dp=1), "zero3")
    assert inner.weight is weight
    torch.testing.assert_close(
        tessera.jit(outer)(x), torch.nn.functional.gelu(x @ weight.full_tensor().t() + inner.bias.full_tensor())
    )


def test_a_meta_model_that_nobody_makes(alone) -> None:
    class Scale(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = torch.nn.Parameter(torch.ones(3, device="meta"))

    with pytest.raises(InputError, match="0 has weights on the meta device and no reset_parameters"):
        tessera.shard(torch.nn.Sequential(Scale()), alone, "zero3")


def test_a_function_has_no_weights_to_shard(alone) -> None:
    with pytest.raises(OptionError, match="expected a module, whose weights lie there, got function"):
        tessera.jit(lambda x: x, mesh=alone, plan="ddp")


def test_a_list_has_no_weights_to_shard(alone) -> None:
    with pytest.raises(OptionError, match="expected a module, whose weights lie there, got list"):
        tessera.shard([torch.nn.Linear(2, 2)], alone, "ddp")  # type: ignore[type-var]


ASKING = {
    "if": lambda model, x: model(x).sum() if x.sum() > 0 else -model(x).sum(),
    "item": lambda model, x: model(x).sum() * x.sum().item(),
    "numpy": lambda model, x: model(x).sum() * float(x.numpy().sum()),
    "backward": lambda model, x: model(x).sum().backward(),
    "tolist": lambda model, x: sum(model(x)[i].sum() for i in x[:, 0].long().tolist()),
}


@pytest.mark.parametrize("loss", ASKING.values(), ids=ASKING.keys())
def test_what_a_step_asks_of_a_value_has_a_line(alone, loss) -> None:
    model = tessera.shard(torch.nn.Linear(2, 2), alone, "ddp")
    step = tessera.train_step(model, loss, torch.optim.SGD(model.parameters()))
    with pytest.raises(
        CaptureError, match=r"test_mesh_messages.py:\d+: .*(torch.where|Give the loss|give it Python numbers)"
    ):
        step(torch.ones(2, 2))


def test_explain_tells_what_ranks_send() -> None:
    with pretended({"dp": 2}) as mesh:
        model = tessera.shard(torch.nn.Linear(4, 4, bias=False), mesh, "zero3")
        fast = tessera.jit(model, executors="aten")
        fast(torch.randn(4, 4)).sum().backward()
        told = str(tessera.explain(fast))
    assert "dp: 1 all_gather, 32 bytes sent by a rank" in told and "dp: 1 reduce_scatter, 32 bytes" in told


def test_explain_tells_what_was_joined_and_what_stays_exposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection_mesh, "machine_of", lambda device: machine("h100"))
    with pretended({"dp": 2}) as mesh:
        model = tessera.shard(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), mesh, "zero3")
        fast = tessera.jit(model, executors="aten")
        fast(torch.randn(4, 4)).sum().backward()
        told = str(tessera.explain(fast))
    assert "dp: 2 all_gather of 5 joined" in told and "dp: 1 reduce_scatter of 4 joined" in told
    assert re.search(r"foreseen: \S+ ms: \S+ of work, \S+ of exchanges, of which \S+ hidden", told)
    assert re.search(r"foreseen: \S+ ms exposed at \S+:\d+", told)


def test_explain_names_what_was_gathered() -> None:
    class Inverted(torch.nn.Linear):
        def forward(self, x):
            return x @ torch.linalg.inv_ex(self.weight)[0]

    with pretended({"tp": 2}) as mesh:
        fast = tessera.jit(Inverted(4, 4, bias=False), mesh=mesh, plan={"tp": "tensor", "weight": "f/tp, d"})
        with torch.no_grad():
            fast(torch.randn(4, 4))
        told = str(tessera.explain(fast))
    assert re.search(r"linalg_inv\S* at \S*test_mesh_messages.py:\d+ wants whole values, .* sends 32 bytes", told)


def test_gradients_of_gradients_are_refused() -> None:
    with pretended({"dp": 1}) as mesh:
        model = tessera.shard(torch.nn.Linear(4, 1), mesh, "ddp")
        out = tessera.jit(model, executors="aten")(torch.randn(4, 4, requires_grad=True)).square().sum()
        with pytest.raises(DoubleBackwardError, match="on a mesh"):
            torch.autograd.grad(out, [*model.parameters()], create_graph=True)


def test_ranks_that_do_not_exist_send_zeros() -> None:
    """A stage may look something up by what it is sent, which must be a place in a table."""
    with pretended({"pp": 2}) as mesh:
        channel = GroupChannel(mesh, "pp", Stages(0, {}, {}, (), {}, {}), {})
        drawn = Value("choice", TensorType(torch.int64, (2, 3), (3, 1), torch.device("cpu")))
        assert not channel.room(drawn).any() and channel.room(drawn, 2).shape == (4, 3)


@pytest.mark.parametrize(("dtype", "bits"), [(None, 16), (torch.float32, 32)])
def test_sums_of_gradients_in_float32(dtype: torch.dtype | None, bits: int) -> None:
    with pretended({"dp": 2}) as mesh:
        model = tessera.shard(torch.nn.Linear(4, 4).bfloat16(), mesh, "zero1", reduce_dtype=dtype)
        fast = tessera.jit(model, executors="aten")
        fast(torch.randn(4, 4).bfloat16()).sum().backward()
        _, backward = fast.__tessera__.compilations()[0].account.programs
    exchanges = [(e, exchange_of(e)) for e in backward.trace.equations if exchange_of(e) is not None]
    sums = [e for e, (name, _) in exchanges if name in ("all_reduce", "reduce_scatter")]
    assert sums and all(e.out.dtype.itemsize * 8 == bits for e in sums)


@pytest.mark.parametrize(
    ("memory", "says"),
    [
        (2.5e8, "0.1 GB of weights, 0.1 GB of the optimizer's state, 0.0 GB of the batch, and 0.. GB while the step"),
        (1.7e8, "a rank needs 0.2 GB: 0.1 GB of weights, and 0.1 GB of the optimizer's state"),
    ],
)
@pytest.mark.parametrize(("axis", "plan"), [("dp", "zero3"), ("pp", "1f1b")])
def test_a_plan_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, axis: str, plan: str, memory: float, says: str
) -> None:
    """Before anything runs, or is made; it says what takes how much."""
    small = with_figures(machine("h100"), {"memory": memory}, "made up")
    monkeypatch.setattr(tessera.distributed.room, "machine_of", lambda device: small)
    monkeypatch.setattr(tessera.training.sharded.ShardedStep, "device", torch.device("cuda"))
    model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(2)))
    with pretended({axis: 2}) as mesh:
        optimizer = torch.optim.AdamW(model.parameters())
        step = tessera.train_step(
            model, lambda model, x: model(x).square().mean(), optimizer, mesh=mesh, plan={axis: plan}, executors="aten"
        )
        for _ in range(2):  # and so the second time
            with pytest.raises(InputError, match=rf"test_mesh_messages.py:\d+.* which has 0\.\d GB; .*{says}"):
                step(torch.ones(4, 4096))
        assert memory > 2e8 or not optimizer.state


def test_weights_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model without memory; nothing of it is made."""
    small = with_figures(machine("h100"), {"memory": 1e5}, "made up")
    monkeypatch.setattr(tessera.distributed.room, "machine_of", lambda device: small)
    with torch.device("meta"):
        model = torch.nn.Linear(512, 512)
    with (
        pretended({"dp": 2}, "cuda") as mesh,
        pytest.raises(InputError, match="a rank needs 0.0 GB: .* of weights"),
    ):
        tessera.shard(model, mesh, "zero3")
    assert model.weight.is_meta
