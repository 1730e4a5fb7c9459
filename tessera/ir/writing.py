"""Operators that write, recorded as what they compute.

In: a call that writes to a tensor it is given, changes which memory a tensor object shows, or keeps running statistics
behind its schema's back. Out: equations that write nothing; from then on the tensor is the value they give.
"""

from __future__ import annotations

import torch

from tessera.ir import fake, literals
from tessera.ir.alias import FUNCTIONAL, Ref, Root, View, grad_mode, overwriting
from tessera.ir.equation import NO_GRAD, Value
from tessera.ir.overlap import check_overlap
from tessera.ir.recording import Recording
from tessera.ir.schema import bind, functional_of, is_composite, schema_of
from tessera.ir.strided import record_strided
from tessera.ir.views import STRIDED
from tessera.torch_internals import pytree
from tessera.torch_internals.operators import OpOverload, custom_operators, op_name, op_schema
from tessera.util.errors import CaptureError

# Operators that change what a tensor object is, not what its memory holds.
SHAPE_CHANGES = {
    "resize_",
    "set_",
    "resize_as_",
    "set_data",
    "_resize_output_",
    "sparse_resize_",
    "sparse_resize_and_clear_",
}
VIEW_CHANGES = {"t_", "transpose_", "squeeze_", "unsqueeze_", "swapaxes_", "swapdims_", "as_strided_", "detach_"}
# Writes their schemas do not tell of: arguments 3 and 4 are running statistics.
RUNNING_STATISTICS = {
    "batch_norm",
    "instance_norm",
    "cudnn_batch_norm",
    "miopen_batch_norm",
    "native_batch_norm",
    "_batch_norm_impl_index",
}
BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default  # as it is recorded in training
OVERLAPS_ITSELF = "more than one element of the written-to tensor refers to a single memory location"


def record_write(recorder: Recording, func: OpOverload, args: tuple, kwargs: dict) -> object:
    """An operator that writes: compute what it writes, then let the written tensors hold it."""
    schema = schema_of(func)
    params = schema.params
    targets: list[torch.Tensor] = []
    read: list[torch.Tensor] = []
    for i, param in enumerate(params):
        held = kwargs.get(param.name) if param.keyword or i >= len(args) else args[i]
        tensors = [t for t in pytree.tree_leaves(held) if isinstance(t, torch.Tensor)]
        (targets if i in schema.mutated else read).extend(tensors)
    plain = functional_of(func)
    check_overlap(func, targets, read, opaque=plain is None)
    before = [(tuple(t.shape), t.dtype) for t in targets]
    lowered_args, lowered_kwargs = recorder.lower((args, kwargs))  # type: ignore[misc]
    try:
        with fake.symbolic_rules(recorder.symbolic):
            out, known = literals.call(fake.rule_of(func), func, args, kwargs)
    except RuntimeError as error:  # a rule over symbols says what eager's kernel says
        if OVERLAPS_ITSELF in str(error):
            raise CaptureError(f"{func} writes memory that overlaps itself, which eager refuses") from error
        raise
    if any((tuple(t.shape), t.dtype) != b for t, b in zip(targets, before, strict=True)):
        raise CaptureError(f"{func} resized a tensor it was given to write; give it one of the right shape")
    if plain is not None and not _draws_in_other_order(func, args):
        # The two may differ in their defaults, so every argument is spelled out.
        positional, keyword = bind(func, lowered_args, lowered_kwargs)
        for i in schema.mutated if schema.is_out else ():
            keyword.pop(params[i].name)
        with overwriting(recorder.builder, func, map(recorder.ref, targets)):
            results = recorder.builder.emit(plain, *positional, **keyword)
        news = [v for v in pytree.tree_leaves(results) if isinstance(v, Value)]
        _check_casts(func, targets, news)
        extra: list[Value] = []
    else:
        results = recorder.builder.emit(FUNCTIONAL, func, *lowered_args, **lowered_kwargs)
        values = [v for v in results if v is not None]  # type: ignore[union-attr]
        extra, news = values[: -len(targets)], values[-len(targets) :]
    if op_schema(func).name in custom_operators:  # autograd does not see what it writes
        recorder.builder.tags |= {NO_GRAD}
    for tensor, new in zip(targets, news, strict=True):
        recorder.write_to(recorder.ref(tensor), new, known)
    fresh = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and id(t) not in recorder.refs]
    for tensor, v in zip(fresh, extra, strict=True):
        recorder.refs[id(tensor)] = Ref(tensor, v, Root())
    return out


