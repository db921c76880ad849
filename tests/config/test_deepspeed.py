"""DeepSpeed's config: every key name of 0.19 has an answer, and files as people have them load.

``DEEPSPEED`` are the names (396 of them, at every level), by what becomes of them here; a name without an answer of its
own has the one of the section that holds it. The files in ``tests/data/configs`` have the shapes of files that are
written for Hugging Face's Trainer, accelerate, Lightning, Megatron and fine-tuning programs, with values of their own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardengine.config.foreign import ALIASES
from shardengine.config.load import Config, load_config
from shardengine.config.schema import KEYS, SECTIONS
from shardengine.errors import ConfigError
from shardengine.optim import lr_schedules

FILES = sorted((Path(__file__).parents[1] / "data" / "configs").glob("*.json"))
CALLER = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer.params.lr": 1e-4,
    "scheduler.params.warmup_num_steps": 10,
    "scheduler.params.total_num_steps": 100,
}
"""What Hugging Face's Trainer would know from its arguments."""

DEEPSPEED: dict[str, dict[str, str]] = {
    "ACTIVE": {
        "": """
            train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps steps_per_print
            communication_data_type gradient_allreduce_op gradient_clipping managed_gradient_accumulation
            sparse_gradients
        """,
        "optimizer": "type params",
        "scheduler": "type params",
        "fp16": """
            enabled loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis
            min_loss_scale auto_cast
        """,
        "bf16": "enabled check_grad_overflow bf16_master_weights_and_grads",
        "bfloat16": "enabled",
        "torch_autocast": "enabled dtype",
        "data_types": "grad_accum_dtype",
        "zero_optimization": """
            stage reduce_bucket_size overlap_comm prefetch_bucket_size stage3_prefetch_bucket_size
            zero_hpz_partition_size zero_quantized_weights zero_quantized_gradients mics_shard_size
        """,
        "zero_optimization.offload_param": "device nvme_path buffer_count pin_memory",
        "zero_optimization.offload_optimizer": "device nvme_path buffer_count pin_memory ratio",
        "activation_checkpointing": "cpu_checkpointing",
        "aio": "block_size queue_depth intra_op_parallelism",
        "tensorboard": "enabled output_path job_name",
        "csv_monitor": "enabled output_path job_name",
        "wandb": "enabled group team project",
        "comet": """
            enabled samples_log_interval project workspace experiment_name experiment_key online mode
        """,
    },
    "LATER": {
        "torch_autocast": "lower_precision_safe_modules",
    },
    "REFUSED": {
        "": """
            sequence_parallel_size quantize_training
            weight_quantization
        """,
        "fp16": "fp16_master_weights_and_grads",
        "bf16": "bf16_optimizer_states",
        "amp": "enabled opt_level",
        "data_types": "param_dtype buffer_dtype",
        "zero_optimization": "zenflow zero_quantized_nontrainable_weights zeropp_loco_param",
        "zero_optimization.offload_optimizer": "super_offload",
        "zero_optimization.zenflow": """
            topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio
            full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch
        """,
        "zero_optimization.zeropp_loco_param": "err_beta reset_T",
        "compile": "deepcompile",
        "tensor_parallel": "autotp_size",
        "tensor_parallel.tp": "tp_size",
        "expert_parallel": """
            enabled autoep_size expert_tensor_parallel_size validate_folding_routing preset_model
            moe_layer_pattern expert_pattern router_pattern use_grouped_mm disable_triton_grouped_mm
            route_norm route_scale score_apply combine_impl num_expert_groups num_limited_groups score_func
            top_k load_balance_coeff routed_scaling_factor expert_w1 expert_w2 num_experts_attr top_k_attr
            has_shared_experts shared_experts_pattern shared_experts_gate_pattern
        """,
        "hybrid_engine": """
            enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters
            tp_gather_partition_size enable_cuda_graph
        """,
        "pipeline": """
            stages partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned
        """,
        "progressive_layer_drop": "enabled theta gamma",
        "eigenvalue": "enabled verbose max_iter tol stability gas_boundary_resolution layer_name layer_num",
        "sparse_attention": """
            mode block different_layout_per_head num_local_blocks num_global_blocks attention
            horizontal_global_attention num_different_global_patterns num_random_blocks local_window_blocks
            global_block_indices global_block_end_indices num_sliding_window_blocks
        """,
        "elasticity": """
            enabled max_train_batch_size micro_batch_sizes min_gpus max_gpus num_gpus_per_node
            model_parallel_size min_time prefer_larger_batch ignore_non_elastic_batch_info version
        """,
        "autotuning": """
            enabled fast results_dir exps_dir overwrite start_profile_step end_profile_step metric
            metric_path tuner_type tuner_early_stopping tuner_num_trials arg_mappings max_train_batch_size
            min_train_batch_size max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu
            num_tuning_micro_batch_sizes mp_size model_info_path model_info
        """,
        "autotuning.model_info": "profile num_params hidden_size num_layers",
        "curriculum_learning": """
            enabled curriculum_type min_difficulty max_difficulty schedule_type schedule_config
        """,
        "data_efficiency": "enabled seed data_sampling data_routing",
        "data_efficiency.data_sampling": """
            enabled num_epochs num_workers pin_memory curriculum_learning dynamic_batching
        """,
        "data_efficiency.data_sampling.curriculum_learning": "enabled data_cluster_path curriculum_metrics",
        "data_efficiency.data_sampling.dynamic_batching": """
            enabled metrics_path lr_scaling_method min_batch_size max_batch_size sequence_picking_order
            max_tokens verbose
        """,
        "data_efficiency.data_routing": "enabled random_ltd",
        "data_efficiency.data_routing.random_ltd": """
            enabled total_layer_num random_ltd_layer_num random_ltd_layer_id model_mask_name model_type
            micro_batch_size global_batch_size hidden_state_order random_ltd_schedule
            layer_token_lr_schedule
        """,
        "compression_training": """
            weight_quantization activation_quantization sparse_pruning row_pruning head_pruning
            channel_pruning layer_reduction
        """,
        "compression_training.layer_reduction": """
            enabled keep_number_layer module_name_prefix teacher_layer other_module_name
        """,
        "compression_training.weight_quantization": "shared_parameters different_groups",
    },
    "NO_EFFECT": {
        "": """
            dump_state disable_allgather seq_parallel_communication_data_type prescale_gradients
            gradient_predivide_factor graph_harvesting zero_allow_untested_optimizer
            zero_force_ds_cpu_optimizer wall_clock_breakdown memory_breakdown
            use_data_before_expert_parallelism dataloader_drop_last log_level vocabulary_size allgather_size
            datastates_ckpt
        """,
        "optimizer": "legacy_fusion",
        "bf16": "immediate_grad_update",
        "zero_optimization": """
            contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions
            allgather_bucket_size load_from_fp32_weights elastic_checkpoint sub_group_size
            cpu_offload_use_pin_memory param_persistence_threshold stage3_param_persistence_threshold
            model_persistence_threshold stage3_model_persistence_threshold max_live_parameters
            stage3_max_live_parameters max_reuse_distance stage3_max_reuse_distance
            gather_16bit_weights_on_model_save stage3_gather_16bit_weights_on_model_save
            module_granularity_threshold stage3_module_granularity_threshold use_all_reduce_for_fetch_params
            stage3_use_all_reduce_for_fetch_params allgather_sequential stage3_allgather_sequential
            stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1
            round_robin_gradients mics_hierarchical_params_gather memory_efficient_linear
            pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks
            save_muon_momentum_buffer_in_memory leaf_module
        """,
        "zero_optimization.offload_param": "buffer_size max_in_cpu",
        "zero_optimization.offload_optimizer": "pipeline_read pipeline_write fast_init cpuadam_cores_perc",
        "zero_optimization.leaf_module": "classes names name_suffixes",
        "activation_checkpointing": """
            partition_activations number_checkpoints contiguous_memory_optimization
            synchronize_checkpoint_boundary profile
        """,
        "aio": "single_submit overlap_events use_gds",
        "checkpoint": """
            tag_validation load_universal use_node_local_storage parallel_write checkpoint_serialization
            writer
        """,
        "checkpoint.parallel_write": "pipeline_stage",
        "checkpoint.writer": """
            type io_buffer_size io_buffer_double io_multiplier show_statistics data_parallel decoupled
        """,
        "comet": "api_key",
        "comms_logger": "enabled prof_all prof_ops verbose debug",
        "flops_profiler": """
            enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file
        """,
        "timers.throughput": "enabled synchronized",
        "nebula": """
            enabled enable_nebula_load load_path nebula_load_path persistent_storage_path
            persistent_time_interval num_of_version_in_retention
        """,
        "compile": """
            free_activation free_activation_threshold offload_activation offload_activation_pin_memory
            offload_opt_states double_buffer symmetric_memory debug_log offload_parameters
            sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather
            keep_int_input_tensors keep_all_input_tensors passes
        """,
        "tensor_parallel": """
            dtype tp_overlap_comm injection_policy_tuple partition_config preset_model keep_module_on_host
            replace_with_kernel_inject kernel_inject
        """,
        "tensor_parallel.tp": "tp_grain_size mpu tp_group",
        "tensor_parallel.partition_config": """
            tp_size layer_specs embedding_partition_dim lm_head_patterns use_default_specs strict_mode
        """,
    },
    "SECTION": {
        "zero_optimization": "cpu_offload_param cpu_offload",
        "tensor_parallel": "tensor_parallel tp",
    },
}


