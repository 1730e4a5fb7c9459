"""What training in 8 bits is asked for with (`FP8`), and what delayed scales remember between steps (`Histories`)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tessera.ops.fp8_linear import SCALINGS, gradient_dtype
from tessera.util.errors import OptionError

ENDS = ("first", "last")
HISTORIES = ("current", "delayed")


@dataclass(frozen=True)
class FP8:
    """Linear layers multiply in 8 bits, in training and without gradients: `precision=tessera.FP8(…)`.

    scaling   "tensor": one scale for an operand, gradients in e5m2; "row": one for each of its rows, all in e4m3
    history   "current": scales come from the numbers themselves; "delayed": from the largest magnitudes of the last
              `length` steps, so that numbers are rounded as they are computed; with "tensor" only
    length    how many steps delayed scales look back on
    skip      layers that stay in 16 bits: "first" and "last" of a program, or names of modules, with * for any part
    smallest  layers with fewer inputs or outputs stay: rounding would take longer than it saves
    """

    scaling: str = "tensor"
    history: str = "current"
    length: int = 16
    skip: tuple[str, ...] = ENDS
    smallest: int = 512

    def __post_init__(self) -> None:
        for name, allowed in (("scaling", SCALINGS), ("history", HISTORIES)):
            if getattr(self, name) not in allowed:
                listed = " or ".join(map(repr, allowed))
                raise OptionError(f"FP8: {name}: expected {listed}, got {getattr(self, name)!r}")
        for name in ("length", "smallest"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(f"FP8: {name}: expected a number, at least 1, got {value!r}")
        if self.history == "delayed" and self.scaling == "row":
            raise OptionError("FP8: history='delayed': expected scaling='tensor', got 'row': rows come and go")
        if isinstance(self.skip, str) or not all(isinstance(name, str) for name in self.skip):
            raise OptionError(f"FP8: skip: expected a list of names, got {self.skip!r}")
        object.__setattr__(self, "skip", tuple(self.skip))

    def __str__(self) -> str:
        kind = "e5m2" if gradient_dtype(self.scaling) is torch.float8_e5m2 else "e4m3"
        return f"{self.history} scales of {self.scaling}s, e4m3, gradients {kind}"

    @staticmethod
    def of(precision: str | FP8 | None) -> FP8 | None:
        """What the option `precision` says."""
        if precision is None or isinstance(precision, FP8):
            return precision
        if precision == "fp8":
            return FP8()
        raise OptionError(f"precision: expected None, 'fp8' or tessera.FP8(…), got {precision!r}")


@dataclass
class Histories:
    """The largest magnitudes of the last steps, `(length, 3)` a layer: of its input, its weight and its gradient."""

    length: int
    held: dict[str, torch.Tensor] = field(default_factory=dict)

    def of(self, name: str, device: torch.device) -> torch.Tensor:
        if name not in self.held or self.held[name].device != device:
            before = self.held.get(name)
            fresh = torch.zeros(self.length, 3, device=device)
            self.held[name] = fresh if before is None else before.to(device)
        return self.held[name]

    def load(self, state: dict[str, torch.Tensor]) -> None:
        for name, history in state.items():
            if history.shape != (self.length, 3):
                raise OptionError(f"{name}: expected a history of ({self.length}, 3), got {tuple(history.shape)}")
            if name in self.held:
                self.held[name].copy_(history)
            else:
                self.held[name] = history.detach().clone()
