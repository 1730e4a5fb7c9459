"""The file, and beside it the weights where they are many.

In: a model without weights, and the weights. Out: one `.onnx` file, or two: protobuf holds at most 2 GB, so beyond a
limit the weights lie in `<name>.data`, each beginning at a multiple of a page. A file is written under another name and
then renamed, the weights first. Those of a model that was there before keep their file until the new model is in its
place, and the new ones lie in `<name>.1.data`: whoever looks sees a whole model or the one before.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from tessera.exporters.onnx.errors import ExportError
from tessera.exporters.onnx.graph import Content
from tessera.exporters.onnx.model import byte_count, raw, to_tensor
from tessera.frontends.onnx.elements import code_of
from tessera.frontends.onnx.proto import onnx
from tessera.util.files import written_whole

INSIDE = 1 << 30  # bytes of weights that a file holds itself
LARGEST = 2_000_000_000  # the same, whoever asks for more: protobuf's 2 GiB are the graph's too
ALIGNED = 4096


def with_weights(model: onnx.ModelProto, weights: Mapping[str, Content]) -> onnx.ModelProto:
    """The model with its weights inside."""
    if (total := sum(map(byte_count, weights.values()))) > LARGEST:
        raise ExportError(f"a message holds at most {LARGEST:,} bytes of weights, got {total:,}: give a path")
    model.graph.initializer.extend(to_tensor(name, data) for name, data in weights.items())
    return model


def save(model: onnx.ModelProto, weights: Mapping[str, Content], path: str, inside: int = INSIDE) -> None:
    if sum(map(byte_count, weights.values())) <= min(inside, LARGEST):
        _write(with_weights(model, weights), path)
        return
    before = _weights_of(Path(path))
    beside = next(place for place in _places(Path(path)) if place not in before)
    with written_whole(beside) as file:
        _write_beside(file, model, weights, beside.name)
    try:
        _write(model, path)
    except BaseException:
        beside.unlink()
        raise
    for old in before:
        old.unlink(missing_ok=True)


def _write(model: onnx.ModelProto, path: str) -> None:
    with written_whole(Path(path)) as file:
        file.write(model.SerializeToString())


def _places(path: Path) -> Iterator[Path]:
    """Where weights may lie: `m.onnx.data`, `m.onnx.1.data` and so on."""
    yield path.with_name(f"{path.name}.data")
    yield from (path.with_name(f"{path.name}.{i}.data") for i in itertools.count(1))


def _weights_of(path: Path) -> set[Path]:
    """The files of weights that are there."""
    form = re.compile(re.escape(path.name) + r"(\.[1-9]\d*)?\.data")
    return {path.with_name(name) for name in os.listdir(path.absolute().parent) if form.fullmatch(name)}


def _write_beside(file: BinaryIO, model: onnx.ModelProto, weights: Mapping[str, Content], name: str) -> None:
    for key, data in weights.items():
        if byte_count(data) < ALIGNED:
            model.graph.initializer.append(to_tensor(key, data))
            continue
        content = raw(data)
        file.write(b"\0" * (-file.tell() % ALIGNED))
        message = onnx.TensorProto(name=key, data_type=code_of(data), dims=tuple(data.shape))
        message.data_location = onnx.TensorProto.EXTERNAL
        for k, v in (("location", name), ("offset", file.tell()), ("length", len(content))):
            message.external_data.add(key=k, value=str(v))
        model.graph.initializer.append(message)
        file.write(content)
