"""`load`: an ONNX file as an `nn.Module`.

In: a file. Out: a module that is called by position or by the file's input names. Its first call records and compiles
the graph; later calls with other types do so again. `tessera.stages` and `tessera.explain` look into it.
"""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Mapping
from typing import Any

import torch

from tessera.frontends.onnx.constants import with_initializers
from tessera.frontends.onnx.file import Source, read_model
from tessera.frontends.onnx.limits import LIMITS, Limits
from tessera.frontends.onnx.structure import Model
from tessera.just_in_time.compiled import Compiled
from tessera.onnx.graph import RunningGraph
from tessera.onnx.inputs import checked_input
from tessera.onnx.state import State
from tessera.pipeline.options import Options
from tessera.util.errors import InputError
from tessera.util.units import counted


def load(
    source: Source,
    *,
    limits: Limits = LIMITS,
    folder: str | os.PathLike | None = None,
    compile: bool = True,
    executors: str | list[str] | tuple[str, ...] | None = None,
) -> OnnxModule:
    """An ONNX model as a module: `net(x)`, `net(input=x)`; its floats are parameters, so that it can be trained.

    source     a path, the file's bytes, or an onnx.ModelProto
    limits     what the file may ask for: tessera.onnx.Limits
    folder     where external data lies, if not beside the file
    compile    False: run operator by operator, in the interpreter
    executors  as tessera.jit's
    """
    model = with_initializers(read_model(source, limits, None if folder is None else os.fspath(folder)), limits)
    kind = _SelfNamed if any(v.name == "self" for v in model.graph.inputs) else OnnxModule
    return kind(model, limits, compile, Options.of(executors, None, None))


class OnnxModule(torch.nn.Module):
    """The graph of an ONNX file; `load` makes it. Its parameters and buffers have the names of the file."""

    def __init__(self, model: Model, limits: Limits, compile: bool, options: Options) -> None:
        super().__init__()
        self.__tessera_onnx__: RunningGraph = None  # type: ignore[assignment]  # names that the file cannot take
        self.__tessera__: Compiled = None  # type: ignore[assignment]
        state = State(self, model.graph)
        # Everything of ours is behind one name, so that the file's names are free.
        self.__tessera_onnx__ = RunningGraph(model, state, limits, compile, options)
        self.__tessera__ = Compiled(self, self.__tessera_onnx__.backend, self.__call__, lambda fn: fn)
        self.register_load_state_dict_post_hook(_forget_programs)

    @property
    def input_names(self) -> tuple[str, ...]:
        """The inputs that a call must bring, by the file's names."""
        return self.__tessera_onnx__.inputs

    @property
    def output_names(self) -> tuple[str, ...]:
        return self.__tessera_onnx__.outputs

    @property
    def metadata(self) -> Mapping[str, str]:
        """What the file says of itself."""
        return self.__tessera_onnx__.model.metadata

    @torch.compiler.disable(reason="an ONNX graph has programs of its own")  # inside a model that Dynamo traces
    def forward(self, /, *args: object, **kwargs: object) -> object:
        graph = self.__tessera_onnx__
        outputs = graph(arguments(graph, args, kwargs))
        return outputs[0] if len(outputs) == 1 else outputs

    def recorded(self, args: tuple, kwargs: Mapping[str, object]) -> Any:
        """The whole graph as one program for inputs of these sizes, for what compiles it elsewhere."""
        recorded = importlib.import_module("tessera.onnx.recorded")  # which knows this class
        return recorded.whole_graph(self, args, kwargs, fixed=True)

    def __deepcopy__(self, memo: dict) -> OnnxModule:
        graph = self.__tessera_onnx__
        other = type(self)(graph.model, graph.limits, graph.compiles, graph.backend.options)
        memo[id(self)] = other
        for name, (owner, attribute) in graph.state.places.items():
            setattr(*other.__tessera_onnx__.state.places[name], copy.deepcopy(getattr(owner, attribute), memo))
        return other.train(self.training)

    def extra_repr(self) -> str:
        model = self.__tessera_onnx__.model
        return f"{model.path or 'ONNX'}, {counted(len(model.graph.nodes), 'node')}"


class _SelfNamed(OnnxModule):
    """The graph of a file that calls an input `self`, which PyTorch's modules call themselves."""

    def __call__(self, /, *args: object, **kwargs: object) -> object:
        return super().__call__(*args, **_renamed(kwargs, "self", _STAND_IN))

    def forward(self, /, *args: object, **kwargs: object) -> object:
        return super().forward(*args, **_renamed(kwargs, _STAND_IN, "self"))


_STAND_IN = "\0self"


def _renamed(kwargs: Mapping[str, object], old: str, new: str) -> dict[str, object]:
    return {new if name == old else name: value for name, value in kwargs.items()}


def _forget_programs(net: OnnxModule, _: object) -> None:
    """Programs are made for what small buffers held; another state may hold something else."""
    net.__tessera_onnx__.reset()


def arguments(graph: RunningGraph, args: tuple, kwargs: Mapping[str, object]) -> dict[str, object]:
    """Values by the file's names, checked against what it says of them."""
    if len(args) > len(graph.inputs):
        raise InputError(f"expected at most {len(graph.inputs)} inputs, got {len(args)}")
    values: dict[str, object] = dict(zip(graph.inputs, args, strict=False))
    for name, value in kwargs.items():
        if name not in graph.infos:
            raise InputError(f"unknown input {name!r}; the inputs are {', '.join(graph.infos)}")
        if name in values:
            raise InputError(f"the input {name!r} is given twice")
        values[name] = value
    for name in graph.inputs:
        if name not in values:
            if graph.infos[name].kind != "optional":
                raise InputError(f"the input {name!r} is missing; the inputs are {', '.join(graph.inputs)}")
            values[name] = None
    return {name: checked_input(graph.infos[name], value) for name, value in values.items()}