def record_view_change(recorder: Recording, func: OpOverload, args: tuple, kwargs: dict) -> torch.Tensor:
    """`x.t_()`: the same object becomes a view of what it was."""
    tensor: torch.Tensor = args[0]
    ref = recorder.ref(tensor)
    if ref.given:
        raise CaptureError(f"{func} changes the shape of an input object; the graph that holds it runs eagerly")
    plain = functional_of(func)
    if plain is None:
        raise CaptureError(f"{func} has no functional form")
    old = ref.read(recorder.builder)
    ref.tensor = alias_of(tensor)  # what it was: views of that are still views of it
    recorder.refs[id(ref.tensor)] = ref
    if op_name(plain) in STRIDED:
        shown = recorder.ref(record_strided(recorder, plain, (ref.tensor, *args[1:]), kwargs))  # type: ignore[arg-type]
        literals.call(func, plain, args, kwargs)
        recorder.refs[id(tensor)] = Ref(tensor, shown.value, shown.root, shown.view, shown.version)
        return tensor
    literals.call(func, plain, args, kwargs)
    rest = recorder.lower(args[1:])
    cut = op_name(plain) == "detach"
    with grad_mode(recorder.builder, not cut or NO_GRAD not in recorder.builder.tags):  # the object keeps its history
        v = recorder.builder.emit(plain, old, *rest, **kwargs)  # type: ignore[misc]
    view = View(ref, plain, rest, kwargs, no_grad=cut and NO_GRAD in recorder.builder.tags)  # type: ignore[arg-type]
    recorder.refs[id(tensor)] = Ref(tensor, v, ref.root, view, ref.root.version)  # type: ignore[arg-type]
    return tensor


def record_statistics(recorder: Recording, func: OpOverload, args: tuple, kwargs: dict) -> object:
    """Normalisation in training writes its running mean and variance behind its schema's back."""
    schema = schema_of(func)
    bound = dict(zip((p.name for p in schema.params), args, strict=False)) | kwargs
    training = bound.get("training", bound.get("use_input_stats", False))
    # A batch of nothing has no statistics, and leaves the old ones as they are.
    empty = any(type(n) is int and n == 0 for n in bound["input"].shape)
    if not training or bound.get("running_mean") is None or op_name(func) != "batch_norm" or empty:
        if is_composite(func) and not (recorder.keep(func) and not training):
            with recorder:
                return func.decompose(*args, **kwargs)
        return recorder.pure(func, args, kwargs, recorder.outcome(func, args, kwargs))
    x, weight, bias, mean, var = (bound.get(k) for k in ("input", "weight", "bias", "running_mean", "running_var"))
    inputs = (x, weight, bias, mean, var, True, bound["momentum"], bound["eps"])
    outs = recorder.outcome(BATCH_NORM, inputs, {})
    results = recorder.builder.record(BATCH_NORM, recorder.lower(inputs), {}, fake.types_of(outs), "batch_norm")  # type: ignore[arg-type]
    recorder.refs[id(outs[0])] = Ref(outs[0], results[0], Root())  # type: ignore[index]
    recorder.alive.append(outs[0])
    for tensor, new in ((mean, results[3]), (var, results[4])):  # type: ignore[index]
        statistics = recorder.builder.emit(torch.ops.aten.detach.default, new)  # they carry no gradient
        recorder.write_to(recorder.ref(tensor), statistics)  # type: ignore[arg-type]
    return outs[0]


def _check_casts(func: OpOverload, targets: list[torch.Tensor], news: list[Value]) -> None:
    """An operator in place promotes types like any other, and refuses a target that cannot hold what comes of it.
    Some rules of fake tensors do not ask."""
    for target, new in zip(targets, news, strict=True):
        if not torch.can_cast(new.tensor.dtype, target.dtype):
            raise CaptureError(
                f"{func}: result type {new.tensor.dtype} can't be cast to the output type {target.dtype}"
            )


def _draws_in_other_order(func: OpOverload, args: tuple) -> bool:
    """bernoulli fills a new tensor from front to back, bernoulli_ the given one as its strides have it."""
    return op_name(func) == "bernoulli_" and not args[0].is_contiguous()


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """Another object that shows the same memory."""
    op = torch.ops.aten.alias.default
    return literals.call(op, op, (tensor,), {})[0]  # type: ignore[return-value]
