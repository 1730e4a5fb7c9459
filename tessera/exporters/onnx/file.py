"""The file, and beside it the weights where they are many.

In: a model without weights, and the weights. Out: one `.onnx` file, or two: protobuf holds at most 2 GB, so beyond a
limit the weights lie in `<name>.data`, each beginning at a multiple of a page. A file is written under another name and
then renamed, the weights first: whoever looks sees a whole model or the one before.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from tessera.exporters.onnx.graph import Content
from tessera.exporters.onnx.model import byte_count, raw, to_tensor
from tessera.frontends.onnx.elements import code_of
from tessera.frontends.onnx.proto import onnx
from tessera.util.files import written_whole

INSIDE = 1 << 30  # bytes of weights that a file holds itself
ALIGNED = 4096


def with_weights(model: onnx.ModelProto, weights: Mapping[str, Content]) -> onnx.ModelProto:
    """The model with its weights inside."""
    model.graph.initializer.extend(to_tensor(name, data) for name, data in weights.items())
    return model


def save(model: onnx.ModelProto, weights: Mapping[str, Content], path: str, inside: int = INSIDE) -> None:
    total = sum(map(byte_count, weights.values()))
    if total <= inside:
        message = with_weights(model, weights)
    else:
        beside = os.path.basename(path) + ".data"
        with written_whole(Path(f"{path}.data")) as file:
            _write_beside(file, model, weights, beside)
        message = model
    with written_whole(Path(path)) as file:
        file.write(message.SerializeToString())


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