def names() -> list[tuple[str, str]]:
    """(dotted name, what becomes of it)."""
    return [
        (f"{section}.{name}" if section else name, answer)
        for answer, sections in DEEPSPEED.items()
        for section, words in sections.items()
        for name in words.split()
    ]


def answer_of(name: str) -> str:
    """The status of ``name``, or of the key that holds it and has no keys of its own."""
    parts = name.split(".")
    heads = [(".".join(parts[:count]), parts[count:]) for count in range(len(parts), 0, -1)]
    for head, rest in heads:
        if head in ALIASES:
            return answer_of(".".join([ALIASES[head], *rest]))
    for head, rest in heads:
        if head in KEYS:
            whole = not rest or KEYS[head].status.name in ("REFUSED", "NO_EFFECT")
            return KEYS[head].status.name if whole else "unknown"
        if head in SECTIONS:
            return "unknown" if rest else "SECTION"
    return "unknown"


def nested(name: str, value: Any) -> dict[str, Any]:
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


def test_every_name_has_its_answer() -> None:
    assert len(names()) == len({name for name, _ in names()}) == 396
    assert [(name, answer_of(name)) for name, answer in names() if answer_of(name) != answer] == []
    assert answer_of("zero_optimization.stge") == answer_of("fp16.enabled.deep") == "unknown"


