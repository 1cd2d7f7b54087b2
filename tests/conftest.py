"""Settings for every test: the same examples in every run, no deadline on a busy machine, and captures that many tests ask for once."""

import gc
import logging
import re
from collections import Counter

import pytest
import torch
from hypothesis import settings

settings.register_profile("autoshard", derandomize=True, deadline=None, database=None, print_blob=True)
settings.load_profile("autoshard")
gc.set_threshold(100_000, 50, 100)  # most objects of a test process live as long as it does: an eighth of its time went into looking

# Ranks are forked. Where torch is built for CUDA and there is no GPU, autograd would start threads for one at the first backward among fake
# tensors, and then no child can run backward; it starts none at a first one like this.
torch.ones(1, requires_grad=True).sum().backward()

# pytest listens to every logger that does not propagate, and torch prints its graphs for whoever listens to this one.
logging.getLogger("torch.__trace").propagate = True

CAPTURING = ("test_capture", "test_depth", "test_tile", "test_threads", "test_chunked_loss")

# Of the cases of these tests the quick suite runs every third, the others are slow: together they took a fifth of its time.
THINNED = """
test_api: test_the_plan_is_optimal_and_no_baseline_is_cheaper test_the_plan_and_random_layouts_compute_what_the_model_computes
    test_pins_are_obeyed_and_never_make_a_plan_cheaper test_by_default_no_usual_plan_has_a_shorter_time_line
    test_the_breakdown_adds_up_to_the_cost test_the_cost_and_the_peak_are_evaluates
    test_every_parameter_has_its_layout_and_local_bytes
test_baselines: test_data_parallel_moves_nothing_between_ops test_every_pin_is_a_candidate_and_every_pinned_problem_has_a_plan
    test_megatron_lays_every_parameter_as_the_table_says
    test_other_structures_get_plans_too
test_capture: test_every_tensor_node_of_a_given_graph_becomes_a_value_of_its_shape_and_type
    test_the_graph_of_a_model_computes_its_outputs_and_gradients test_the_views_of_the_tiny_models_are_known
test_capture_strangers: test_it_is_captured_planned_and_verified test_a_class_that_needs_other_inputs_gets_them_or_says_which
    test_whatever_a_forward_raises_is_a_sentence_with_its_line_below_a_loss_of_another_file
    test_layers_of_many_steps_are_captured test_caches_of_transformers_are_inputs
test_cli_options: test_a_number_below_what_an_option_allows_is_refused test_a_number_in_text_is_refused_before_a_file_is_read
test_compile_backend: test_ranks_compute_what_the_plain_model_computes
test_decode_cache: test_greedy_decoding_on_two_ranks_says_what_the_model_says
test_depth: test_a_net_that_repeats_is_captured_from_few_layers
    test_a_net_that_must_not_be_tiled_is_refused_with_the_reason_and_captured_whole
test_dry_run: test_every_op_of_a_lowered_model_can_run_on_a_gpu
test_dynamic_shapes: test_a_graph_whose_sizes_are_symbols_is_planned_at_the_sizes_of_the_examples
test_flex_attention: test_it_is_planned_and_right_in_random_layouts
test_formulate: test_the_cost_is_the_sum_over_ops_and_ways test_a_plan_is_read_back_with_its_cost_and_peak
test_given_twice: test_the_graph_is_that_of_different_tensors
test_hidden_values: test_usual_plans_shard_experts_as_they_did
test_known_masks: test_a_mask_is_known_where_no_input_is_in_it
test_fusion: test_kernels_of_models_have_an_order_and_move_no_more_than_the_ops_alone
test_lower_collectives: test_every_route_ends_with_the_target_cut
test_lower_kernels: test_kernel_gives_the_whole_op
test_lower_verify: test_random_layouts_compute_the_same
test_hostile_files: test_a_gzip_file_that_unpacks_to_much_is_refused_in_bounds
test_limited: test_auto_goes_on_from_prices_to_the_proof test_what_lies_on_the_way_is_what_evaluate_says
    test_bounds_and_answers_agree_with_brute_force test_time_that_runs_out_leaves_what_is_known
    test_the_choice_and_the_messages_of_another_problem_leave_bounds_and_answers_true
test_models: test_tiny_exports_from_meta_and_the_program_keeps_its_output_shape
test_memory: test_the_peak_of_random_layouts_is_never_below_what_their_program_takes
test_overlapped: test_of_all_plans_of_a_tiny_chain_none_is_below_the_bound_or_a_percent_faster
    test_the_bound_is_below_every_time_line_and_the_plan_no_slower_than_the_serial_one
test_parallelize_objects: test_a_tensor_that_is_no_buffer_is_read_on_every_rank
test_parallelize_inputs: test_a_parallel_module_shares_no_storage_with_the_model_that_it_was_made_of
test_passes: test_every_tensor_node_carries_a_legal_spec_and_every_parameter_is_in_the_map test_a_baseline_can_be_asked_for
test_pipeline_bounds: test_leaving_out_what_cannot_pay_changes_no_best
test_precision: test_norms_of_bfloat16_run_on_a_cpu_and_trace_for_a_gpu
test_relayout_planners: test_published_searches_are_reproduced_state_by_state
test_routes: test_every_route_ends_with_the_targets_parts_on_every_rank
test_saved_values: test_recomputing_changes_no_number test_recomputing_and_offloading_change_no_number
    test_few_layers_get_their_saved_values_as_the_layers_of_a_deep_graph_do
test_simulate_timeline: test_without_overlap_seconds_are_the_cost_and_the_peak_is_the_plans
    test_overlap_is_faster_than_serial_and_slower_than_any_stream
test_solvers_anneal: test_a_walk_reports_the_cost_that_the_judge_finds_and_what_it_keeps_fits
test_solvers: test_ilp_and_exhaustive_agree_on_500_problems test_auto_reduce_and_dual_on_800_problems
    test_known_prices_and_answers_beyond_the_limit_change_no_optimum test_preference_decides_among_equals_only
    test_dp_is_exact_without_memory_and_a_bound_with_it test_constant_bytes_are_a_lower_limit_to_every_solver
test_strangers: test_every_op_has_rows_and_a_random_layout_is_right test_every_op_has_rows
test_tile: test_blocks_are_found_without_names test_two_layers_are_too_few
test_uneven: test_random_uneven_layouts_train_as_the_module_does
test_verify_kinds: test_the_plan_and_random_layouts_are_right test_a_planted_fault_is_found
test_zero_stages: test_bytes_sent_and_held_are_those_of_the_literature
"""

