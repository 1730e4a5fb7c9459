"""The list of sections, and what of each runs where a minute is all there is."""

from __future__ import annotations

from tessera.tools.battery import kernels, language, layouts, modes, operators, tests, vision, zoo
from tessera.tools.battery.case import Section

SECTIONS: dict[str, Section] = {
    "tests": Section(tests.cases, report=tests.report),
    "operators": Section(operators.cases, operators.parts),
    "kernels": Section(kernels.cases, kernels.parts),
    "layouts": Section(layouts.cases, layouts.parts),
    "language": Section(language.cases, language.parts),
    "modes": Section(modes.cases, modes.parts),
    "vision": Section(vision.cases, vision.parts),
    "zoo": Section(zoo.cases, zoo.parts),
}
QUICK: dict[str, tuple[str, ...]] = {
    "operators": ("softmax bfloat16", "mul float32", "cumsum float16", "index_put float32", "matmul float32"),
    "kernels": ("nn.functional.layer_norm", "addmm"),
    "layouts": ("attention time-first causal float32", "convolution conv2d bfloat16", "loss cross_entropy float32"),
    "language": ("llama",),
    "modes": ("dynamic sizes", "quantize int8 5 rows bfloat16", "train_step adamw", "vmap of grad"),
    "zoo": ("realnvp",),
}
