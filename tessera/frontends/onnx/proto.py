"""The package `onnx`, which reads the format's messages. It is an extra, and its absence is told in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tessera.util.errors import TesseraError

if TYPE_CHECKING:
    import onnx as onnx
    from google.protobuf.message import DecodeError as DecodeError
else:
    try:
        import onnx  # noqa: F401
        from google.protobuf.message import DecodeError  # noqa: F401
    except ImportError as error:
        raise TesseraError("ONNX files need the package onnx: pip install 'tessera[onnx]'") from error
