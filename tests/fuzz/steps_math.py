"""Steps that compute: arithmetic, promotion, reductions, products, norms, factories, random numbers."""

from __future__ import annotations

from .maker import Maker, Refused

UNARY = [
    "{0}.sin()",
    "{0}.tanh()",
    "{0}.exp()",
    "torch.sigmoid({0})",
    "F.relu({0})",
    "-{0}",
    "{0}.abs()",
    "{0}.square()",
    "{0}.abs().sqrt()",
    "F.gelu({0})",
    "F.silu({0})",
    "torch.log1p({0}.abs())",
    "{0}.clamp(-1,1)",
    "{0}.clamp(min=0)",
    "{0}.sign()",
    "{0}.floor()",
    "{0}.reciprocal()",
    "{0}.clone()",
    "F.softplus({0})",
    "{0}.nan_to_num()",
    "{0}.rsqrt()",
    "F.leaky_relu({0})",
    "{0}.expm1()",
    "F.hardtanh({0})",
    "F.elu({0})",
    "{0}.contiguous()",
    "{0}.cos()",
    "{0}.erf()",
    "{0}.trunc()",
]
BINARY = [
    "{0}+{1}",
    "{0}-{1}",
    "{0}*{1}",
    "{0}/{1}",
    "torch.maximum({0},{1})",
    "torch.minimum({0},{1})",
    "torch.where({0}>{1},{0},{1})",
    "torch.atan2({0},{1})",
    "torch.lerp({0},{1},0.3)",
    "torch.addcmul({0},{0},{1},value=0.5)",
    "torch.where({0}>0,{1},{0})",
    "torch.add({0},{1},alpha=2)",
    "{1}-{0}",
    "torch.rsub({0},{1})",
    "torch.hypot({0},{1})",
]
SCALAR = [
    "{0}*{k}",
    "{0}+{k}",
    "{k}-{0}",
    "{0}/3",
    "{0}**2",
    "{k}*{0}",
    "{0}**3",
    "{0}-{k}",
    "{0}**0.5",
    "torch.where({0}>0,{0},{k})",
]
REDUCE = [
    "{0}.sum()",
    "{0}.mean()",
    "{0}.sum({d})",
    "{0}.mean({d},keepdim=True)",
    "{0}.amax({d})",
    "{0}.prod({d})",
    "{0}.var({d})",
    "{0}.norm()",
    "torch.linalg.vector_norm({0},dim={d})",
    "torch.logsumexp({0},{d})",
    "{0}.max({d}).values",
    "{0}.cumsum({d})",
    "{0}.sort({d}).values",
    "{0}.std({d},correction=0)",
    "{0}.min()",
    "{0}.cumprod({d})",
    "{0}.median({d}).values",
    "{0}.max()",
    "{0}.topk(1,{d}).values",
    "{0}.amin(({d},))",
    "{0}.flip({d})",
    "{0}.roll(1,{d})",
    "{0}.sum({d},keepdim=True)",
]
NORM = [
    "torch.softmax({0},{d})",
    "torch.log_softmax({0},{d})",
    "F.normalize({0},dim={d})",
    "F.layer_norm({0},{0}.shape[-1:])",
    "F.rms_norm({0},{0}.shape[-1:])",
    "F.mse_loss({0},{0}.detach()*0.5)",
    "F.smooth_l1_loss({0},{0}.detach()+1)",
]


def unary(m: Maker) -> None:
    a = m.float()
    m.assign(m.rng.choice(UNARY).format(a).replace(",", ", "))


def binary(m: Maker) -> None:
    a = m.any(lambda x: not x.is_complex())
    b = m.beside(a, lambda x: not x.is_complex())
    pair = (a, b) if m.chance(0.7) else (b, a)
    form = m.rng.choice(BINARY)
    if "atan2" in form and any(str(m.value(x).dtype) == "torch.bool" for x in pair):
        raise Refused  # eager's gradient negates the mask, and refuses it
    m.assign(form.format(*pair).replace(",", ", "))


def scalar(m: Maker) -> None:
    a = m.any(lambda x: not x.is_complex())
    m.assign(m.rng.choice(SCALAR).format(a, k=m.number()).replace(",", ", "))


def reduce(m: Maker) -> None:
    a = m.float(1)
    m.assign(m.rng.choice(REDUCE).format(a, d=m.dim(a, 1)).replace(",", ", "))


def norm(m: Maker) -> None:
    a = m.float(1)
    m.assign(m.rng.choice(NORM).format(a, d=m.dim(a, 1)).replace(",", ", "))