@pytest.mark.parametrize("answer", ["LATER", "REFUSED", "NO_EFFECT"])
def test_what_is_not_supported_is_answered_with_a_reason(answer: str) -> None:
    """A value that no key can have for "off": a notice, or an error that says why and what to do."""
    for name, expected in names():
        if expected != answer:
            continue
        tree = {"train_batch_size": 8, **nested(name, 7)}
        if name.startswith(("optimizer.", "scheduler.")):
            tree["optimizer"] |= {"type": "AdamW"}
        if answer == "NO_EFFECT":
            assert [notice for notice in load_config(tree).notices if " has no effect, because " in notice], name
            continue
        with pytest.raises(ConfigError) as caught:
            load_config(tree)
        said = caught.value.problems[0]
        if answer == "REFUSED":
            assert "cannot be switched on, because " in said and ("; " in said or "," in said), said
        else:
            assert "not available yet" in said or ": expected " in said, said


def test_a_mistyped_name_is_still_an_error_with_the_nearest_one() -> None:
    for name, near in (
        ("zero_optimization.stage3_prefetch_bucket_sise", "zero_optimization.stage3_prefetch_bucket_size"),
        ("zero_optimization.offload_optimizer.devise", "zero_optimization.offload_optimizer.device"),
        ("tensorbord", "tensorboard"),
        ("compile.backnd", "compile.backend"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config({"train_batch_size": 8, **nested(name, {})})
        assert caught.value.problems == [f'{name}: unknown key; the nearest valid key is "{near}"']


def load(path: Path) -> Config:
    config = load_config(path, CALLER)
    if config.scheduler is not None:
        lr_schedules.check(config.scheduler)
    return config.resolve_batch(4)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_that_people_have_loads(path: Path) -> None:
    config = load(path)
    tree = json.loads(path.read_text())
    assert config.zero_optimization.stage == tree["zero_optimization"]["stage"]
    automatic = {name for name, value in tree.items() if value == "auto"}
    if "train_micro_batch_size_per_gpu" in automatic:
        assert config.train_micro_batch_size_per_gpu == 4
    for name in automatic - {"train_micro_batch_size_per_gpu"}:
        assert [notice for notice in config.notices if notice.startswith(f'{name} is "auto"')], name
    written = json.dumps(tree)
    for section in ("optimizer", "scheduler"):
        params = tree.get(section, {}).get("params", {})
        for name in [name for name, value in params.items() if value == "auto"]:
            dotted = f"{section}.params.{name}"
            told = [notice for notice in config.notices if notice.startswith(f'{dotted} is "auto"')]
            assert bool(told) != (config.sources.get(dotted) == "auto"), dotted
    assert load_config(config.to_dict()).to_dict() == config.to_dict()
    assert len(set(config.notices)) == len(config.notices) and "_comment" not in str(config.notices), written


def test_the_files_set_what_they_say() -> None:
    by_name = {path.stem: load(path) for path in FILES}
    assert by_name["accelerate_plugin"].steps_per_print == 0
    assert by_name["trainer_zero3_offload"].zero_optimization.offload_param.device == "cpu"
    old = by_name["trainer_zero3_old_names"].zero_optimization
    assert (old.offload_optimizer.device, old.offload_param.device, old.stage3_prefetch_bucket_size) == (
        "cpu",
        "cpu",
        3e7,
    )
    assert by_name["autocast_and_monitors"].torch_autocast.dtype == "bfloat16"
    assert by_name["megatron_zero0_bf16"].nonfinite_gradients == "step"
    nvme = by_name["accelerate_zero3_nvme"]
    assert (nvme.aio.queue_depth, nvme.zero_optimization.offload_param.nvme_path) == (16, "local_nvme")
    optimizer = by_name["trainer_zero3"].optimizer
    assert optimizer is not None and optimizer.params["lr"] == 1e-4


@pytest.mark.parametrize("name", ["trainer_zero2", "trainer_zero3", "llama_factory_zero3"])
def test_without_the_callers_values_the_error_says_which_to_give(name: str) -> None:
    (path,) = (path for path in FILES if path.stem == name)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    wanted = {key for key in CALLER if key.rpartition(".")[2] in path.read_text()}
    for key in wanted:
        assert [problem for problem in caught.value.problems if f'load_config(file, auto={{"{key}": …}})' in problem], (
            key
        )
    assert len(caught.value.problems) == len(wanted)
