"""What is done with a program: calls, gradients, hooks, and changes of state between calls, as lines of text."""

from __future__ import annotations

from .inputs import Input
from .maker import Maker
from .text import Block, Node, render

BACKWARD = (
    "backward(out)|backward(out)|backward(out)|backward(out, 0)|backward(out, 1)"
    "|backward(out, keep=True); backward(out)|backward(out, 0, keep=True); backward(out, 1)"
)
# Gradients of results by each other.
BETWEEN = (
    "g = by_each(out, own, 0)",
    "g = by_each(out, own, 1)",
    "g = by_each(out, own, keep=True); backward(out)",
    "retain(own); backward(out, 0); g = kept(own)",
    "retain(own); backward(out, 1, 2); g = kept(own)",
    "retain(own); backward(out, 0, keep=True); backward(out, 1); g = kept(own)",
    "hook(own, note); backward(out); g = None",
    "hook(own, note_half); backward(out, 0); g = None",
    "hook(own, note_half); retain(own); backward(out, 1, 2); g = kept(own)",
)
TRANSFORMS = {
    "grad": "out = {T}.grad(lambda *a: total({f}(*a)), argnums={n})({x})",
    "vjp": "out, pull = {T}.vjp(lambda *a: outs({f}(*a)), {x})\n"
    "out = out, pull(tuple(torch.ones_like(o) for o in out))",
    "jvp": "out = {T}.jvp(lambda *a: outs({f}(*a)), ({x},), ({v},))",
    "vmap": "out = {T}.vmap(lambda *a: outs({f}(*a)), in_dims={d})({b})",
    "grad_grad": "out = {T}.grad("
    "lambda *a: total({T}.grad(lambda *b: total({f}(*b)), argnums={n})(*a)), argnums={n})({x})",
    "vmap_grad": "out = {T}.vmap({T}.grad(lambda *a: total({f}(*a)), argnums={n}), in_dims={d})({b})",
    "grad_vmap": "out = {T}.grad("
    "lambda *a: total({T}.vmap(lambda *b: outs({f}(*b)), in_dims={d})(*a)), argnums={n})({b})",
    "jvp_grad": "out = {T}.jvp({T}.grad(lambda *a: total({f}(*a)), argnums={n}), ({x},), ({v},))",
    "jvp_jvp": "out = {T}.jvp(lambda *a: {T}.jvp(lambda *b: outs({f}(*b)), a, ({v},))[1], ({x},), ({v},))",
    "jacrev": "out = {T}.jacrev(lambda *a: outs({f}(*a)), argnums={n})({x})",
    "jacfwd": "out = {T}.jacfwd(lambda *a: outs({f}(*a)), argnums={n})({x})",
    "vmap_vmap": "out = {T}.vmap({T}.vmap(lambda *a: outs({f}(*a)), in_dims={d}), in_dims={d})({bb})",
}
# PyTorch's tangents of these read what a kernel noted, or divide by zero: their own tangents are not right. Nor are
# those of infinities: a product makes zeros of a tangent that is not there, and the next multiplies infinities by them.
HELD = ("layer_norm", "cumprod", "special=True")


def scenario(m: Maker, kind: str, given: list[Input], sizes: dict[str, int], module: bool, flag: bool) -> list[Node]:
    if kind == "transform":
        return _transformed(m, given, sizes)
    if kind == "train":
        return _trained(m, given, sizes)
    lines: list[Node] = ["m = M()", "f = compiled(m)"] if module else ["f = compiled(program)"]
    if module and kind != "functional" and m.chance(0.25):
        lines.append(m.rng.choice(_HOOKS))
    for call in range(m.rng.choices([1, 2, 3], [3, 4, 2])[0]):
        if call and module and kind != "functional":
            lines += [m.rng.choice(_flips(m, sizes)) for _ in range(m.rng.randint(0, 3))]
            if m.chance(0.1):
                lines += ["m = copy.deepcopy(m)", "f = compiled(m)"]
        if call == 0 or m.chance(0.8):
            dims = sizes
            if call and m.chance(0.3):
                dims = sizes | {"A": sizes["A"] + m.rng.choice([1, 2])}
            lines += [x.line(dims, m.seed()) for x in given]
            if call and kind != "functional" and m.chance(0.25):
                lines.append(_changed(m, given, module))
        lines += _call(m, kind, [x.name for x in given], module, flag)
    return lines


def _seen(names: list[str], module: bool) -> str:
    return ", ".join([f"{n}={n}" for n in names] + ["m=m"] * module)


