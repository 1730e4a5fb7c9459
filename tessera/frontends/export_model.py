"""Models as exported programs: what `torch.export` makes of a module or function and example arguments.

In: a model, its arguments, and the sizes that may change. Out: an `ExportedProgram`, for `frontends/export.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from inspect import Parameter

import torch
from torch.export import ExportedProgram

from tessera.frontends.export_ranges import Sizes, narrower, without_one
from tessera.frontends.export_sizes import dynamic_shapes, grown
from tessera.frontends.open_loops import rewritten
from tessera.frontends.recorded_model import RecordedModel, recorded_model
from tessera.ir.recurrent import RECURRENT
from tessera.ir.strides import copied
from tessera.ir.types import overlaps_itself
from tessera.torch_internals import pytree
from tessera.torch_internals.exporting import every_line, iterations, line_at_fault, quiet_guards
from tessera.torch_internals.operators import made_of
from tessera.torch_internals.padded_encoder import exported_encoders
from tessera.torch_internals.shapes import asking_for_one
from tessera.util.errors import CaptureError, OptionError

_FIXED = "your code specialized it to be a constant"


def exported_program(
    model: Callable | ExportedProgram, args: tuple, kwargs: dict, dynamic: object
) -> tuple[ExportedProgram, tuple[str, ...]]:
    """The model as PyTorch exports it, and the names of its positional arguments."""
    if isinstance(model, ExportedProgram):
        if args or kwargs or dynamic:
            raise OptionError("an exported program brings its arguments and sizes: expected none beside it")
        return model, ()
    module, names, args, kwargs, shapes = _asked(model, args, kwargs, dynamic)
    args, kwargs = _apart(args, kwargs, module)
    with iterations() as through:
        try:
            return _exported(module, args, kwargs, shapes, dynamic, strict=False), names
        except Exception as error:
            refusal = CaptureError(f"torch.export does not capture {_name_of(model)}: {_reason(error)}")
            refusal.__cause__ = error
            if _FIXED not in str(error):
                raise refusal from error
    with rewritten(through) as loops, suppress(Exception):  # a loop may still be none; then the first refusal holds
        if loops:
            return _exported(module, args, kwargs, shapes, dynamic, strict=False), names
    try:  # TorchDynamo reads the program's Python, where `len(x)` of an open size need not be a number
        return _exported(module, args, kwargs, shapes, dynamic, strict=True), names
    except Exception:
        raise refusal from refusal.__cause__


def recorded_program(
    model: Callable | ExportedProgram, args: tuple, kwargs: dict, dynamic: object, name: str
) -> tuple[RecordedModel, tuple[str, ...]] | None:
    """The same for plain models, without `torch.export`; None where that is needed."""
    if isinstance(model, ExportedProgram) or kwargs:
        return None
    module, names, args, _, shapes = _asked(model, args, {}, dynamic)
    recorded = recorded_model(module, args, names, shapes, name)
    return None if recorded is None else (recorded, names)


def _asked(
    model: Callable, args: tuple, kwargs: dict, dynamic: object
) -> tuple[torch.nn.Module, tuple[str, ...], tuple, dict, object]:
    """The model as a module, the names of its positional arguments, what to capture it with, and its sizes as PyTorch
    wants them."""
    if not isinstance(args, tuple):
        raise OptionError(f"args: expected a tuple of arguments, got {type(args).__name__}")
    names = _names(model, len(args))
    given = {**dict(zip(names, args, strict=True)), **kwargs}
    shapes = dynamic_shapes(dynamic, given)
    given = grown(given, shapes)
    args, kwargs = tuple(given.pop(name) for name in names), given
    module = model if isinstance(model, torch.nn.Module) else _Function(_signed(model, names))
    return module, names, args, kwargs, shapes


def _signed(fn: Callable, names: tuple[str, ...]) -> Callable:
    """A function that says what its arguments are called, as PyTorch's own do not."""
    try:
        inspect.signature(fn)
        return fn
    except (TypeError, ValueError):
        if not callable(fn):
            return fn

    def call(*args: object, **kwargs: object) -> object:
        return fn(*args, **kwargs)

    kind = Parameter.POSITIONAL_OR_KEYWORD
    call.__signature__ = inspect.Signature([Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
    return call


def _reason(error: Exception) -> str:
    """Why a program is not captured; what PyTorch says of sizes, and of values that it does not know, runs over many
    lines."""
    if names := without_one(str(error)):
        return (
            f"it computes for {' and for '.join(f'{n} = 1' for n in names)} in a way of its own: expected a range that "
            "begins with 2; an example of that size makes a program for it alone, as another entry"
        )
    if "data-dependent" not in str(error):
        return str(error).partition("\n\nWhile executing")[0]  # of a graph, that and where in PyTorch's own files
    return (
        f"what is computed depends on data at {line_at_fault(error)}: expected torch.where over both sides of a "
        "branch, for a size the largest one (a bucket) with a mask over what is not there, and for a place in a tensor "
        "one that has a dimension (`cache[at.reshape(1)]`)"
    )


def _exported(
    module: torch.nn.Module, args: tuple, kwargs: dict, shapes: object, dynamic: object, strict: bool
) -> ExportedProgram:
    sizes, attempts = Sizes(shapes), 4
    while True:
        attempts -= 1
        try:
            with (
                torch.no_grad(), made_of(RECURRENT), exported_encoders(), every_line(), quiet_guards(),
                _by_name(module, len(args), kwargs), asking_for_one(),
            ):  # fmt: skip
                return torch.export.export(
                    module, args, kwargs, dynamic_shapes=sizes.shapes, strict=strict,  # type: ignore[arg-type]
                    prefer_deferred_runtime_asserts_over_guards=sizes.deferred,
                )  # fmt: skip
        except Exception as error:
            smaller = narrower(str(error), sizes, dynamic) if attempts else None
            if smaller is None:
                raise
            sizes = smaller


@contextmanager
def _by_name(module: torch.nn.Module, count: int, kwargs: dict) -> Iterator[None]:
    """While inside, arguments that go to `*args` and `**kwargs` are parameters of their own, as PyTorch's export counts
    them."""
    forward = module.forward
    signature = inspect.signature(forward)
    before = list(signature.parameters.values())
    parameters = _with_each(before, count, kwargs)
    if parameters == before:
        yield
        return

    def call(*args: object, **kwargs: object) -> object:
        return forward(*args, **kwargs)

    own = vars(module).get("forward")
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    module.forward = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def _with_each(parameters: Iterable[Parameter], count: int, kwargs: Iterable[str]) -> list[Parameter]:
    """Parameters with those that `*args` and `**kwargs` are at a call with so many arguments and such names."""
    made: list[Parameter] = []
    more = [name for name in kwargs if name not in {p.name for p in parameters}]
    for p in parameters:
        if p.kind is Parameter.VAR_POSITIONAL and count > len(made):
            rest = [Parameter(f"{p.name}_{i}", Parameter.POSITIONAL_OR_KEYWORD) for i in range(count - len(made))]
            made = [q.replace(default=Parameter.empty) for q in made] + rest
        elif p.kind is Parameter.VAR_KEYWORD and more:
            made += [Parameter(name, Parameter.KEYWORD_ONLY) for name in more]
        else:
            made.append(p)
    return made


def _apart(args: tuple, kwargs: dict, module: torch.nn.Module) -> tuple[tuple, dict]:
    """The arguments with no tensor among them twice: PyTorch's export would take the one for the other ever after. Nor
    does one show an element twice, as if expanded: others that come need not."""
    seen = {id(x) for x in (*module.parameters(), *module.buffers())}

    def once(x: torch.Tensor) -> torch.Tensor:
        if x.layout is torch.strided and x.numel() and overlaps_itself(x.shape, x.stride()):
            x = x.detach().clone(memory_format=torch.contiguous_format)
        elif id(x) in seen:
            x = copied(x.detach(), x.stride())
        seen.add(id(x))
        kept.append(x)  # an id is a tensor's as long as it lives
        return x

    kept: list[torch.Tensor] = []
    return pytree.tree_map_only(torch.Tensor, once, (args, kwargs))


class _Function(torch.nn.Module):
    def __init__(self, fn: Callable) -> None:
        super().__init__()
        self.fn = fn
        self.forward = fn  # type: ignore[method-assign]


def _name_of(model: object) -> str:
    return getattr(model, "__name__", type(model).__name__)


def _names(model: Callable, count: int) -> tuple[str, ...]:
    fn = model.forward if isinstance(model, torch.nn.Module) else model
    try:
        parameters = _with_each(inspect.signature(fn).parameters.values(), count, ())
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    return tuple(names[:count]) if len(names) >= count else tuple(f"arg{i}" for i in range(count))
