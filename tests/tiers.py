"""Which tests run when. This file and the marks are the one place that says so; docs/testing.md explains it.

    quick     make quick             a part of every folder, for whoever edits: about 90 seconds on two cores
    test      make test              everything but the sweeps
    sweep     make sweep             more seeds and sizes of what `test` tries some of
    gpu       pytest -m gpu          what needs an NVIDIA GPU

`SWEPT_FILES` names files that hold sweeps alone and take seconds to import: only the sweep imports them.

Of a test whose parameters are crossed, `test` runs one case of `CROSSED`, and every value of each parameter; `sweep`
runs the others. `SWEEPS` names tests with so many cases that `test` runs a smaller part of them, chosen by name and
spread over all values. Single tests of the sweep have the mark `sweep`.

`QUICK` names the files of the quick tier. A file alone means all of it; words mean its tests whose names hold one of
them. Whoever adds a folder of tests adds a file of it here: `test_tiers.py` asks for that.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent

SWEPT_FILES = ("exporters/onnx/test_opinfo_onnx.py",)

# Of every so many cases `test` runs one.
CROSSED = 2
SWEEPS: dict[str, int] = {
    # Pairs of strategies: each strategy stays beside another, and is alone in test_crossed.py.
    "distributed/test_combinations.py::test_two_together": 9,
    "distributed/test_combinations.py::test_more_together": 3,
    "distributed/test_combinations.py::test_an_encoder_and_a_decoder": 2,
    "distributed/test_combinations.py::test_in_float32": 2,
    # Every one is four processes, and a deadline that passes.
    "distributed/test_failures.py::test_survivors_say_who_is_missing": 2,
    "distributed/test_failures.py::test_stages_say_who_is_missing": 2,
    # Plans of one strategy, each with three models; two strategies, each with several sizes of a mesh.
    "distributed/test_plans.py::test_alone": 3,
    "distributed/test_plans.py::test_together": 2,
    "distributed/test_plans.py::test_products_in_pieces": 2,
    "distributed/test_plans.py::test_bytes_of_data_parallel_plans": 2,
    "distributed/test_pipelined.py::test_a_pipeline_is_accumulation_bit_for_bit": 2,
    "distributed/test_pipelined_steps.py::test_a_pipeline_is_accumulation_bit_for_bit": 2,
    "distributed/test_pipelined_steps.py::test_alone": 2,
    "distributed/test_whole_loss.py::test_means_over_what_counts": 3,
    "distributed/test_whole_loss.py::test_what_sees_a_microbatch_alone_is_named": 2,
    "distributed/test_packed_weights.py::test_trains_alike_and_gathers_no_rows": 2,
    "distributed/test_packed_weights.py::test_unequal_blocks_train_alike": 4,
    "distributed/test_pipelined_steps.py::test_what_backward_recomputes": 3,
    "distributed/test_masks.py::test_written_by_a_mask": 2,
    "distributed/test_masks.py::test_rows_that_do_not_count_keep_their_place": 2,
    "distributed/test_masks.py::test_rows_whose_number_data_decides": 3,
    "distributed/test_mesh_messages.py::test_a_plan_that_does_not_fit": 2,
    "distributed/test_raising.py::test_trains_alike": 2,
    "distributed/test_ctc_meshes.py::test_trains_alike": 2,
    "distributed/test_experts.py::test_gradients": 2,
    "distributed/test_gpu_attention.py::test_kernels": 2,
    # One model of others' each, trained or compiled whole.
    "distributed/test_strangers.py::test_trains_alike": 2,
    "distributed/test_generate.py::test_tokens_are_one_processes": 2,
    # One operator each, cut along every dimension by all ranks.
    "distributed/test_rules.py::test_cut_along_every_dimension": 3,
    "distributed/test_tried.py::test_a_cut_found_by_trial_holds": 3,
    "distributed/test_rows_stay.py::test_losses": 2,
    # Whole models of open sizes, and of plans drawn at random.
    "distributed/test_sizes.py::test_steps": 2,
    "distributed/test_random_plans.py::test_random_plans": 2,
    # Every one compiles a model for some twenty machines, or runs one cycle by cycle.
    "spatial/test_codesign.py::test_it_names_what_a_machine_is_short_of": 2,
    "spatial/test_watch.py::test_cycles_are_as_they_were": 2,
    "spatial/test_random.py::test_random_programs": 2,
    "spatial/test_map.py::test_models": 2,
    # Every one is a process that imports PyTorch and compiles a model.
    "docs/test_examples.py::test_example_runs": 3,
    # One model of transformers each, compiled whole.
    "test_generation.py::test_static_caches": 3,
    "executors/rows/test_rows_models.py::test_a_token": 3,
    # One function or operator each, differentiated twice; its first derivative is always tried.
    "ops/test_operators.py::test_second_derivative": 4,
    "ops/test_whole.py::test_gradients_of_gradients": 2,
    "ops/test_whole.py::test_tangents_of_gradients": 3,
    "transforms/test_second_order.py::test_functions": 3,
    "transforms/test_second_order.py::test_declared_operators": 6,
    "runtime/test_double_backward.py::test_three_orders": 3,
    "runtime/test_double_backward.py::test_three_orders_of_inputs_that_nobody_holds": 2,
    # One operator each, which test_operators.py and test_whole.py try too.
    "ops/test_whole.py::test_batches": 4,
    "ops/test_kernels.py::test_no_more_kernels_than_eager": 2,
    "ops/test_tied.py::test_derivatives_end_where_eagers_do": 2,
    # Crossed parameters: every value stays, beside others.
    "passes/test_linear_loss.py::test_chunks_give_the_same_loss_and_gradients": 3,
    "passes/test_every_pass.py::test_one_after_the_other": 3,
    "passes/test_row_major.py::test_norms_read_rows": 2,
    "passes/test_decompose_batch_norm.py::test_kinds": 2,
    "passes/test_fp8.py::test_the_error_is_bounded": 2,
    "passes/test_identities.py::test_passes_keep_every_bit": 2,
    "executors/test_tile_losses.py::test_as_eager": 3,
    "executors/test_tile_pool.py::test_a_stem_learns_as_in_eager": 2,
    "executors/rows/test_rows_positions.py::test_masks": 2,
    "exporters/onnx/test_onnx_recurrent.py::test_layers_of_any_length": 2,
    "frontends/test_custom_function.py::test_inside_transforms_inside_a_compiled_function": 2,
    "frontends/test_enable_grad.py::test_gradients_inside": 2,
    "frontends/test_export.py::test_a_program": 3,
    "frontends/test_export.py::test_a_program_in_core_operators": 3,
    "frontends/test_bodies.py::test_saved_stages_come_back_the_same": 2,
    "frontends/test_copies_without_gradients.py::test_copies_and_views": 2,
    "frontends/test_custom_function.py::test_a_result_that_shows_an_argument_is_a_view_of_it": 2,
    "frontends/test_detached_results.py::test_they_share_memory_as_in_eager": 2,
    "frontends/test_dynamo.py::test_gradients_whose_operators_know_no_symbolic_sizes": 2,
    "frontends/test_enable_grad.py::test_gradients_on_inside_forward_mode": 3,
    "frontends/test_function_broadcasts.py::test_gradients_are_summed": 3,
    "frontends/test_literals.py::test_a_number_is_what_the_literal_holds_now": 2,
    "frontends/test_shared_results.py::test_a_view_of_a_written_input_at_a_place_that_follows_from_its_size": 2,
    "frontends/test_hooks.py::test_a_hook_in_one_of_several_equal_blocks": 3,
    "frontends/test_hooks.py::test_hooks_of_modules_come_and_go": 2,
    "frontends/test_hooks.py::test_hooks_in_the_forward": 2,
    "frontends/test_frames.py::test_none_runs_eagerly_for_there_being_many": 2,
    "frontends/test_empty_batch.py::test_a_loss_of_nothing": 2,
    "frontends/test_same_tensor.py::test_an_argument_that_the_program_holds_itself": 2,
    "frontends/test_left_contexts.py::test_no_switch_is_left_changed": 3,
    "frontends/test_shared_results.py::test_a_detached_argument_that_is_written_with_gradients_is_its_memory_still": 2,
    "frontends/test_flex.py::test_a_function_of_the_score": 2,
    "frontends/test_inner_leaves.py::test_histories_of_written_arguments": 2,
    "frontends/test_padded_encoder.py::test_padded_places": 2,
    "frontends/test_runtime_sizes.py::test_numbers": 4,
    "frontends/stablehlo/test_jax.py::test_generators_give_xlas_bits": 2,
    "frontends/stablehlo/test_jax.py::test_one_program_for_all_sizes": 2,
    "frontends/stablehlo/test_jax.py::test_a_program_of_jax_leaves_as_a_file": 2,
    "exporters/onnx/test_onnx_open_sizes.py::test_other_sizes": 2,
    "runtime/test_lent.py::test_derivatives_of_every_order": 2,
    "runtime/test_partial_backward.py::test_zeros_do_not_meet_infinity": 2,
    "runtime/test_partial_backward.py::test_what_a_gradient_does_not_read_may_be_written": 2,
    "runtime/test_written_views.py::test_what_is_saved_is_another_view_of_a_complex_result": 2,
    "transforms/test_fp8_layers.py::test_values_and_gradients": 2,
    "transforms/test_fp8_layers.py::test_a_block_follows_16_bits": 2,
    "transforms/test_requires_grad_levels.py::test_nested_transforms_say_what_torch_func_says": 4,
    "transforms/test_vmap_index.py::test_index_put": 2,
    "transforms/test_vmap_index.py::test_writes_under_masks": 2,
    "transforms/test_cotangent_layouts.py::test_like_eager": 3,
    # Programs from a seed, or small programs of one kind, each against eager.
    "executors/test_claim.py::test_random_regions": 6,
    "frontends/test_grad_modes.py::test_like_eager": 3,
    "frontends/test_size_conditions.py::test_conditions_at_random": 4,
    "ir/test_strided.py::test_like_eager": 2,
    "ir/test_gapped_writes.py::test_views_of_what_was_written": 2,
    "ir/test_interp.py::test_random_programs": 2,
    "passes/test_write_over.py::test_like_eager": 2,
    "passes/test_every_pass.py::test_each_pass_alone": 2,
    "executors/test_tile.py::test_random_programs": 2,
    "passes/test_overwritten.py::test_like_eager": 2,
    "tile/test_cpu.py::test_random_kernel": 2,
    "tile/test_cpu.py::test_reduce": 3,
    # A step of a small model each, many times.
    "training/test_train_step.py::test_twenty_steps_of_a_gpt_follow_eager": 4,
    "training/test_fp8_step.py::test_it_learns_as_16_bits_do": 2,
    "serve/test_engine.py::test_tokens_are_those_of_generate": 2,
    # Making a cubin takes seconds; so does running one kernel block by block.
    "serve/test_paged_kernels.py::test_kernels_compile_for_hopper": 3,
    "tile/test_cuda_tile.py::test_emitted_programs_give_the_right_numbers": 3,
    "tile/test_registers.py::test_rows_stay_in_registers": 2,
    "tile/test_triton.py::test_compiles": 2,
    "tile/test_products.py::test_compiles_for_hopper": 2,
    "tile/test_columns.py::test_as_many_warps_fit_as_were_meant": 2,
    "tile/test_moe.py::test_schedules_of_running_sums_fit_hopper": 3,
    "tile/test_moe.py::test_gradients_of_router_and_experts": 3,
    "tile/test_online.py::test_on_the_cpu": 3,
    "tile/test_attention.py::test_cuda_tile_gives_the_right_numbers": 2,
    "executors/rows/test_rows_packed.py::test_compiles_without_assembly_and_for_odd_sizes": 2,
    "executors/rows/test_rows_packed.py::test_weights_go_straight_to_the_matrix_units": 2,
    "serve/test_sampling_kernels.py::test_kernels_compile_for_hopper": 2,
    "executors/rows/test_rows_kernels.py::test_keys_and_values_go_to_the_matrix_units_without_a_stop": 4,
}

QUICK: dict[str, tuple[str, ...]] = {
    "artifact/test_artifact.py": ("numbers", "without", "checked"),
    "distributed/test_plans.py": ("bytes",),
    "docs/test_layout.py": (),
    "docs/test_pages.py": ("links", "measured"),
    "docs/test_reference.py": (),
    "executors/rows/test_rows.py": (),
    "executors/test_aten.py": (),
    "executors/test_claim.py": (),
    "executors/test_default.py": (),
    "executors/test_register.py": (),
    "executors/test_sdpa.py": (),
    "exporters/onnx/test_onnx_forms.py": ("whole", "named"),
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


def sweep_rest(items: list[pytest.Item]) -> None:
    """Mark the cases that `test` leaves out."""
    tests: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tests[f"{item.path.relative_to(HERE).as_posix()}::{item.originalname}"].append(item)
    for test, cases in tests.items():
        if test in SWEEPS:
            kept = chosen(cases, SWEEPS[test])
        else:
            cases = [case for case in cases if not any(map(case.get_closest_marker, ("sweep", "gpu")))]
            kept = covering(cases, CROSSED)
        for item in cases:
            if item not in kept:
                item.add_marker(pytest.mark.sweep)


def covering(cases: list[pytest.Function], every: int) -> list[pytest.Function]:
    """One of so many cases, whatever their order, and every value of each parameter. Where these are not crossed each
    case has a value of its own, and all stay."""
    left = {case: set(rows_of(case)) for case in cases}
    order, kept, seen = sorted(cases, key=lambda case: zlib.crc32(case.name.encode())), [], set()
    while order and (len(kept) < len(cases) / every or any(left[case] - seen for case in order)):
        case = max(order, key=lambda case: len(left[case] - seen))
        order.remove(case)
        kept.append(case)
        seen |= left[case]
    return kept


def rows_of(case: pytest.Function) -> Iterator[tuple]:
    """The row of each table of parameters that a case is made of. Cases of one row hold the same objects."""
    params = dict(case.callspec.params)
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        yield tuple((name.strip(), id(params.pop(name.strip(), None))) for name in names)
    yield from ((name, id(value)) for name, value in params.items())  # of fixtures


def chosen(cases: list[pytest.Function], every: int) -> list[pytest.Function]:
    """One of so many cases, whatever their order; of parameters that are crossed every value, which may take more."""
    made_of = {case: set(values_of(case)) for case in cases}
    uses = Counter(value for values in made_of.values() for value in values)
    kept, others, seen = [], [], set()
    for case in sorted(cases, key=lambda case: zlib.crc32(case.name.encode())):
        # A number or object of one case alone is not crossed with others; a word may be the only one of its kind.
        values = {value for value in made_of[case] if uses[value] > 1 or isinstance(value[1], str)}
        new = len(made_of[case]) > 1 and values - seen
        (kept if new else others).append(case)
        seen |= values if new else set()
    return kept + others[: max(0, math.ceil(len(cases) / every) - len(kept))]


def values_of(case: pytest.Function) -> Iterator[tuple[str, object]]:
    """What a case is made of: the value of each parameter, and each word of a tuple of words."""
    for name, value in case.callspec.params.items():
        words = value if isinstance(value, tuple) else (value,)
        plain = all(isinstance(word, (str, int)) for word in words)
        yield from ((name, word) for word in (words if plain else (id(value),)))  # crossed cases share it


def words_of(path: Path) -> tuple[str, ...] | None:
    """The words that choose from a file of tests; none: all of it; None: it is not in the quick tier."""
    return QUICK.get(path.relative_to(HERE).as_posix())


def in_quick(path: Path, name: str) -> bool:
    """Is the test of this name, in this file, in the quick tier?"""
    words = words_of(path)
    return words is not None and (not words or any(word in name for word in words))
