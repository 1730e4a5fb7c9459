"""Importing this declares every form."""

from tessera.exporters.onnx.forms import (  # noqa: F401
    activation,
    attention,
    choose,
    create,
    elementwise,
    index,
    layers,
    normalise,
    pool,
    products,
    reduce,
    scatter,
    shape,
)
