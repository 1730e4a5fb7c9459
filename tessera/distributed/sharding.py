"""`shard`: a model's weights lie on a mesh, as a plan says.

In: a model, a mesh, a plan. Out: the same model, whose parameters are DTensors, and a `Sharding` that `jit` and
`train_step` find by the model. What an axis of tensor parallelism splits is read off a program, so weights come to lie
there at the first call; they stay the same parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tessera.distributed.capture import Forward
from tessera.distributed.communicator import bind, bind_inner
from tessera.distributed.compare import agree_on_weights
from tessera.distributed.hugging_face import with_their_plan
from tessera.distributed.meta import is_meta, materialise
from tessera.distributed.plan import DATA, MODEL, Layout, Plan, demanded, lay_out, lay_out_early
from tessera.distributed.regions import Regions
from tessera.distributed.room import bytes_of, check_room, in_gb
from tessera.distributed.users_line import at_users_line
from tessera.distributed.weights import Replaced, adopt, distribute, leave, move, placement_of, whole_type
from tessera.ir.equation import Value
from tessera.ir.placement import Placement
from tessera.ir.types import TensorType, contiguous_strides
from tessera.transforms.pipelined.places import Held
from tessera.util.errors import InputError, OptionError

AnyModule = TypeVar("AnyModule", bound=nn.Module)
PlanLike = str | Mapping[str, object]


class Sharding:
    """How a model lies on a mesh."""

    def __init__(self, device_mesh: DeviceMesh, plan: PlanLike, settled: bool, wide: bool) -> None:
        self.device_mesh, self.mesh = device_mesh, bind(device_mesh)
        self.plan = Plan.of(plan, self.mesh)
        self.settled = settled  # weights lie where they stay
        self.wide = wide  # gradients of 16 bits are summed in float32
        self.microbatches: int | None = None  # what the user asked for
        self.stages: dict[str, Held] | None = None  # in a pipeline, who has each weight; None: all ranks have all
        if self.plan.pipe is not None:
            bind_inner(self.plan.inner, device_mesh)

    def __deepcopy__(self, memo: dict) -> Sharding:
        """A copy of a model lies as the model does, and may come to lie elsewhere."""
        copied = object.__new__(Sharding)
        vars(copied).update(vars(self))
        return copied

    def __reduce__(self) -> tuple:
        """In another process there may be no such mesh."""
        return type(None), ()

    def whole_batch(self, leaves: list, microbatches: int = 1) -> dict[int, TensorType]:
        """The types of a whole batch (or microbatch), of which this rank has a part; a DTensor says itself which."""
        ranks = 1
        for axis in self.plan.axes(*DATA):
            ranks *= self.mesh.size(axis)
        types = {}
        for i, x in enumerate(leaves):
            if isinstance(x, DTensor):
                if x.device_mesh != self.device_mesh:
                    raise InputError(f"expected DTensors on the mesh {self.mesh}, got one on {x.device_mesh}")
                types[i] = whole_type(x)
            elif isinstance(x, torch.Tensor):
                shape = (x.shape[0] // microbatches * ranks, *x.shape[1:]) if x.ndim else ()
                types[i] = TensorType(x.dtype, shape, contiguous_strides(shape), x.device)
        return types

    @property
    def regions(self) -> Regions:
        """What runs functions that speak of a rank's parts."""
        return Regions(self.device_mesh, self.plan.inner, self.plan.axes(*DATA))

    def rows(self, leaves: Sequence[object]) -> list[int]:
        """The numbers of rows that the arguments of a pipeline have."""
        if any(isinstance(x, DTensor) for x in leaves):
            raise InputError(f"expected plain tensors beside a pipeline, got a DTensor on the mesh {self.mesh}")
        return sorted({x.shape[0] for x in leaves if isinstance(x, torch.Tensor) and x.ndim})

    def watched(self, model: nn.Module) -> dict[str, str]:
        """The modules whose results the plan places, and where."""
        return self.plan.named(*_names(model))[1]

    def settle(self, model: nn.Module, forward: Forward, leaves: Sequence[object] = ()) -> Layout:
        """Where everything of a captured program lies; weights are brought there, if they are not there yet. DTensors
        among the arguments `leaves` lie where they are."""
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        pairs = zip(forward.batch, tensors, strict=False)
        given = {v: placement_of(x, self.mesh) for v, x in pairs if isinstance(x, DTensor)}
        for v, placement in given.items():
            if not all(map(placement.is_even, range(v.ndim))):
                raise InputError(f"{v.name}: expected a DTensor that its axes divide, got one that lies as {placement}")
        held = None
        if self.settled:
            held = {name: placement_of(p, self.mesh) for name, p in model.named_parameters()}  # type: ignore[arg-type]
        modules = _names(model)[1]
        layout = lay_out(self.plan, forward.trace, forward.weights, forward.batch, held, modules, given)
        if not self.settled:
            move(model, layout.weights, self.device_mesh)
            self.settled = True
        return layout

    def settle_stages(self, model: nn.Module, held: Mapping[str, Held]) -> None:
        """Weights of other stages are given up, once the first program was cut. Later ones are cut alike."""
        pipe = self.plan.pipe
        assert pipe is not None
        if self.stages is None:
            self.stages = dict(held)
            here = self.device_mesh.get_local_rank(pipe.axis)
            leave(model, [name for name, weight in held.items() if here not in weight.ranks])
        for name, weight in held.items():
            before = self.stages[name]
            if weight.owner != before.owner or not set(weight.ranks) <= set(before.ranks):
                raise OptionError(
                    f"pipeline: {name} is on the ranks {before.ranks} of {pipe.axis}; expected a program that "
                    f"reads it there, got one that reads it on {weight.ranks}"
                )

    def placed(self, model: nn.Module, forward: Forward) -> list[Placement]:
        """Where the results of watched modules lie."""
        texts, values = self.watched(model), forward.trace.outputs[forward.results :]
        return [demanded(self.plan, name, v, texts[name]) for name, v in zip(forward.watched, values, strict=True)]  # type: ignore[arg-type]


