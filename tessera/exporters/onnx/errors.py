"""What cannot be said in ONNX, or came out otherwise than eager PyTorch says."""

from __future__ import annotations

from tessera.util.errors import TesseraError


class ExportError(TesseraError, RuntimeError):
    """A program has no form in ONNX, or the file's answer differs; the message names the operator and the line."""


class NoForm(Exception):
    """An operator has no form for these arguments: it is taken apart instead."""
