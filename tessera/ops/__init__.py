"""What operators mean. Importing this folder registers every declaration."""

from tessera.ops import (
    activation,
    attention,
    channelnorm,
    control,
    conv,
    copies,
    elementwise,
    index,
    loss,
    matmul,
    nn,
    norm,
    random,
    reduce,
    resample,
    shape,
)

__all__ = [
    "activation",
    "attention",
    "channelnorm",
    "control",
    "conv",
    "copies",
    "elementwise",
    "index",
    "loss",
    "matmul",
    "nn",
    "norm",
    "random",
    "reduce",
    "resample",
    "shape",
]
