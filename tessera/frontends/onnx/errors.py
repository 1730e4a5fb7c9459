"""What is wrong with an ONNX file: which file, which node or field, what was expected."""

from __future__ import annotations

from tessera.util.errors import TesseraError


class OnnxError(TesseraError, ValueError):
    """A file that breaks the format, or asks for something that has no meaning here."""
