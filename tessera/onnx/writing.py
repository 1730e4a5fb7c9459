"""`export`: a model as an ONNX file, and its answer compared with eager PyTorch's."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping

import torch
from torch.export import ExportedProgram

from tessera.exporters.onnx.compare import compare, rounding_alone
from tessera.exporters.onnx.errors import ExportError
from tessera.exporters.onnx.file import INSIDE, save, with_weights
from tessera.exporters.onnx.graph import as_real
from tessera.exporters.onnx.model import to_model
from tessera.exporters.onnx.program import narrowed_values, random_inside, random_values
from tessera.exporters.onnx.registry import OLDEST
from tessera.exporters.onnx.runtimes import ORT, REFERENCE, lacks, preferred, runtime
from tessera.frontends.onnx.proto import onnx
from tessera.onnx.arrays import to_numpy, to_torch
from tessera.onnx.captured import Leaving, captured_model
from tessera.torch_internals import pytree
from tessera.util.errors import OptionError
from tessera.util.files import check_writable

DEFAULT = 23  # the first opset with attention and RMS normalisation
DRAWING = 21  # the last whose random numbers ONNX Runtime draws
NEWEST = onnx.defs.onnx_opset_version()


def export(
    model: Callable | ExportedProgram,
    args: tuple = (),
    path: str | os.PathLike | None = None,
    *,
    kwargs: dict | None = None,
    dynamic: Mapping | None = None,
    opset: int | None = None,
    check: bool = True,
    inside: int = INSIDE,
) -> onnx.ModelProto | None:
    """Write a model as an ONNX file, for the given example arguments; without a path, give the `onnx.ModelProto`.

    dynamic  sizes that may change: `{"x": {0: "batch", 1: ("length", 1, 512)}}`; a name stands for one size
    opset    17 or later; unless given 23, or 21 where random numbers are drawn, which runtimes lack after it
    check    run the file on the arguments, by ONNX Runtime or, where that is missing, by onnx's reference evaluator,
             and raise unless it gives what the model does; of random results the type is compared
    inside   bytes of weights that the file itself holds; with more they lie beside it, in `<path>.data`
    """
    if opset is not None and not OLDEST <= opset <= NEWEST:
        raise OptionError(f"opset: expected {OLDEST} to {NEWEST}, got {opset}")
    if path is not None:
        check_writable(os.fspath(path))
    leaving = captured_model(model, args, kwargs or {}, dynamic, _name(model))
    version = opset or min(DRAWING if random_inside(leaving.program.trace) else DEFAULT, NEWEST)
    expected = _eager(model, args, kwargs or {}) if check else None
    message, weights = to_model(leaving.program, version)
    if path is None:
        message = with_weights(message, weights)
        held: str | bytes = message.SerializeToString() if check else b""
    else:
        held = os.fspath(path)
        save(message, weights, held, inside)
    if expected is not None:
        _check(held, leaving, expected, lambda: _exact(model, args, kwargs or {}))
    return message if path is None else None


def _name(model: object) -> str:
    name = getattr(model, "__name__", type(model).__name__)
    return name if name.isidentifier() else "model"


def _eager(model: Callable | ExportedProgram, args: tuple, kwargs: dict) -> list[object]:
    """What the model gives; its buffers and arguments stay as they are."""
    if isinstance(model, ExportedProgram):
        args, kwargs = model.example_inputs or ((), {})
        model = model.module()
    args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
    kept = {name: b.clone() for name, b in model.named_buffers()} if isinstance(model, torch.nn.Module) else {}
    try:
        with torch.no_grad():
            out = pytree.tree_map_only(torch.Tensor, torch.clone, model(*args, **kwargs))  # it may be a buffer
    finally:
        for name, b in model.named_buffers() if isinstance(model, torch.nn.Module) else ():
            b.data.copy_(kept[name])
    return pytree.tree_leaves(out)


def _exact(model: Callable | ExportedProgram, args: tuple, kwargs: dict) -> list[object]:
    """What the model gives in double precision; nothing where it does not run so."""
    if isinstance(model, ExportedProgram):  # its dtypes are part of it
        return []

    def double(x: torch.Tensor) -> torch.Tensor:
        return x.double() if x.is_floating_point() else x

    try:
        wide = copy.deepcopy(model).double() if isinstance(model, torch.nn.Module) else model
        return _eager(wide, *pytree.tree_map_only(torch.Tensor, double, (args, kwargs)))
    except Exception:  # a model that names its dtypes
        return []


def _check(held: str | bytes, leaving: Leaving, expected: list[object], exact: Callable[[], list[object]]) -> None:
    program = leaving.program
    kind, results = _answers(held, {name: to_numpy(x) for name, x in leaving.feeds.items()})  # type: ignore[misc]
    tensors = [x for x in expected if isinstance(x, (torch.Tensor, bool, int, float))]
    random, narrow = random_values(program.trace), narrowed_values(program.trace)
    problems: dict[int, tuple[str, torch.Tensor, torch.Tensor]] = {}
    for place, ((name, value), got, wanted) in enumerate(zip(program.outputs, results, tensors, strict=False)):
        answer = to_torch(got)
        assert isinstance(answer, torch.Tensor)
        if not isinstance(wanted, torch.Tensor):
            wanted = torch.tensor(wanted, dtype=answer.dtype)
        wanted = as_real(wanted.detach().cpu())
        if value in random and answer.shape == wanted.shape:  # then its type is all that can be compared
            answer, wanted = torch.empty(0, dtype=answer.dtype), torch.empty(0, dtype=wanted.dtype)
        difference = compare(name, answer, wanted, narrow.get(value))  # type: ignore[arg-type]
        if difference.problem:
            problems[place] = str(difference), answer, wanted
    precise = dict(enumerate(exact())) if problems else {}
    told = [text for i, (text, got, wanted) in problems.items() if not rounding_alone(got, wanted, precise.get(i))]
    if told:
        raise ExportError(f"the model is written, but {_called(kind)} gives another answer: {'; '.join(told)}")


def _answers(held: str | bytes, feeds: dict) -> tuple[str, list]:
    """What the file gives, and who says so: the reference evaluator where ONNX Runtime has no kernel for a type."""
    kind = preferred()
    try:
        return kind, runtime(kind, held)(feeds)
    except Exception as error:
        if kind == REFERENCE or not lacks(error):
            raise ExportError(f"the model is written, but {_called(kind)} does not run it: {error}") from error
        reason = str(error)
    try:
        return REFERENCE, runtime(REFERENCE, held)(feeds)
    except Exception as error:
        raise ExportError(f"the model is written, but ONNX Runtime does not run it: {reason}") from error


def _called(kind: str) -> str:
    return {ORT: "ONNX Runtime", REFERENCE: "onnx's reference evaluator"}[kind]
