"""The pipelines: one list of stages for each kind of compilation.

`PIPELINES` maps a kind to its rows. `tessera.pipeline.table(kind)` prints one; `insert` and `remove` change all that
have a row of the name, so that a pass of a user's is one row too.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from itertools import takewhile

from tessera.ir.trace import Trace
from tessera.passes.clean.canonicalise import canonicalise
from tessera.passes.clean.cse import cse
from tessera.passes.clean.dce import dce
from tessera.passes.clean.fold import fold
from tessera.passes.clean.inline import inline
from tessera.passes.clean.known import Given, known
from tessera.passes.memory.lay_out import lay_out
from tessera.passes.memory.prefetch import prefetch
from tessera.passes.memory.reinplace import reinplace
from tessera.passes.patterns.align import align
from tessera.passes.patterns.attention_mask import attention_mask
from tessera.passes.patterns.attention_operands import attention_operands
from tessera.passes.patterns.channels_last import channels_last
from tessera.passes.patterns.contract import contract
from tessera.passes.patterns.conv_bias import conv_bias
from tessera.passes.patterns.conv_groups import conv_groups
from tessera.passes.patterns.linear_loss import linear_loss
from tessera.passes.patterns.product_rows import product_rows
from tessera.passes.patterns.resample import resample
from tessera.passes.patterns.row_major import row_major
from tessera.passes.patterns.sum_products import sum_products
from tessera.pipeline import parts
from tessera.pipeline.stage import BACKWARD, FORWARD, JOINT, PROGRAM, Hook, Row, Stage
from tessera.transforms.fp8_layers import fp8_products
from tessera.util.errors import OptionError

# After differentiation nothing carries gradients any more: detach and its like are only names.
last = partial(canonicalise, differentiable=False)


def _linear_loss(trace: Trace) -> Trace:
    return dce(linear_loss(trace))


def _contract(trace: Trace) -> Trace:
    return dce(contract(trace))


def _sum_products(trace: Trace) -> Trace:
    return dce(sum_products(trace))


def _known(trace: Trace, given: tuple[Given, ...]) -> Trace:
    return dce(known(trace, given))


ATTENTION_OPERANDS = Stage(
    "attention_operands", attention_operands, "before vjp: gradients lie as operands do", when=parts.with_kernels,
    quiet=True,
)  # fmt: skip

ROW_MAJOR = Stage(
    "row_major", row_major, "on whole norms; derivatives lie as what they are derived from",
    when=parts.with_kernels, quiet=True,
)  # fmt: skip

CONTRACT = Stage(
    "contract", _contract, "sums of products as the user wrote them; derivatives are products then",
    when=parts.with_kernels,
)  # fmt: skip

CONV_BIAS = Stage(
    "conv_bias", conv_bias, "before vjp: the gradient of a sum is one that kernels take", when=parts.with_kernels,
    quiet=True,
)  # fmt: skip


def resampled(over: str) -> Stage:
    return Stage(
        "resample", resample, "the layout of images is known; weights of interpolation fuse with what is around them",
        over, when=parts.with_kernels, quiet=True,
    )  # fmt: skip


FP8_LAYERS = Stage(
    "fp8_layers", parts.choose_layers, "the last layer is known; derivatives are products of 8 bits then",
    needs=("run",), when=parts.in_eight_bits, quiet=True,
)  # fmt: skip


def fp8_written_out(over: str) -> Stage:
    return Stage(
        "fp8_products", fp8_products, "layers without a gradient, too; rounding fuses with what comes before",
        over, when=parts.in_eight_bits, quiet=True,
    )  # fmt: skip


CLEAN: list[Row] = [
    Stage("inline", inline, "first: no other pass looks into the bodies of calls"),
    Stage("canonicalise", canonicalise, "one plain form; equal equations then look equal", needs=("wrt",)),
    Stage("attention_mask", attention_mask, "before fold: a constant does not say what it was made of", quiet=True),
    Stage("fold", fold, "constants that the plain form shows"),
    Stage("cse", cse, "after both, which make equations equal", needs=("wrt",)),
    Stage("dce", dce, "sweeps what the others left"),
]

DIFFERENTIATE: list[Row] = [
    ATTENTION_OPERANDS,
    ROW_MAJOR,
    CONTRACT,
    CONV_BIAS,
    Stage(
        "linear_loss", _linear_loss, "kernels make the loss's gradient beside the loss, so before vjp",
        when=parts.with_kernels,
    ),
    FP8_LAYERS,
    Stage(
        "vjp", parts.differentiate, "on the clean program: fewer rules to apply",
        gives=JOINT, needs=("run",), quiet=True,
    ),
    fp8_written_out(JOINT),
    Stage(
        "channels_last", channels_last, "on whole operators, forward and backward, which results leave as they came",
        JOINT, when=parts.with_kernels, quiet=True,
    ),
    resampled(JOINT),
    Hook("decompose", "before it is decided what backward saves", JOINT),
    Stage("canonicalise", last, "detach and its like go", JOINT),
    Stage("fold", fold, "cotangents that are numbers", JOINT),
    Stage(
        "align", align, "derivatives' products too; before cse, since they pad the same tensors", JOINT,
        when=parts.with_kernels, quiet=True,
    ),
    Stage("cse", cse, "what forward and backward both compute", JOINT),
    Stage(
        "sum_products", _sum_products, "derivatives are whole; before it is decided what backward saves", JOINT,
        when=parts.with_kernels, quiet=True,
    ),
    Stage("known", known, "what an earlier program saved", JOINT, needs=("given",), when=parts.differentiated_again),
]  # fmt: skip


def claiming(over: str) -> list[Row]:
    """Who runs what."""
    return [
        Stage("chunk_loss", parts.chunk, "only now: derivatives are whole", over, needs=("executors",), quiet=True),
        Hook("prepare", "just before regions are chosen", over),
        Stage("claim", parts.claimed, "on functional operators", over, needs=("run",)),
    ]


def finishing(over: str) -> list[Row]:
    """The order of equations, and memory."""
    return [
        Stage(
            "schedule", parts.ordered, "regions are whole: their order decides how much memory is held", over,
            needs=("run",),
        ),
        Stage(
            "prefetch", prefetch, "in the final order, before anything is written over what is being copied",
            over, needs=("backward",), when=parts.offloads,
        ),
        Stage("reinplace", reinplace, "late: it reads the final order", over),
        Hook("finish", "after reinplace: before it nothing is written", over),
        Stage("lay_out", lay_out, "last: it stands right behind whatever calls the kernel", over),
    ]  # fmt: skip


INFERENCE: list[Row] = [
    *CLEAN,
    Hook("rewrite", "on whole operators, where there is no gradient"),
    ATTENTION_OPERANDS,
    ROW_MAJOR,
    CONTRACT,
    CONV_BIAS,
    Stage("fp8", parts.narrow, "on whole layers", needs=("account",), quiet=True),
    FP8_LAYERS,
    fp8_written_out(PROGRAM),
    Stage("conv_groups", conv_groups, "channels_last lays out the parts", when=parts.with_kernels, quiet=True),
    Stage("channels_last", channels_last, "on whole operators", when=parts.with_kernels, quiet=True),
    resampled(PROGRAM),
    Hook("decompose", "operators in parts that kernels hold"),
    Stage("inference canonicalise", last, "nothing carries gradients"),
    Stage("align", align, "on whole products", when=parts.with_kernels, quiet=True),
    Stage("product_rows", product_rows, "kernels write such copies", when=parts.with_kernels, quiet=True),
    Stage("inference dce", dce, "what decomposition left"),
    *claiming(PROGRAM),
    *finishing(PROGRAM),
]

DERIVATIVE: list[Row] = [
    *CLEAN,
    Hook("decompose", "as in the program that saved them, so that equal equations look equal"),
    Stage("again canonicalise", last, "as there"),
    Stage("again fold", fold, "as there"),
    Stage("again cse", cse, "as there"),
    Stage("known", _known, "what that program saved", needs=("given",)),
    *claiming(PROGRAM),
    *finishing(PROGRAM),
]

SPLIT: list[Row] = [
    Stage(
        "forward", parts.split, "the minimum cut of what is saved", JOINT, gives=FORWARD, needs=("run",)
    ),
    Stage("backward", parts.backward_half, "the other half", JOINT, gives=BACKWARD, needs=("run",)),
]  # fmt: skip

TRAINING: list[Row] = [
    *CLEAN, *DIFFERENTIATE, *SPLIT,
    *claiming(FORWARD), *finishing(FORWARD),
    *claiming(BACKWARD), *finishing(BACKWARD),
]  # fmt: skip

PIPELINES: dict[str, list[Row]] = {"inference": INFERENCE, "training": TRAINING, "derivative": DERIVATIVE}

# Stages whose program a user may replace: those before executors put their own callables in.
HALVES = ("forward", "backward")


def cleaned() -> tuple[str, ...]:
    """The stages before anything depends on what the program is compiled for."""
    return ("captured", *(row.title for row in takewhile(lambda row: isinstance(row, Stage), PIPELINES["inference"])))  # type: ignore[union-attr]


def editable() -> tuple[str, ...]:
    return (*cleaned(), *HALVES)


def insert(stage: Stage, before: str, kinds: Collection[str] | None = None) -> None:
    """Put a pass of your own before the stage of that title, in every pipeline that has one (or in these)."""
    places = [rows for kind, rows in PIPELINES.items() if kinds is None or kind in kinds]
    there = [
        (rows, i) for rows in places for i, row in enumerate(rows) if isinstance(row, Stage) and row.title == before
    ]
    if not there:
        raise OptionError(f"no pipeline has a stage called {before!r}")
    for rows, i in there:
        rows.insert(i, stage)


def remove(title: str) -> None:
    """Take a stage out of every pipeline that has it."""
    if not any(_titled(row, title) for rows in PIPELINES.values() for row in rows):
        raise OptionError(f"no pipeline has a stage called {title!r}")
    for rows in PIPELINES.values():
        rows[:] = [row for row in rows if not _titled(row, title)]


def _titled(row: Row, title: str) -> bool:
    return isinstance(row, Stage) and row.title == title
