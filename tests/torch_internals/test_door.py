"""No file outside `torch_internals` mentions a private symbol of PyTorch.

Private are: a module or name of PyTorch's with a component that begins with an underscore, and `torch.fx.experimental`;
what PyTorch keeps under such names on its tensors, operators, modules and optimizers; and either in a text that is
looked up. Operators (`torch.ops.aten._to_copy`) are operators, whatever their names.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tessera
from tessera.util.names import names

ROOT = Path(tessera.__file__).parent
FILES = [path for path in sorted(ROOT.rglob("*.py")) if "torch_internals" not in path.relative_to(ROOT).parts]
# On objects, where nothing but the name tells whose they are.
ATTRIBUTES = names(
    """
    _opname _overloadname _schema _can_decompose _cdata _version _base _is_view _conj _neg_view _input_metadata
    _backward_hooks _post_accumulate_grad_hooks _forward_hooks _forward_pre_hooks _backward_pre_hooks _buffers
    _optimizer_step_pre_hooks _optimizer_step_post_hooks _opt_called _current_level _remove_id
    _debug_get_cache_entry_list _broadcast_to_and_flatten _DropoutNd
    """
)
PATH = re.compile(r"torch(\.\w+)*\._[a-z]\w*(\.\w+)*", re.IGNORECASE)
LOOKUPS = ("getattr", "hasattr", "setattr", "delattr")


def dotted(node: ast.AST) -> str:
    """`torch.ops.aten` of an attribute of names; empty for any other expression."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def is_private(path: str) -> bool:
    parts = path.split(".")
    if parts[0] != "torch" or parts[:2] == ["torch", "ops"]:
        return False
    hidden = any(p.startswith("_") and not p.endswith("__") for p in parts)
    return hidden or path.startswith("torch.fx.experimental")


def mentions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, what) for every private symbol."""
    nodes = list(ast.walk(tree))
    docstrings = {
        id(node.body[0].value)
        for node in nodes
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in nodes:
        match node:
            case ast.Import(names=imported):
                yield from ((node.lineno, a.name) for a in imported if is_private(a.name))
            case ast.ImportFrom(module=str(module), names=imported):
                paths = (f"{module}.{a.name}" for a in imported)
                yield from ((node.lineno, path) for path in paths if is_private(path))
            case ast.Attribute(attr=attr, value=owner):
                path = dotted(node)
                if is_private(path):
                    yield node.lineno, path
                elif attr in ATTRIBUTES and not dotted(owner).lstrip("_").startswith(("torch.ops", "aten", "self")):
                    yield node.lineno, attr
            case ast.Call(func=ast.Name(id=name), args=[owner, ast.Constant(value=str(attr)), *_]) if name in LOOKUPS:
                if attr in ATTRIBUTES or is_private(f"{dotted(owner)}.{attr}"):
                    yield node.lineno, attr
            case ast.Constant(value=str(text)) if id(node) not in docstrings and PATH.fullmatch(text):
                yield node.lineno, repr(text)


def test_mentions_are_found() -> None:
    text = '''
"""torch._C in a docstring"""
import torch._dynamo
from torch.utils import _pytree as pytree, data
from torch.fx.experimental.proxy_tensor import make_fx
x = torch._C._set_grad_enabled(torch.ops.aten._to_copy.default, torch.__version__)
name = op._opname or getattr(op, "_overloadname", "") or aten._conj(x) or self._version
where = importlib.import_module("torch._dynamo.utils"), "raise torch._dynamo.config.recompile_limit"
device = getattr(torch.cuda, "_sleep", None)
'''
    found = sorted({(line, what) for line, what in mentions(ast.parse(text))})
    assert found == [
        (3, "torch._dynamo"),
        (4, "torch.utils._pytree"),
        (5, "torch.fx.experimental.proxy_tensor.make_fx"),
        (6, "torch._C"),
        (6, "torch._C._set_grad_enabled"),
        (7, "_opname"),
        (7, "_overloadname"),
        (8, "'torch._dynamo.utils'"),
        (9, "_sleep"),
    ]


@pytest.mark.parametrize("folder", sorted({path.relative_to(ROOT).parts[0] for path in FILES}))
def test_private_symbols_stay_behind_the_door(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in FILES
        if path.relative_to(ROOT).parts[0] == folder
        for line, what in mentions(ast.parse(path.read_text()))
    ]
    assert not found, "take these from tessera.torch_internals:\n" + "\n".join(found)
