"""Importing this declares every form."""

from tessera.exporters.onnx.forms import (  # noqa: F401
    activation,
    arithmetic,
    attention,
    bags,
    choose,
    complex,
    create,
    elementwise,
    index,
    layers,
    logic,
    normalise,
    pool,
    products,
    quantized,
    recurrent,
    reduce,
    scan,
    scatter,
    shape,
)
