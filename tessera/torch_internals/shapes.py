"""Symbolic sizes: the environment they live in, what is known of them, and the functions in their expressions.

What stands on SymPy (`LATE`) is imported when it is first asked for: a program that is only run has no use for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from tessera.torch_internals.lookup import owner_of, symbol

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode as GuardOnDataDependentSymNode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv as ShapeEnv

    StatelessSymbolicContext: Any
    DimDynamic: Any
    statically_known_true: Any
    size_functions: Any
    PythonPrinter: Any

_HOME = "torch.fx.experimental.symbolic_shapes"
_NAMED = "arguments of which some sizes are symbols"
LATE = {
    "ShapeEnv": (f"{_HOME}.ShapeEnv", "programs of any size"),
    "GuardOnDataDependentSymNode": (
        f"{_HOME}.GuardOnDataDependentSymNode",
        "saying that a program asks for the value of a tensor",
    ),
    "StatelessSymbolicContext": (f"{_HOME}.StatelessSymbolicContext", _NAMED),
    "DimDynamic": (f"{_HOME}.DimDynamic", _NAMED),
    "ConstantSource": ("torch._dynamo.source.ConstantSource", _NAMED),
    "statically_known_true": (f"{_HOME}.statically_known_true", "comparing sizes without a guard"),
    "size_functions": ("torch.utils._sympy.functions", "reading the expressions of symbolic sizes"),
    "PythonPrinter": ("torch.utils._sympy.printers.PythonPrinter", "printing symbolic sizes as Python"),
}


def __getattr__(name: str) -> Any:
    if name not in LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    given = globals()[name] = symbol(*LATE[name])
    return given


def any_size() -> tuple[ShapeEnv, AbstractContextManager]:
    """An environment whose symbols may be 0 and 1 too, and the mode in which PyTorch takes that into account."""
    return __getattr__("ShapeEnv")(specialize_zero_one=False), asking_for_one()


def asking_for_one() -> AbstractContextManager:
    """While inside, where PyTorch asks for a size of 1 it goes on as for any other, unless it has to know, which is a
    guard then. By itself it believes that symbols are 2 or more."""
    config = symbol("torch.fx.experimental._config", "programs that hold for a size of 1 too")
    return config.patch(backed_size_oblivious=True)


class _Folder:
    """All files of PyTorch's."""

    def __contains__(self, file: str) -> bool:
        return file.startswith(torch.__path__[0])


@contextmanager
def lines_by_folder() -> Iterator[None]:
    """While inside, PyTorch finds the user's line behind a symbol by its own folder. By itself it imports its exporter
    and what that stands on, most of a second, to know how those files are called."""
    home = owner_of(f"{_HOME}.uninteresting_files", "the lines that made symbols")
    before = home.uninteresting_files
    home.uninteresting_files = _Folder
    try:
        yield
    finally:
        home.uninteresting_files = before


def sizes_from(env: ShapeEnv, least: int) -> None:
    """From now on sizes are at least so large; from 2 on, nobody asks whether one is 0 or 1, as in the environment of
    a program that PyTorch exported."""
    for size, value in symbol_values(env).items():
        if value >= least:
            env.constrain_symbol_range(size, least, env.var_to_range[size].upper)
    env._version_counter += 1  # answers that it remembers are those of before


@contextmanager
def new_guards(env: ShapeEnv) -> Iterator[list]:
    """While inside, conditions on sizes that are taken to hold; they are in the list afterwards, and no longer held."""
    count, axioms = len(env.guards), dict(env.axioms)
    found: list = []
    yield found
    found += [guard.expr for guard in env.guards[count:]]
    if found:
        del env.guards[count:]
        env.axioms = axioms
        env._version_counter += 1
        # What was found out while the conditions held: by PyTorch, which takes no condition twice, and by us.
        for asked in ("_inner_evaluate_expr", "evaluate_expr"):
            getattr(getattr(env, asked, None), "cache_clear", bool)()
        env.__dict__.pop(_NOTES, None)


def learned(size: Any) -> int | None:
    """A number that changes when a symbol turns out to be another size or a number; None where nobody counts that."""
    env = getattr(getattr(size, "node", None), "shape_env", None)  # sizes of an artifact are formulas, without one
    return getattr(env, "_replacements_version_counter", None)


_NOTES = "_tessera_notes"


def notes(env: ShapeEnv, of: str) -> dict:
    """Of one kind, what is remembered of programs over an environment's symbols. It goes when they go."""
    return env.__dict__.setdefault(_NOTES, {}).setdefault(of, {})


def suppresses_guards(env: ShapeEnv) -> bool:
    """Conditions are not written down now."""
    return env._suppress_guards_tls()


def follows(env: ShapeEnv, condition: Any) -> bool:
    """Whether a condition holds for all sizes in their ranges."""
    return env._maybe_evaluate_static(condition) == True  # noqa: E712  (SymPy's)


torch_check = symbol("torch._check", "what a program claims of numbers known only when it runs")
# What all of torch._check and its like call; replaced there while a function is traced.
CHECK_WITH = owner_of("torch._check_with", "what a program claims of numbers known only when it runs"), "_check_with"


def symbol_values(env: ShapeEnv) -> dict:
    """The numbers that an environment's symbols stood for; `var_to_val` was renamed."""
    return env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val


def unreplaced_expression(number: torch.SymInt | torch.SymFloat | torch.SymBool) -> Any:
    """The expression before PyTorch put in what it has learned since; `node.expr` is the one after."""
    return number.node._expr


def given_names(env: ShapeEnv) -> dict[str, str]:
    """What the user called sizes that were exported as dynamic, by their symbols. A program that was read from a file
    has forgotten."""
    told = getattr(env, "source_name_to_debug_name", {})
    pairs = [(str(symbol), told.get(source, source)) for source, symbol in getattr(env, "source_to_var", {}).items()]
    symbols = {symbol for symbol, _ in pairs}
    return {symbol: name for symbol, name in pairs if name.isidentifier() and name not in symbols}


def symbolic_fake(mode: Any, tensor: torch.Tensor, dynamic: list[bool], name: str) -> torch.Tensor:
    """A fake tensor whose sizes are symbols where `dynamic` says so; one of 0 or 1 stays a number."""
    Context, Dynamic, Source = map(__getattr__, ("StatelessSymbolicContext", "DimDynamic", "ConstantSource"))  # noqa: N806
    sizes = [Dynamic.DYNAMIC if d else Dynamic.STATIC for d in dynamic]
    how = Context(dynamic_sizes=sizes, constraint_sizes=[None] * len(sizes))
    return mode.from_tensor(tensor, source=Source(name), symbolic_context=how, static_shapes=False)


def guards_of(env: ShapeEnv, sizes: list[torch.SymInt]) -> str:
    """What was found out of these sizes, as an expression for `guards_hold`."""
    return env.produce_guards_expression(sizes) or "True"


def guards_hold(env: ShapeEnv, guards: str, sizes: list[int]) -> bool:
    return bool(env.evaluate_guards_expression(guards, sizes))