_NOTED = "_tessera_sharding"  # an attribute of the model, so that copies have it


@at_users_line
def shard(
    model: AnyModule,
    mesh: DeviceMesh,
    plan: PlanLike,
    *,
    reduce_dtype: torch.dtype | None = None,
    microbatches: int | None = None,
) -> AnyModule:
    """Lay a model's weights out on a mesh, in place; gives the model.

    mesh           what `tessera.mesh` gives, or a DeviceMesh whose axes have names
    plan           a word for each axis ("zero3", or {"dp": "zero3", "tp": "tensor"}), and placements by name, of
                   weights or of what modules give: {"*.up.weight": "f/tp, d", "*.attn": "b/dp, s, h"}. The word "hf":
                   as the tp_plan of a Hugging Face model says. A pipeline's axis has the word of a schedule ("1f1b"),
                   that and the modules that stages begin with ("1f1b", ["blocks.4"]), or a schedule's table
    reduce_dtype   torch.float32: gradients of 16 bits are summed over ranks in float32
    microbatches   how many parts a pipeline cuts a batch into; None: as many as divide its rows, at most 4 a rank

    Parameters become DTensors, from what rank 0 holds; a model on the meta device is made shard by shard. Make the
    optimizer afterwards. Then `train_step` and `jit` follow the weights.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"shard: expected a module, whose weights lie there, got {type(model).__name__}")
    place(model, mesh, plan, reduce_dtype, microbatches)
    return model


@at_users_line
def place(
    model: nn.Module,
    mesh: object,
    plan: object,
    reduce_dtype: torch.dtype | None = None,
    microbatches: int | None = None,
) -> Replaced:
    """As `shard`; gives the new parameter for each old one."""
    check_mesh(mesh, plan)
    if reduce_dtype not in (None, torch.float32):
        raise OptionError(f"reduce_dtype: expected torch.float32 or None, got {reduce_dtype}")
    if (known := sharding_of(model)) is not None:
        raise OptionError(f"shard: expected a model that is not sharded, got one on the mesh {known.mesh}")
    plan = with_their_plan(model, mesh, plan)  # type: ignore[arg-type]
    sharding = Sharding(mesh, plan, False, reduce_dtype is not None)  # type: ignore[arg-type]
    ask_for(sharding, microbatches)
    if sharding.plan.pipe is not None:
        sharding.plan.pipe.check_names(_names(model)[1])
    already = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
    sharding.settled = bool(already) or not sharding.plan.axes(*MODEL, "experts")
    agree_on_weights(model)
    adopt(model, sharding.device_mesh)
    weights = {name: Value(name.replace(".", "_"), whole_type(p)) for name, p in model.named_parameters()}
    early = lay_out_early(sharding.plan, weights, _names(model)[1])
    held = bytes_of((p, early[name]) for name, p in model.named_parameters())
    moves = not sharding.settled or sharding.plan.pipe is not None
    told = f"{in_gb(held)} of weights{', which lie so until the first call' if moves else ''}"
    check_room(held, told, torch.device(sharding.device_mesh.device_type))
    if is_meta(model):
        materialise(model, early, sharding.device_mesh)
    new = distribute(model, early, sharding.device_mesh)
    vars(model)[_NOTED] = sharding
    return new


def ask_for(sharding: Sharding, microbatches: int | None, scheduled: bool = True) -> None:
    """Note how many microbatches the user wants; `scheduled`: there must be enough for the plan's schedule."""
    if microbatches is None:
        return
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise OptionError(f"microbatches: expected a number, at least 1, or None, got {microbatches!r}")
    pipe = sharding.plan.pipe
    if pipe is None:
        raise OptionError(f"microbatches: expected a plan with a pipeline such as '1f1b', got {sharding.plan.words}")
    if scheduled:
        pipe.schedule(microbatches)
    sharding.microbatches = microbatches


