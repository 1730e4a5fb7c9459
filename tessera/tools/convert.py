"""`tessera convert`: a model from one file into another, an artifact or ONNX.

`SOURCES` says how files are read, by how their names end: a reader takes the path and the sizes that may change, and
gives what `tessera.export` takes. A target that ends in `.onnx` is written by `tessera.onnx.export`.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tessera.artifact.write import export
from tessera.tools.command import Command, console, json_argument, write_json
from tessera.util.errors import OptionError

DYNAMIC = re.compile(r"(?P<argument>.+):(?P<dim>\d+)=(?P<name>(\d+\*)?[A-Za-z]\w*)(:(?P<low>\d+)\.\.(?P<high>\d*))?")
Sizes = dict[str, dict[int, object]]


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "source", help="model.pt2, model.onnx, or script.py:function, which gives a model and arguments"
    )
    parser.add_argument("target", help="the file to write: an artifact, or ONNX where it ends in .onnx")
    parser.add_argument("--target", dest="targets", action="append", default=[], help="cpu, cpu:x86-64-v3, …; several")
    parser.add_argument(
        "--dynamic", action="append", default=[], metavar="ARG:DIM=NAME:LOW..HIGH", help="a size that may change"
    )
    parser.add_argument("--weights", metavar="NAME.safetensors", help="a file beside the artifact, for the weights")
    parser.add_argument("--opset", type=int, help="of an ONNX file")
    json_argument(parser)


def run(args: Namespace) -> int:
    path = args.source.partition(":")[0]
    reader = SOURCES.get(Path(path).suffix)
    if reader is None:
        raise OptionError(f"expected a source that ends in {' or '.join(SOURCES)}, got {args.source!r}")
    model, example, dynamic = reader(args.source, sizes(args.dynamic))
    if args.target.endswith(".onnx"):
        if args.targets or args.weights:
            raise OptionError("--target, --weights: an ONNX file is for every machine and holds its weights")
        _onnx("tessera.onnx.writing").export(model, example, args.target, dynamic=dynamic or None, opset=args.opset)
    else:
        if args.opset is not None:
            raise OptionError("--opset: expected a target that ends in .onnx")
        targets = args.targets or None
        export(model, example, args.target, dynamic=dynamic or None, targets=targets, weights=args.weights)
    written = Path(args.target).stat().st_size
    if not write_json(args, {"path": args.target, "bytes": written}):
        console().print(f"{args.target}: {written} bytes", soft_wrap=True, markup=False)
    return 0


def sizes(texts: list[str]) -> Sizes:
    """`x:0=batch:1..64` as `{"x": {0: ("batch", 1, 64)}}`."""
    read: Sizes = {}
    for text in texts:
        if (parts := DYNAMIC.fullmatch(text)) is None:
            raise OptionError(f"--dynamic: expected ARG:DIM=NAME or ARG:DIM=NAME:LOW..HIGH, got {text!r}")
        name: object = parts["name"]
        if parts["low"]:
            name = (parts["name"], int(parts["low"]), int(parts["high"]) if parts["high"] else None)
        read.setdefault(parts["argument"], {})[int(parts["dim"])] = name
    return read


def _exported(source: str, dynamic: Sizes) -> tuple[Any, tuple, Sizes]:
    if dynamic:
        raise OptionError("--dynamic: an exported program has its sizes already")
    return torch.export.load(source), (), {}


def _script(source: str, dynamic: Sizes) -> tuple[Any, tuple, Sizes]:
    path, _, name = source.partition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None or not name:
        raise OptionError(f"expected script.py:function, got {source!r}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(make := getattr(module, name, None)):
        raise OptionError(f"{path} has no function {name!r}")
    given = make()
    if not isinstance(given, tuple) or len(given) != 2 or not isinstance(given[1], tuple):
        raise OptionError(f"{source}: expected a model and a tuple of arguments")
    return given[0], given[1], dynamic


def _onnx(name: str) -> Any:
    """A module that needs the package onnx, an extra: looked up when a file asks for it."""
    return importlib.import_module(name)


def _onnx_file(source: str, dynamic: Sizes) -> tuple[Any, tuple, Sizes]:
    """Its open sizes may change in any case; `--dynamic` gives them names and ranges."""
    net = _onnx("tessera.onnx.module").load(source)
    return net, tuple(_onnx("tessera.tools.run_model").random_inputs(net, {}).values()), dynamic


Reader = Callable[[str, Sizes], tuple[Any, tuple, Sizes]]
SOURCES: dict[str, Reader] = {".pt2": _exported, ".py": _script, ".onnx": _onnx_file}
COMMAND = Command(arguments, run)
