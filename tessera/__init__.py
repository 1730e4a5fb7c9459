"""Tessera: a source-to-source deep-learning compiler for PyTorch."""

from tessera import ops, optim
from tessera.api import *  # noqa: F403
from tessera.api import __all__ as _public
from tessera.tools.profile import profile
from tessera.tools.report import report

__version__ = "0.1.0"
__all__ = ["__version__", "ops", "optim", "profile", "report", *_public]
