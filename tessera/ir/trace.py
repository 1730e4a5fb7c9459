"""The Trace: an immutable program in SSA form over PyTorch's operators, that can be read, run and saved."""

from __future__ import annotations

from tessera.ir import printer
from tessera.ir.block import Block
from tessera.util.units import counted


class Trace(Block):
    """A program in SSA form: `print` it, `save` it; a pass gives another."""

    def __str__(self) -> str:
        return printer.print_trace(self)

    def __repr__(self) -> str:
        held = {"input": self.inputs, "equation": self.equations, "output": self.outputs}
        return f"<Trace {self.name}: {', '.join(counted(len(of), what) for what, of in held.items())}>"

    def save(self, path: str, title: str = "") -> None:
        """Write the program as a Python file that runs by itself."""
        printer.save_module(self, path, title)
