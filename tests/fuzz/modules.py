"""Programs that are modules: parameters, buffers, tensors and flags as attributes, submodules, loops over them."""

from __future__ import annotations

from .maker import Maker, Refused

HELD = {
    "p0": "self.p0 = nn.Parameter(t({B}, {B}, seed=1))",
    "p1": "self.p1 = nn.Parameter(t({B}, seed=2))",
    "b0": "self.register_buffer('b0', t({B}, seed=3))",
    "a0": "self.a0 = t({A}, {B}, seed=4)",
    "lin": "self.lin = nn.Linear({B}, {B}, dtype=f64)",
    "ln": "self.ln = nn.LayerNorm({B}, dtype=f64)",
    "bn": "self.bn = nn.BatchNorm1d({B}, dtype=f64)",
    "drop": "self.drop = nn.Dropout(0.5)",
    "layers": "self.layers = nn.ModuleList(nn.Linear({B}, {B}, dtype=f64) for _ in range(2))",
}
TENSORS = ("p0", "p1", "b0", "a0")


def held(m: Maker, sizes: dict[str, int]) -> list[str]:
    """The lines of `__init__`."""
    chosen = ["p0", *m.rng.sample([k for k in HELD if k != "p0"], m.rng.randint(1, 4))]
    lines = ["super().__init__()", "torch.manual_seed(0)", *(HELD[k].format(**sizes) for k in chosen)]
    m.pool += [f"self.{k}" for k in chosen if k in TENSORS]
    return [*lines, "self.scale, self.flag, self.n = 2.0, True, 0"]


def has(m: Maker, name: str) -> bool:
    return hasattr(m.scope["self"], name)


def layer(m: Maker) -> None:
    """A call of a submodule."""
    if "self" not in m.scope:
        raise Refused
    found = [k for k in ("lin", "ln", "bn", "drop") if has(m, k)]
    if not found:
        raise Refused
    a = m.float(1)
    m.assign(f"self.{m.rng.choice(found)}({a})")


def layers(m: Maker) -> None:
    if "self" not in m.scope or not has(m, "layers"):
        raise Refused
    a = m.float(1)
    name = m.assign(f"{a} * 1")
    with m.block("for layer in self.layers:"):
        m.scope["layer"] = m.scope["self"].layers[0]  # type: ignore[attr-defined]
        m.take(f"{name} = layer({name}).tanh()", name)


def attribute(m: Maker) -> None:
    """Reads and writes of what is no tensor, and of buffers."""
    if "self" not in m.scope:
        raise Refused
    a = m.float()
    forms = [
        f"{m.new()} = {a} * self.scale",
        "self.n += 1",
        f"{m.new()} = {a} + self.n",
        f"{m.new()} = {a} if self.flag else -{a}",
    ]
    forms += [f"{m.new()} = {a} * 2 if self.training else {a}"]
    if has(m, "b0"):
        forms += [
            f"self.b0 = self.b0 * 0.9 + {a}.detach().mean()",
            "self.b0.add_(1)",
            f"self.b0.copy_(self.b0 + {a}.detach().mean())",
        ]
    if has(m, "a0"):
        forms += ["self.a0 = self.a0 * 2", f"self.a0.add_({a}.detach().sum())"]
    line = m.rng.choice(forms)
    name = line.split(" = ")[0]
    m.take(line, *([name] if name.startswith("v") else []))


STEPS = {layer: 4, layers: 1, attribute: 2.5}
