"""The one small hierarchy of errors. Every message says what was expected, what came and what to try.

What `torch.func` or eager PyTorch would refuse with a RuntimeError, ValueError or TypeError is one of those here as
well, so that a user's `except` goes on working.
"""

from __future__ import annotations


class TesseraError(Exception):
    """Base of everything Tessera raises on purpose."""


class CaptureError(TesseraError, RuntimeError):
    """A program could not be written down as a Trace; the message names the operator and the user's line."""


class IndexingError(CaptureError, IndexError):
    """Indices that do not fit the tensor; a compiled graph runs eagerly, and PyTorch says so."""


class DerivativeError(CaptureError, NotImplementedError):
    """A derivative that PyTorch does not have was asked for; a compiled graph runs eagerly, and PyTorch says so."""


class VerifyError(TesseraError):
    """A Trace breaks one of its own rules; the message shows the equations around the fault."""


class ContractError(TesseraError):
    """A kernel gave something else than the Trace says: which equation, what was expected and what came.

    Raised where `config.verify` is on.
    """


class RuleError(TesseraError, RuntimeError):
    """An operator's rule (vjp, jvp, batching) is missing or returned something of the wrong form."""


class Unserial(TesseraError):
    """A program, or a part of one, that has no form as data; the message says what."""


class ArtifactError(TesseraError, ValueError):
    """A file that is no artifact, a damaged one, or one that this version does not read; the message says which file,
    which part of it, what was expected and what is there."""


class EditError(TesseraError):
    """An edited program no longer fits the stage it should replace."""


class MeshError(TesseraError, RuntimeError):
    """Ranks of a mesh do not meet: one is gone or late, or has another program, plan or batch; the message says who."""


class OptionError(TesseraError, ValueError):
    """An unknown option or value; the message lists the valid ones."""


class MachineError(OptionError):
    """A machine file that is wrong: the file, the line, the field, what was expected and the nearest name."""


class ListingError(TesseraError, ValueError):
    """A listing that cannot be read: the line, what was expected and what is there."""


class InputError(TesseraError, TypeError, ValueError, RuntimeError):
    """Arguments of the wrong structure, type or layout were given to a transform or a compiled function. Of these
    PyTorch raises now one class, now another."""


class MapError(InputError, ValueError):
    """The dimensions given to vmap do not fit the arguments or the results."""


class BatchError(InputError, RuntimeError):
    """A function that has a meaning for one example and none for a batch, as it was called."""


class InternalsError(TesseraError, RuntimeError):
    """This PyTorch lacks a private symbol that Tessera relies on; the message names it and what needs it."""


class DoubleBackwardError(TesseraError, RuntimeError):
    """A compiled graph was asked for a gradient of its gradient."""
