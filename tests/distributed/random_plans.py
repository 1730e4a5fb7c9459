"""Plans drawn at random, on meshes drawn at random: each trains as one process on the whole batch does.

In: a seed. Out: a `Case`, always the same. `python tests/distributed/random_plans.py 0 50` tries many of them.
"""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass
from math import prod
from random import Random

import torch
from all_ranks import assert_equal, train_mesh
from models import GPT, Llama, MoE, token_batches, token_loss
from steps import train_whole
from strategies import PIPELINES

from tessera.distributed.plan import DATA

MODELS = {"gpt": GPT, "llama": Llama, "moe": MoE}
WORDS = {
    "dp": ("ddp", "zero1", "zero2", "zero3"), "ep": ("experts",), "cp": ("ring", "ulysses"),
    "tp": ("tensor", "sequence"), "pp": PIPELINES,
}  # fmt: skip
SIZES = {"dp": (2, 3, 4), "ep": (2, 4), "cp": (2, 4), "tp": (2, 3, 4), "pp": (2, 3)}
RANKS, STEPS = 16, 2


@dataclass(frozen=True)
class Case:
    model: str
    layers: int
    axes: dict[str, int]
    plan: dict[str, str]
    rows: int
    optimizer: str
    clip: float | None
    options: dict

    def __str__(self) -> str:
        words = ", ".join(f"{axis}={n} {self.plan[axis]}" for axis, n in self.axes.items())
        named = "".join(f", {name}: {text}" for name, text in self.plan.items() if name not in self.axes)
        more = f"{self.optimizer}, clip {self.clip}, {self.options}"
        return f"{self.model} of {self.layers} layers, {self.rows} rows, {words}{named}, {more}"


def random_case(seed: int) -> Case:
    draw = Random(seed)
    model = draw.choice([*MODELS])
    kinds = [kind for kind in WORDS if (kind != "ep" or model == "moe") and draw.random() < 0.6] or ["dp"]
    draw.shuffle(kinds)  # any axis may be the outermost
    axes = {kind: draw.choice(SIZES[kind]) for kind in kinds}
    while prod(axes.values()) > RANKS:
        axes.pop(draw.choice([*axes]))
    plan = {axis: draw.choice(WORDS[axis]) for axis in axes}
    if plan.get("dp") == "zero3" and prod(axes.values()) <= RANKS // 2 and draw.random() < 0.4:
        axes, plan = {"rep": 2, **axes}, {"rep": "hsdp", **plan}
    if axes.get("tp") in (2, 4) and model != "moe" and draw.random() < 0.3:
        plan["blocks.0.up.weight"] = draw.choice(["f/tp, d", "f, d/tp", "f, d"])
    data = prod(n for axis, n in axes.items() if plan[axis] in DATA)
    options = draw.choice([{}, {"recompute": "none"}, {"memory_budget": 3000}, {"accumulate": 2}])
    parts = data
    if "pp" in axes:
        options = {**options, "microbatches": axes["pp"] * draw.choice([1, 2])}
        parts *= options["microbatches"]
    return Case(
        model, draw.choice([1, 2]) + ("pp" in axes), axes, plan, parts * draw.choice([1, 2]),
        draw.choice(["adam", "sgd"]), draw.choice([None, 0.5]), options,
    )  # fmt: skip


def check(case: Case) -> None:
    torch.manual_seed(0)
    model = MODELS[case.model](case.layers).double()
    batches = token_batches(STEPS, case.rows)
    mine = train_mesh(model, token_loss, batches, case.axes, case.plan, case.optimizer, case.clip, **case.options)
    want = train_whole(model, token_loss, batches, case.optimizer, case.clip, case.options.get("accumulate", 1))
    assert_equal(mine, want)


if __name__ == "__main__":
    failed = []
    for seed in range(*map(int, sys.argv[1:3])):
        try:
            check(random_case(seed))
            print(f"{seed}: {random_case(seed)}", flush=True)
        except Exception:
            print(f"{seed}: FAILED {random_case(seed)}", flush=True)
            traceback.print_exc()
            failed.append(seed)
    print(f"failed: {failed or 'none'}")
