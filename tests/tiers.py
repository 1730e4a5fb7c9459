"""Which tests run when. This file and the marks are the one place that says so; docs/testing.md explains it.

    quick     make quick             a part of every folder, for whoever edits: about a minute on two cores
    test      make test              everything but the sweeps
    sweep     make sweep             more seeds and sizes of what `test` tries some of
    gpu       pytest -m gpu          what needs an NVIDIA GPU

`QUICK` names the files of the quick tier. A file alone means all of it; words mean its tests whose names hold one of
them. Whoever adds a folder of tests adds a file of it here: `test_tiers.py` asks for that.
"""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent

QUICK: dict[str, tuple[str, ...]] = {
    "artifact/test_artifact.py": ("numbers", "without", "checked"),
    "distributed/test_plans.py": ("bytes",),
    "docs/test_layout.py": (),
    "docs/test_reference.py": (),
    "executors/rows/test_rows.py": (),
    "executors/test_aten.py": (),
    "executors/test_claim.py": (),
    "executors/test_default.py": (),
    "executors/test_register.py": (),
    "executors/test_sdpa.py": (),
    "exporters/onnx/test_onnx_forms.py": ("whole", "named", "refused"),
    "frontends/onnx/test_hostile_onnx.py": (),
    "frontends/stablehlo/test_stablehlo_operators.py": ("division", "dot_general", "scatter"),
    "frontends/test_custom.py": (),
    "frontends/test_data_writes.py": (),
    "frontends/test_functional.py": (),
    "frontends/test_state_changes.py": (),
    "fuzz/test_programs.py": ("seed", "cover", "right"),
    "ir/test_interp.py": (),
    "ir/test_match.py": (),
    "ir/test_printer.py": (),
    "ir/test_serial.py": (),
    "ir/test_verify.py": (),
    "machines/test_describe.py": (),
    "ops/test_matrix.py": (),
    "ops/test_operators.py": ("forward", "vjp"),
    "ops/test_pool.py": (),
    "ops/test_uniform.py": (),
    "passes/test_alias.py": (),
    "passes/test_canonicalise.py": (),
    "passes/test_cse.py": (),
    "passes/test_dce.py": (),
    "passes/test_decompose.py": (),
    "passes/test_fold.py": (),
    "passes/test_reinplace.py": (),
    "passes/test_reuse.py": (),
    "passes/test_schedule.py": (),
    "passes/test_write_over.py": (),
    "pipeline/test_lists.py": (),
    "runtime/test_autograd.py": (),
    "runtime/test_call.py": (),
    "serve/test_serve_cache.py": (),
    "serve/test_scheduler.py": (),
    "spatial/test_listing.py": (),
    "spatial/test_map.py": ("integers", "chosen", "refused"),
    "spatial/test_memory.py": ("refuses",),
    "store/test_key.py": (),
    "test_front_door.py": ("told", "named", "short", "stage"),
    "test_tiers.py": (),
    "tile/test_autotune.py": (),
    "tile/test_cache.py": (),
    "tile/test_columns.py": (),
    "tile/test_cpu.py": ("softmax",),
    "tile/test_from_trace.py": (),
    "tile/test_lower_pointwise.py": (),
    "tile/test_online.py": (),
    "tile/test_pieces.py": (),
    "tile/test_products.py": (),
    "tile/test_text.py": (),
    "tools/test_commands.py": ("op_", "explain", "trace", "nonsense", "cache", "tile_opt"),
    "tools/test_report.py": (),
    "torch_internals/test_door.py": (),
    "torch_internals/test_symbols.py": (),
    "training/test_methods.py": (),
    "transforms/test_jvp.py": (),
    "transforms/test_remat.py": (),
    "transforms/test_vmap.py": (),
    "transforms/test_vmap_api.py": (),
    "transforms/test_vmap_inplace.py": (),
    "util/test_config.py": (),
}


def words_of(path: Path) -> tuple[str, ...] | None:
    """The words that choose from a file of tests; none: all of it; None: it is not in the quick tier."""
    return QUICK.get(path.relative_to(HERE).as_posix())


def in_quick(path: Path, name: str) -> bool:
    """Is the test of this name, in this file, in the quick tier?"""
    words = words_of(path)
    return words is not None and (not words or any(word in name for word in words))
