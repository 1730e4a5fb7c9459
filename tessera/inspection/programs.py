"""The programs of a compiled function: the trace of any function, and every stage of what `jit` compiled.

In: a function and arguments, or what `tessera.jit` gave. Out: Traces that print, run, diff and save themselves.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tessera.frontends.functional.trace import trace_function
from tessera.ir.equation import Value, map_values
from tessera.ir.printer import compile_trace, identifier, print_module
from tessera.ir.trace import Trace
from tessera.just_in_time.compiled import Compiled, compiled_state
from tessera.util.errors import InputError
from tessera.util.units import counted


def trace(fn: Callable, /, *args: object, **kwargs: object) -> Trace:
    """The program `fn(*args, **kwargs)` runs, as a Trace: print it, save it, run it.

    A module's parameters and buffers, and other tensors it closes over, are the trace's constants.
    """
    program = trace_function(fn, args, kwargs, name=getattr(fn, "__name__", type(fn).__name__)).trace
    return _named_constants(program, fn) if isinstance(fn, torch.nn.Module) else program


def _named_constants(program: Trace, module: torch.nn.Module) -> Trace:
    """Constants that are the module's own are called by their names in it."""
    own = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
    taken = {v.name for v in program.values()}
    rename = {}
    for v, tensor in program.constants.items():
        name = identifier(own.get(id(tensor), v.name).replace(".", "_"))
        rename[v] = Value(name, v.type) if name not in taken else v
    return program.with_(
        equations=tuple(e.substitute(rename) for e in program.equations),
        outputs=map_values(program.outputs, lambda v: rename.get(v, v)),
        constants={rename[v]: t for v, t in program.constants.items()},
    )


@dataclass(frozen=True, repr=False)
class Stage:
    """One program of a compilation: `print` it, call it, `save` it, or take its `trace`."""

    graph: str
    name: str
    trace: Trace

    def save(self, path: str) -> None:
        """Write this program as Python that runs by itself; `edit` can put it back."""
        self.trace.save(path, title=f"tessera stage {self.name!r} of graph {self.graph!r}")

    @property
    def constants(self) -> tuple[torch.Tensor, ...]:
        """The tensors this program closes over; its text calls them `constants`."""
        return tuple(self.trace.constants.values())

    def __call__(self, *inputs: object) -> tuple:
        """Run this program on its inputs; gives its outputs."""
        return compile_trace(self.trace)(*inputs)

    def __str__(self) -> str:
        """Python that runs by itself: `exec` it."""
        return print_module(self.trace, title=f"{self.graph}: {self.name}")

    def __repr__(self) -> str:
        return f"<Stage {self.name!r} of {self.graph}: {counted(len(self.trace.equations), 'equation')}>"


class Stages(list[Stage]):
    """Every stage of every graph, in order."""

    def __getitem__(self, key):  # noqa: ANN001, ANN204
        """By position, by slice, or by name (of the last graph that has it)."""
        if not isinstance(key, str):
            return super().__getitem__(key)
        for stage in reversed(self):
            if stage.name == key:
                return stage
        raise InputError(f"no stage {key!r}; the stages are {', '.join(self.names())}")

    def __repr__(self) -> str:
        return "\n".join(["[", *(f"  {i}: {stage!r}" for i, stage in enumerate(self)), "]"])

    def names(self) -> list[str]:
        return list(dict.fromkeys(stage.name for stage in self))

    def graphs(self) -> list[str]:
        return list(dict.fromkeys(stage.graph for stage in self))

    def diff(self, before: str | int, after: str | int) -> str:
        """What changed between two stages, as a unified diff."""
        a, b = self[before], self[after]
        lines = difflib.unified_diff(
            str(a.trace).splitlines(), str(b.trace).splitlines(), a.name, b.name, lineterm="", n=2
        )
        return "\n".join(lines)


def stages(fast: Callable) -> Stages:
    """Every stage of the compilations of a jitted function."""
    listed = Stages()
    for compilation in state_of(fast).compilations():
        listed += [Stage(compilation.name, name, trace) for name, trace in compilation.account.stages]
    if not listed:
        raise InputError(why_none(state_of(fast)))
    return listed


def why_none(state: Compiled) -> str:
    """Why there is no program to look at."""
    eager = [g for g in getattr(state.backend, "graphs", ()) if g.eager_reason]
    if eager:
        return f"there are no stages: {eager[-1].name} runs eagerly: {eager[-1].eager_reason}"
    return "nothing is compiled yet; call the function first"


def state_of(fast: object) -> Compiled:
    state = compiled_state(fast)
    if state is None:
        raise InputError(f"expected what tessera.jit gave, got {type(fast).__name__}")
    return state