def product(m: Maker) -> None:
    a = m.float(1)
    x = m.value(a)

    def fits(y: object) -> bool:
        return y.dtype == x.dtype and 1 <= y.ndim <= 2 and y.shape[max(y.ndim - 2, 0)] == x.shape[-1]  # type: ignore[attr-defined]

    b = m.any(fits)
    forms = ["{0} @ {1}", "torch.matmul({0}, {1})"]
    if m.value(b).ndim == 2:
        forms += ["F.linear({0}, {1}.t())", "torch.einsum('...i,ij->...j', {0}, {1})"]
    if x.ndim == 2 and m.value(b).ndim == 2:
        forms += ["torch.mm({0}, {1})", "torch.addmm({1}[0], {0}, {1})"]
    m.assign(m.rng.choice(forms).format(a, b))


def gram(m: Maker) -> None:
    a = m.float(2)
    m.assign(m.rng.choice(["{0} @ {0}.mT", "{0}.mT @ {0}", "{0} @ {0}.detach().mT"]).format(a))


def compare(m: Maker) -> None:
    a = m.any(lambda x: not x.is_complex())
    forms = "{0} > 0|{0} == {0}|{0}.isfinite()|{0} <= 0.5|{0}.argmax()|{0}.argsort()|{0}.bool()|{0}.isnan()|{0} != 0"
    m.assign(m.rng.choice(forms.split("|")).format(a))


def cast(m: Maker) -> None:
    a = m.any(lambda x: not x.is_complex())
    kinds = ["f64"] * 4 + ["f32", "i64", "b"] + ["bf16"] * (m.chance(0.3))
    form = m.rng.choice(["{0}.to({1})", "{0}.to({1})", "{0}.type({1})", "{0}.to({1}, copy=True)"])
    if m.value(a).is_floating_point() and not bool(m.value(a).isfinite().all()):
        kinds = ["f64", "f32"]  # what an infinity is as an integer is nobody's promise
    m.assign(form.format(a, m.rng.choice(kinds)))


def choose(m: Maker) -> None:
    a = m.float()
    mask = m.beside(a, lambda x: str(x.dtype) == "torch.bool")
    form = m.rng.choice(
        ["torch.where({1}, {0}, 0.0)", "{0}.masked_fill({1}, 2.0)", "{0} * {1}", "torch.where({1}, {0}, -{0})"]
    )
    m.assign(form.format(a, mask))


def factory(m: Maker) -> None:
    a = m.any()
    forms = (
        "torch.zeros_like({0})|torch.ones_like({0})|{0}.new_zeros({s})|torch.full_like({0}, 2)"
        "|torch.zeros({s}, dtype=f64)|torch.arange({n}, dtype=f64)|torch.tensor([1.0, -0.0], dtype=f64)"
        "|torch.tensor(0.5, dtype=f64)|torch.ones({s})"
        "|torch.eye({n}, dtype=f64)|torch.empty_like({0}).fill_(1)|{0}.new_tensor([1, 2])"
    )
    shape = tuple(m.value(a).shape)
    m.assign(m.rng.choice(forms.split("|")).format(a, s=shape, n=shape[0] if shape else 2))


def join(m: Maker) -> None:
    a = m.any(lambda x: x.ndim > 0)
    b = m.same(a)
    form = m.rng.choice(
        ["torch.cat([{0}, {1}], {2})", "torch.stack([{0}, {1}], {2})", "torch.cat([{0}, {0}, {1}], {2})"]
    )
    m.assign(form.format(a, b, m.dim(a)))


def pick(m: Maker) -> None:
    """Reads through an index."""
    a = m.any(lambda x: x.ndim > 0)
    d = m.dim(a, 1) % m.value(a).ndim
    places = m.places(m.value(a).shape[d], m.rng.randint(1, 3))
    forms = ["{0}.index_select({1}, {2})", "{0}[{3}{2}]", "torch.take_along_dim({0}, {0}.argsort({1}), {1})"]
    if m.chance(0.1):
        forms.append("{0}[{0} > 0]")  # a size that only a run gives
    text = m.rng.choice(forms).format(a, d, places, ":, " * d)
    if "> 0" in text and m.kind not in ("jit", "tile", "backend"):
        raise Refused
    m.assign(text)


def draw(m: Maker) -> None:
    a = m.float()
    forms = (
        "F.dropout({0}, 0.5, training=True)|torch.rand_like({0})|torch.bernoulli(torch.full_like({0}, 0.5))"
        "|torch.randn_like({0}) + {0}|F.dropout({0}, 0.3, training=torch.is_grad_enabled())"
    )
    m.assign(m.rng.choice(forms.split("|")).format(a))


def complexes(m: Maker) -> None:
    a = m.any(lambda x: x.is_complex())
    forms = "{0}.real|{0}.imag|{0}.abs()|torch.view_as_real({0})|{0} * {0}|{0}.conj()|{0}.conj() * {0}|{0}.exp()|{0}.mT"
    m.assign(m.rng.choice(forms.split("|")).format(a))


STEPS = {
    unary: 6, binary: 8, scalar: 4, reduce: 4, norm: 2, product: 2, gram: 1, compare: 1, cast: 1.5, choose: 1,
    factory: 2, join: 1, pick: 2, complexes: 1,
}  # fmt: skip
DRAWS = {draw: 1}
