"""`tessera.report`: one HTML file that shows a compiled function from the user's source down to its kernels."""

from tessera.tools.report.write import report

__all__ = ["report"]