def _call(m: Maker, kind: str, names: list[str], module: bool, flag: bool) -> list[Node]:
    args = ", ".join(names + [m.rng.choice(["True", "True", "False"])] * flag)
    call = f"out = f({args})"
    lines: list[Node] = [f"torch.manual_seed({m.seed()})"]
    around = m.rng.random()
    if around < 0.12:
        lines.append(Block("with torch.no_grad():", [call]))
    elif around < 0.15 and kind != "functional":
        lines.append(Block("with torch.autocast('cpu', dtype=bf16):", [call]))
    else:
        lines.append(call)
    lines.append(f"see(out=out, {_seen(names, module)})")
    if kind == "second":
        # Not by a view that the call gave another history: docs/in_place.md says what gradients of such miss.
        every = f"[{', '.join(names)}]"
        lines.insert(0, f"histories = [x.grad_fn for x in {every}]")
        same = "x.grad_fn is history or not x._is_view()"
        lines.append(f"same = [x for x, history in zip({every}, histories) if {same}]")
        lines.append("g = torch.autograd.grad(loss(out), floats(same), create_graph=True, allow_unused=True)")
        lines += ["see(g=g)", "backward(g)", f"see({_seen(names, module)})"]
        return lines
    if kind == "between":
        # Not by arguments that are views: docs/in_place.md says what gradients by such miss.
        lines.append(f"own = apart(out, {', '.join([*names, *['*m.parameters(), *m.buffers()'] * module])})")
        lines += m.rng.choice(BETWEEN).split("; ")
        lines.append(f"see(g=g, {_seen(names, module)})")
        return lines
    if m.chance(0.1) and kind != "functional":
        # Not on a view that the call gave another history: docs/in_place.md says what hooks of such do not see.
        hook = f"{names[0]}.register_hook({m.rng.choice(['note', 'note_half'])})"
        lines.insert(0, f"history = {names[0]}.grad_fn")
        same = f"({names[0]}.grad_fn is history or not {names[0]}._is_view())"
        lines.append(Block(f"if {names[0]}.requires_grad and {same}:", [hook]))
    if m.chance(0.12):
        write = m.rng.choice(["x.add_(1)", "x.mul_(2)"])
        lines.append(Block("with torch.no_grad():", [f"x = (outs(out) or [torch.ones(1)])[0]; {write}"]))
        lines.append(f"see(out=out, {_seen(names, module)})")
    if m.chance(0.85):
        lines += m.rng.choice(BACKWARD.split("|")).split("; ")
        lines.append(f"see(out=out, {_seen(names, module)})")
    return lines


_HOOKS = [
    "m.register_forward_hook(note_module)",
    "m.register_forward_hook(add_one)",
    "m.p0.register_hook(note)",
    "m.p0.register_hook(note_half)",
    "m.p0.register_post_accumulate_grad_hook(note_parameter)",
    "m.register_forward_pre_hook(lambda m, args: None)",
    "m.register_full_backward_hook(note_module)",
    "m.register_full_backward_pre_hook(lambda m, given: tuple(None if g is None else g * 2 for g in given))",
]


def _flips(m: Maker, sizes: dict[str, int]) -> list[Node]:
    found: list[Node] = [
        *["m.eval()", "m.train()"] * 2, "m.p0.requires_grad_(False)", "m.p0.requires_grad_(True)", "m.zero_grad()",
        Block("with torch.no_grad():", ["m.p0.mul_(0.5)"]), "m.p0.data.add_(1)", "m.scale = 3.0", "m.flag = not m.flag",
        "m.p0 = nn.Parameter(t({B}, {B}, seed=9))".format(**sizes), "m.requires_grad_(False)", "m.requires_grad_(True)",
        "m.zero_grad(set_to_none=False)", "m.n = 7", *_HOOKS[:2],
        "m.load_state_dict({k: v * 0.5 if v.is_floating_point() else v for k, v in m.state_dict().items()})",
        "m.load_state_dict(copy.deepcopy(m.state_dict()), assign=True)", "m._forward_hooks.clear()",
        "m.p0.data = m.p0.data * 2", "m.p0.grad = None", "m.p0.grad = torch.ones_like(m.p0)",
    ]  # fmt: skip
    held = m.scope["self"]
    if hasattr(held, "a0"):
        found += ["m.a0 = t({A}, {B}, seed=8)".format(**sizes), "m.a0.mul_(2)", "m.a0 = m.a0.clone().requires_grad_()"]
    if hasattr(held, "b0"):
        found += ["m.b0 = t({B}, seed=7)".format(**sizes), "m.b0.zero_()"]
    if hasattr(held, "lin"):
        found += [
            "m.lin.weight.requires_grad_(False)",
            "m.lin.register_forward_hook(add_one)",
            "m.lin.register_full_backward_hook(note_module)",
            "m.lin.weight = m.p0",
            "m.lin = nn.Linear({B}, {B}, bias=False, dtype=f64)".format(**sizes),
            "m.lin.register_forward_pre_hook(lambda m, args: (args[0] * 2,))",
        ]
    if hasattr(held, "bn"):
        found += [
            "m.bn.reset_running_stats()",
            "m.bn.eval()",
            "m.bn.momentum = 0.5",
            "m.bn.track_running_stats = False",
        ]
    if hasattr(held, "drop"):
        found += ["m.drop.p = 0.9", "m.drop.eval()"]
    return found


