"""The registry, its page and the table of samples agree with each other and with PyTorch."""

from __future__ import annotations

import torch
from samples import TABLE

import tessera.executors
import tessera.transforms  # noqa: F401  (these register declarations, too)
from tessera.ir.schema import schema_of
from tessera.ops import matrix
from tessera.ops.op import registry, rules

# Families whose operators have their samples in the table here.
SAMPLED = {
    "unary", "binary", "pointwise", "step", "predicate", "reduction", "pick", "scan", "view", "shape", "copy",
    "constructor", "index", "random",
}  # fmt: skip


def test_page_is_true() -> None:
    assert matrix.PAGE.read_text() == matrix.table(), "write it again with: python -m tessera.ops.matrix"


def test_every_operator_has_samples() -> None:
    declared = {name for name, found in registry().items() if found.family in SAMPLED}
    assert declared == set(TABLE)


def test_names_are_operators() -> None:
    """A declaration names a packet or an overload that PyTorch has."""
    for name in registry():
        namespace, packet_name, *overload = name.split(".")
        if namespace in ("tessera", "torch_nn"):  # the latter stands in PyTorch's Python, registered at its first call
            continue
        packet = getattr(getattr(torch.ops, namespace), packet_name)
        assert not overload or overload[0] in packet.overloads(), name


def test_every_overload_a_rule_serves_is_sampled() -> None:
    """A declaration of a packet speaks for all its overloads, so each of them must have been tried."""
    for name, samples in TABLE.items():
        found = registry()[name]
        packet = getattr(torch.ops.aten, name.split(".")[1])
        tried = {sample.op for sample in samples}
        for overload in packet.overloads():
            op = getattr(packet, overload)
            schema = schema_of(op)
            named = "str dim" in str(op._schema)  # as PyTorch 2.11 still has them; what is captured has no names
            called = not schema.mutated and not named and torch._C._dispatch_has_kernel(op.name())
            if called and rules(op) is found and found.family != "random":
                assert op in tried, op._schema