def sharding_of(model: object) -> Sharding | None:
    """How `shard` laid a model out; None where it did not."""
    return vars(model).get(_NOTED) if isinstance(model, nn.Module) else None


def check_outermost(model: object, what: str) -> None:
    """Refuse a module that was not laid out and holds one that was: only the whole has a program of one rank."""
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if (sharding := sharding_of(module)) is not None:
            raise OptionError(
                f"{what}: expected a module that tessera.shard laid out, got {type(model).__name__}, of which only "
                f"{name} lies on the mesh {sharding.mesh}; call tessera.shard on the whole as well: weights that lie "
                "there stay where they are"
            )


def pipeline_axis(model: nn.Module) -> str | None:
    """The axis whose ranks hold different weights of a model; None where there is none, or none does yet."""
    sharding = sharding_of(model)
    return sharding.plan.pipe.axis if sharding and sharding.plan.pipe and sharding.stages is not None else None


def _names(model: nn.Module) -> tuple[list[str], list[str]]:
    return [n for n, _ in model.named_parameters()], [n for n, _ in model.named_modules() if n]


def check_mesh(mesh: object, plan: object) -> None:
    """Both or neither."""
    if not isinstance(mesh, DeviceMesh):
        raise OptionError(f"mesh: expected what tessera.mesh gives, or a DeviceMesh, got {type(mesh).__name__}")
    if plan is None:
        raise OptionError("plan: expected one beside a mesh, such as 'zero3' or {'dp': 'zero3', 'tp': 'tensor'}")
    if not isinstance(plan, (str, Mapping)) or (
        isinstance(plan, Mapping) and not all(isinstance(k, str) for k in plan)
    ):
        raise OptionError(f"plan: expected a word, or words and placements by name, got {plan!r}")