# Cases that the quick suite leaves out besides, since each takes seconds and others of its test find the same faults.
LEFT_OUT = r"""
test_api::test_the_plan_and_random_layouts_compute_what_the_model_computes: bert-True
test_api::test_the_plan_is_optimal_and_no_baseline_is_cheaper: llama-False-sizes9
test_calibrate::test_sizes_are_whole_floats_on_every_rank_and_their_buffers_have_these_bytes: shape4
test_capture::test_every_tensor_node_of_a_given_graph_becomes_a_value_of_its_shape_and_type: bert-exported
test_capture::test_the_graph_of_a_model_computes_its_outputs_and_gradients: bert-True
test_capture::test_the_views_of_the_tiny_models_are_known: bert-True
test_capture_causes::test_what_is_planned_for_training_is_planned_for_inference_and_right: jacrev-training
test_capture_strangers::test_a_class_that_needs_other_inputs_gets_them_or_says_which: SegformerForSemanticSegmentation-training
test_capture_strangers::test_it_is_captured_planned_and_verified: gru-training
test_capture_strangers::test_layers_of_many_steps_are_captured: GRU-training
test_capture_strangers::test_recurrent_layers_drop_out_between_them: RNN-options1
test_certify::test_the_numbers_give_the_plans_cost_and_a_bound_and_a_raised_one_is_refused: case3
test_checkpoint_files::test_the_optimizers_state_is_loaded_where_an_optimizer_is_given: False
test_conflicts::test_a_conflict_is_minimal: mlp forward 2-weights are whole and memory is at 1.0
  | mlp forward 2-weights are whole and memory is at 0.25
test_coverage::test_every_op_has_rows_and_a_random_layout_is_right: resnet
test_decode_cache::test_caches_of_the_caller_are_written_whatever_their_strides: plain | sliced
test_decode_cache::test_rows_of_a_buffer_are_written_into_it_unless_the_old_ones_are_read_afterwards: index_copy | output
test_decode_cache::test_the_cache_setting_plans_a_decode_step_and_verify_runs_it: gemma2-static
test_depth::test_a_net_that_repeats_is_captured_from_few_layers: first three begin alike-12-7-training
test_depth::test_a_net_that_must_not_be_tiled_is_refused_with_the_reason_and_captured_whole: scaled by number-too few-training
test_depth::test_only_the_witness_sees_a_condition_on_the_number_of_the_layer: training
test_depth::test_where_no_eager_forward_runs_both_depths_are_captured: training
test_dry_run::test_every_op_of_a_lowered_model_can_run_on_a_gpu: llama-True | hf vit-True | moe-True
test_dtensor_rules::test_torch_propagates_the_planned_layouts_but_for_the_ops_of_the_list: gpt2-True
test_dynamic_shapes::test_the_pass_plans_ranges_of_every_form_of_graph: symbolic_trace | export, its own inputs
test_experts::test_experts_are_sharded_over_the_axes_that_tokens_are_sent_over: shape0-S(0),S(0) | shape2-S(0),S(1)
test_explain::test_why_not_costs_what_a_cold_plan_with_that_pin_costs: input_0-S(1),S(0) | gelu_1-S(0),R
test_exports_modules::test_a_saved_llama_loaded_with_an_export_gives_its_logits: 4
test_few_layers::test_a_layer_that_is_pinned_alone_leaves_the_bound_below_the_best: 1 | 3
test_fits::test_what_makes_it_fit_fits: nanotron | accelerate
test_flex_attention::test_it_is_planned_and_right_in_random_layouts: softcap, causal-options1-training
test_fusion::test_a_compiled_plan_costs_less_and_is_priced_alike_by_all: llama
test_fusion::test_kernels_of_models_have_an_order_and_move_no_more_than_the_ops_alone: unet
test_graph::test_a_model_at_another_batch_has_the_same_structure: llama
test_hidden_values::test_layers_and_casts_of_precision_are_paired: qwen3_moe
test_hidden_values::test_wrong_rows_are_found: shifted
test_hostile_files::test_a_gzip_file_that_unpacks_to_much_is_refused_in_bounds: \x00
test_interrupts::test_ctrl_c_during_an_import_is_one_line: torch.nn-argv6 | autoshard.cost.curves-argv7
test_known_masks::test_a_model_of_transformers_has_no_mask_however_long_the_sequence: 100000-True
test_launchers::test_legality_of_every_row_is_that_of_plain_conditions: mixtral-megatron
test_launchers::test_the_seconds_and_bytes_of_every_launch_are_sums_of_parts: torchtitan-h100-bf16 | automodel-l40s-fp16
test_launch_page::test_what_a_step_depends_on_is_the_price_under_these_links: nanotron | accelerate
test_launchers_verbs::test_a_configuration_is_judged_without_torch: words1
test_launchers_verbs::test_the_seconds_of_a_row_are_taken_apart: words1
test_limited::test_a_planted_bound_is_seen: proof
test_limited::test_auto_goes_on_from_prices_to_the_proof: tree-True
test_limited::test_bounds_and_answers_agree_with_brute_force: tree-True
test_limited::test_what_lies_on_the_way_is_what_evaluate_says: tree-True
test_long_context_ranks::test_every_sharded_sequence_computes_what_one_process_does: (2,)-[('ring', (True, False), 2, 2)]
test_lower_verify::test_every_planted_fault_is_found_where_it_is: gpt2
test_lower_verify::test_random_layouts_compute_the_same: 0-bert-(2, 3)-True | 0-gpt2-(2, 2, 2)-True
test_memory::test_the_peak_of_random_layouts_is_never_below_what_their_program_takes: gpt2-2x4
test_models::test_tiny_exports_from_meta_and_the_program_keeps_its_output_shape: bert-loss
test_mutations::test_a_file_with_a_fault_is_answered_or_refused_in_one_sentence: page with a frontier | load curves
test_mutations::test_the_good_file_is_read: page with a frontier | load curves
test_no_answer::test_every_search_ends_with_the_time_limit: 300.0-options1
test_parallelize_inputs::test_a_parallel_module_shares_no_storage_with_the_model_that_it_was_made_of: shape3-None-True
test_parallelize_inputs::test_what_a_module_returns_is_packed_as_it_was_captured: asks-False | packs-False
test_parallelize_inputs::test_whole_inputs_and_shards_are_told_apart_and_every_shape_is_captured_once: False
test_parallelize_results::test_only_the_adapters_are_trained: LoRA
test_partitioning::test_plans_compute_what_one_device_computes_and_need_less: unet | llama | bert
test_pass_cache::test_a_pass_that_starts_from_a_near_plan_costs_what_it_costs_from_nothing: serial-batch
test_pass_cache::test_ops_correspond_to_those_at_the_same_place_of_another_depth: llama-3-3 | llama-3-4 | llama-4-3
test_pass_cache::test_a_torn_file_of_a_location_is_planned_anew_and_listed: {"key": "a", "family": "b", "facts": 3, "text": "{}"}
test_pipeline_bounds::test_leaving_out_what_cannot_pay_changes_no_best: 8-None-links9 | 4-None-links0
test_precision::test_a_parameter_is_stored_in_float32_and_cast_once_per_pass: llama
test_random_ops::test_eval_mode_is_training_without_dropout_or_another_program: attention-True
test_random_ops::test_what_is_drawn_is_kept_where_the_rest_is_recomputed: all
test_random_ops::test_a_rank_that_keeps_another_shard_or_draws_on_from_its_own_seed_is_found: alone
test_random_ops::test_a_shard_that_draws_for_another_is_found: same_on_two_shards
test_relayout_planners::test_published_searches_are_reproduced_state_by_state: mem_loose_p1 | nb_p2
test_relayout_planners::test_no_route_is_below_what_the_links_must_carry_nor_above_torchs: left_to_right
test_report_html::test_no_column_of_the_memory_chart_loses_a_peak: 2 | 3 | 4
test_simulate_timeline::test_without_overlap_seconds_are_the_cost_and_the_peak_is_the_plans: gpt2-2x2-data_parallel
test_solvers::test_auto_reduce_and_dual_on_800_problems: 0
test_solvers::test_contest_optimum_is_proven: G-217039
test_solvers_anneal::test_a_walk_reports_the_cost_that_the_judge_finds_and_what_it_keeps_fits: 3
test_terminal::test_a_table_too_wide_is_folded_and_loses_nothing: False-60 | True-80 | True-120
test_tile::test_blocks_are_found_without_names: llama-training
test_tile::test_three_layers_tiled_are_the_captured_deeper_graph: gpt2-5-inference
test_training_runs_graph::test_the_kept_blocks_are_what_is_captured_now: qwen3
test_uneven::test_random_uneven_layouts_train_as_the_module_does: bert-(2, 2)
test_uneven::test_ranks_of_unlike_shards_start_their_collectives_in_one_order: mlp-shape1-fsdp
test_unused_outputs::test_a_backward_op_runs_with_one_gradient_alone: lstm | grouped attention
test_verify_kinds::test_dropout_in_random_layouts_on_other_meshes: (2, 3)
test_verify_kinds::test_the_plan_and_random_layouts_are_right: fourier-True
test_verify_rounding::test_rounding_is_no_alarm_and_a_fault_is_one: argmax of differences-inference | ==-inference | >=, returned-inference
"""