def _changed(m: Maker, given: list[Input], module: bool) -> str:
    """An argument that is something else than it was at the call before."""
    x = m.rng.choice(given).name
    forms = ["{0} = {0}.detach()", "{0} = {0}.detach().clone()", "{0} = {0}.clone()", "{0} = {0}[:]"]
    forms += ["{0} = x0", "{0} = x0.detach()", "{0} = {0}.contiguous()"]
    if module:
        held = m.scope["self"]
        forms += [f"{{0}} = m.{k}" for k in ("a0", "b0", "p0") if hasattr(held, k)] * 2
    return m.rng.choice(forms).format(x)


def _transformed(m: Maker, given: list[Input], sizes: dict[str, int]) -> list[Node]:
    names = [x.name for x in given]
    lines: list[Node] = [x.line(sizes, m.seed()) for x in given]
    batched = [True] + [m.chance(0.6) for _ in names[1:]]
    tangents = ", ".join(f"torch.cos({n})" for n in names)
    one = ", ".join(f"torch.stack([{n}, {n} * 2, -{n}])" if b else n for n, b in zip(names, batched, strict=True))
    two = ", ".join(
        f"torch.stack([torch.stack([{n}, {n} + 1])] * 3)" if b else n for n, b in zip(names, batched, strict=True)
    )
    where = m.rng.choices(["plain", "inside", "around"], [6, 2, 2])[0]
    f = "compiled(program)" if where == "inside" else "program"
    body = render([*lines, *m.lines])
    right = [name for name in TRANSFORMS if name != "jvp_jvp" or not any(word in body for word in HELD)]
    text = TRANSFORMS[m.rng.choice(right)].format(
        T="T", f="f" if where == "inside" else "program", x=", ".join(names), n=tuple(range(len(names))), v=tangents,
        d=tuple(0 if b else None for b in batched) if len(names) > 1 else 0, b=one, bb=two,
    )  # fmt: skip
    if where == "inside":
        lines.append(f"f = {f}")
    made = text.split("\n")
    if where == "around":
        lines += [
            Block(f"def whole({', '.join(names)}):", [*made, "return out"]),
            f"out = compiled(whole)({', '.join(names)})",
        ]
    else:
        lines += made
    return [*lines, f"see(out=out, {_seen(names, False)})"]


_OPTIMIZER = [
    "opt.param_groups[0]['lr'] = 0.01", "opt.param_groups[0]['weight_decay'] = 0.1", "opt.state.clear()",
    "opt.load_state_dict(copy.deepcopy(opt.state_dict()))", "opt.param_groups[0]['params'].pop()",
]  # fmt: skip


def _trained(m: Maker, given: list[Input], sizes: dict[str, int]) -> list[Node]:
    names = [x.name for x in given]
    optimizer = m.rng.choice(
        [
            "SGD(m.parameters(), lr=0.1)",
            "SGD(m.parameters(), lr=0.1, momentum=0.9)",
            "Adam(m.parameters())",
            "AdamW(m.parameters(), lr=0.01)",
        ]
    )
    clip = m.rng.choice(["", "", ", clip_norm=0.5"])
    lines: list[Node] = ["m = M()", f"opt = torch.optim.{optimizer}"]
    lines.append(f"step = T.train_step(m, lambda m, *a: total(m(*a)), opt{clip})")
    for call in range(m.rng.randint(1, 3)):
        if call and m.chance(0.5):
            lines.append(m.rng.choice([*_flips(m, sizes), *_OPTIMIZER]))
        lines += [x.line(sizes, m.seed()) for x in given]
        lines += [f"torch.manual_seed({m.seed()})", f"out = step({', '.join(names)})"]
        state = "opt=dict(sorted(opt.state_dict()['state'].items()))"
        lines.append(f"see(out=out, {_seen(names, False)}, {state}, m=dict(m.state_dict()))")
    return lines