def left_out() -> set[str]:
    """As file::test[case]."""
    tests = re.findall(r"^(\w+::\w+): (.*(?:\n +.*)*)", LEFT_OUT, re.MULTILINE)
    return {f"{test}[{case.strip()}]" for test, cases in tests for case in cases.split("|")}


def thinned() -> set[tuple[str, str]]:
    files = re.findall(r"^(\w+):(.*(?:\n +.*)*)", THINNED, re.MULTILINE)
    return {(file, test) for file, tests in files for test in tests.split()}


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config, items) -> None:
    wanted, cases, without = thinned(), Counter(), left_out()
    if not any("::" in argument for argument in config.args):  # whole files
        files, there = {item.path.stem for item in items}, {f"{item.path.stem}::{item.name}" for item in items}
        there |= {name.partition("[")[0] for name in there}
        named = without | {"::".join(test) for test in wanted}
        if unknown := sorted(name for name in named - there if name.partition("::")[0] in files):
            raise pytest.UsageError(f"tests/conftest.py names cases that no test has: {', '.join(unknown)}")
    for item in items:
        test = (item.path.stem, getattr(item, "originalname", None))
        if test in wanted and item.get_closest_marker("slow") is None:
            if cases[test] % 3:
                item.add_marker(pytest.mark.slow)
            cases[test] += 1
        if f"{item.path.stem}::{item.name}" in without:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def captures_are_kept(request):
    if request.module.__name__.rpartition(".")[2].startswith(CAPTURING):
        yield
        return
    from tests import captures  # here: it imports torch, which some tests see imported late

    with pytest.MonkeyPatch.context() as monkeypatch:
        captures.keep(monkeypatch)
        yield
