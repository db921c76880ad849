"""The table of keys: frozen lists of what is accepted, and rows that hold together."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import shardengine.config as config_module
from shardengine.config.foreign import ALIASES
from shardengine.config.load import Config, load_config
from shardengine.config.schema import KEYS, Status

BATCH = {"train_micro_batch_size_per_gpu": 2}


def load(**keys: Any) -> Config:
    return load_config({**BATCH, **keys})


FROZEN = {
    "ACTIVE": """
        activation_checkpointing.cpu_offload activation_checkpointing.enabled
        bf16.auto_cast bf16.enabled bf16.master_weights bf16.split_masters bf16.stochastic_rounding broadcast_buffers
        checkpoint.async_save
        checkpoint.keep_last ema.decay
        communication_data_type data_types.grad_accum_dtype data_types.optimizer_state_dtype data_types.reduce_dtype
        debug
        fp16.auto_cast fp16.consecutive_hysteresis fp16.enabled fp16.hysteresis fp16.initial_scale_power fp16.loss_scale
        fp16.loss_scale_delay fp16.loss_scale_window fp16.min_loss_scale
        gradient_accumulation gradient_accumulation_steps gradient_allreduce_op
        gradient_clipping gradient_clipping_norm_type gradient_clipping_value gradient_divide_factor ignored_parameters
        hierarchical_reduce managed_gradient_accumulation max_nonfinite_steps nonfinite_gradients
        optimizer.params optimizer.type overlap_comm overlap_param_gather reproducible
        scheduler.params scheduler.type seed sparse_gradients static_graph
        step_unused_parameters steps_per_print timeout_s torch_autocast.dtype torch_autocast.enabled
        train_batch_size
        train_micro_batch_size_per_gpu
        zero_optimization.recut_buckets zero_optimization.reduce_bucket_size zero_optimization.stage
        zero_optimization.stage3_prefetch_bucket_size zero_optimization.stage3_reshard_after_forward
        zero_optimization.units zero_optimization.shard_group_size zero_optimization.zero_hpz_partition_size
        comm_hook.name comm_hook.params
        zero_optimization.zero_quantized_gradients zero_optimization.zero_quantized_weights
        aio.block_size aio.queue_depth aio.thread_count
        zero_optimization.offload_optimizer.buffer_count zero_optimization.offload_optimizer.device
        zero_optimization.offload_optimizer.device_memory
        zero_optimization.offload_optimizer.nvme_path zero_optimization.offload_optimizer.pin_memory
        zero_optimization.offload_optimizer.ratio zero_optimization.offload_optimizer.step_in_backward
        zero_optimization.offload_param.buffer_count
        zero_optimization.offload_param.device zero_optimization.offload_param.nvme_path
        zero_optimization.offload_param.pin_memory
        monitor.csv.enabled monitor.csv.job_name monitor.csv.output_path monitor.jsonl.enabled
        monitor.jsonl.job_name monitor.jsonl.output_path monitor.tensorboard.enabled
        monitor.tensorboard.job_name monitor.tensorboard.output_path
        monitor.wandb.enabled monitor.wandb.group monitor.wandb.project monitor.wandb.team
        monitor.mlflow.enabled monitor.mlflow.experiment_name monitor.mlflow.run_name monitor.mlflow.tracking_uri
        monitor.comet.enabled monitor.comet.experiment_key monitor.comet.experiment_name monitor.comet.mode
        monitor.comet.online monitor.comet.project monitor.comet.samples_log_interval monitor.comet.workspace
    """,
    "LATER": """
        torch_autocast.lower_precision_safe_modules
    """,
    "REFUSED": """
        amp autotuning compression_training curriculum_learning data_efficiency eigenvalue elasticity
        hybrid_engine pipeline progressive_layer_drop sparse_attention
        zero_optimization.zero_quantized_nontrainable_weights
        bf16.bf16_optimizer_states compile.deepcompile data_types.buffer_dtype data_types.param_dtype
        expert_parallel fp16.fp16_master_weights_and_grads quantize_training
        sequence_parallel_size tensor_parallel.autotp_size tensor_parallel.tp.tp_size weight_quantization
        zero_optimization.offload_optimizer.super_offload zero_optimization.zenflow
        zero_optimization.zeropp_loco_param
    """,
    "NO_EFFECT": """
        zero_optimization.offload_optimizer.fast_init zero_optimization.offload_optimizer.pipeline
        zero_optimization.offload_optimizer.pipeline_read zero_optimization.offload_optimizer.pipeline_write
        zero_optimization.offload_param.buffer_size zero_optimization.offload_param.max_in_cpu
        activation_checkpointing.contiguous_memory_optimization activation_checkpointing.number_checkpoints
        activation_checkpointing.partition_activations activation_checkpointing.profile
        activation_checkpointing.synchronize_checkpoint_boundary aio.overlap_events aio.single_submit
        aio.use_gds checkpoint.load_universal checkpoint.parallel_write checkpoint.tag_validation
        checkpoint.use_node_local_storage dataloader_drop_last disable_allgather dump_state
        gradient_predivide_factor memory_breakdown optimizer.legacy_fusion prescale_gradients
        zero_force_ds_cpu_optimizer zero_optimization.allgather_bucket_size
        zero_optimization.allgather_partitions zero_optimization.contiguous_gradients
        zero_optimization.cpu_offload_use_pin_memory
        zero_optimization.elastic_checkpoint zero_optimization.ignore_unused_parameters zero_optimization.legacy_stage1
        zero_optimization.load_from_fp32_weights zero_optimization.log_trace_cache_warnings
        zero_optimization.memory_efficient_linear zero_optimization.override_module_apply
        zero_optimization.reduce_scatter zero_optimization.round_robin_gradients
        zero_optimization.stage3_gather_16bit_weights_on_model_save zero_optimization.stage3_max_live_parameters
        zero_optimization.stage3_max_reuse_distance zero_optimization.stage3_model_persistence_threshold
        zero_optimization.stage3_module_granularity_threshold
        zero_optimization.stage3_param_persistence_threshold
        zero_optimization.stage3_use_all_reduce_for_fetch_params zero_optimization.sub_group_size
        zero_optimization.use_multi_rank_bucket_allreduce
        allgather_size bf16.immediate_grad_update checkpoint.checkpoint_serialization checkpoint.writer
        comms_config comms_logger compile.backend compile.debug_log compile.disable compile.double_buffer
        compile.enabled compile.free_activation compile.free_activation_threshold
        compile.keep_all_input_tensors compile.keep_int_input_tensors compile.kwargs
        compile.offload_activation compile.offload_activation_pin_memory compile.offload_opt_states
        compile.offload_parameters compile.passes compile.symmetric_memory compile.sync_after_allgather
        compile.sync_after_reduce compile.sync_before_allgather compile.sync_before_reduce
        cuda_visible_devices datastates_ckpt disable_python_gc flops_profiler graph_harvesting log_level
        monitor.comet.api_key monitor_config nebula seq_parallel_communication_data_type
        tensor_parallel.dtype tensor_parallel.injection_policy_tuple tensor_parallel.keep_module_on_host
        tensor_parallel.kernel_inject tensor_parallel.partition_config tensor_parallel.preset_model
        tensor_parallel.replace_with_kernel_inject tensor_parallel.tp.mpu tensor_parallel.tp.tp_grain_size
        tensor_parallel.tp.tp_group tensor_parallel.tp_overlap_comm timers use_data_before_expert_parallelism
        vocabulary_size wall_clock_breakdown zero_allow_untested_optimizer
        zero_optimization.enable_sanity_checks zero_optimization.leaf_module
        zero_optimization.mics_hierarchical_params_gather
        zero_optimization.offload_optimizer.cpuadam_cores_perc zero_optimization.pipeline_loading_checkpoint
        zero_optimization.save_muon_momentum_buffer_in_memory zero_optimization.stage3_allgather_sequential
    """,
}

FROZEN_ALIASES = """
activation_checkpointing.cpu_checkpointing: activation_checkpointing.cpu_offload
aio.intra_op_parallelism: aio.thread_count
bf16.bf16_master_weights_and_grads: bf16.master_weights
bf16.check_grad_overflow: nonfinite_gradients
bfloat16: bf16
comet: monitor.comet
csv_monitor: monitor.csv
mlflow: monitor.mlflow
tensor_parallel.tensor_parallel: tensor_parallel.tp
tensorboard: monitor.tensorboard
wandb: monitor.wandb
zero_optimization.allgather_sequential: zero_optimization.stage3_allgather_sequential
zero_optimization.cpu_offload: zero_optimization.offload_optimizer
zero_optimization.cpu_offload_param: zero_optimization.offload_param
zero_optimization.cpu_offload_params: zero_optimization.offload_param
zero_optimization.gather_16bit_weights_on_model_save: zero_optimization.stage3_gather_16bit_weights_on_model_save
zero_optimization.gather_fp16_weights_on_model_save: zero_optimization.stage3_gather_16bit_weights_on_model_save
zero_optimization.max_live_parameters: zero_optimization.stage3_max_live_parameters
zero_optimization.max_reuse_distance: zero_optimization.stage3_max_reuse_distance
zero_optimization.mics_shard_size: zero_optimization.shard_group_size
zero_optimization.model_persistence_threshold: zero_optimization.stage3_model_persistence_threshold
zero_optimization.module_granularity_threshold: zero_optimization.stage3_module_granularity_threshold
zero_optimization.overlap_comm: overlap_comm
zero_optimization.param_persistence_threshold: zero_optimization.stage3_param_persistence_threshold
zero_optimization.prefetch_bucket_size: zero_optimization.stage3_prefetch_bucket_size
zero_optimization.stage3_gather_fp16_weights_on_model_save: zero_optimization.stage3_gather_16bit_weights_on_model_save
zero_optimization.use_all_reduce_for_fetch_params: zero_optimization.stage3_use_all_reduce_for_fetch_params
"""


def test_the_accepted_keys_are_frozen() -> None:
    """Adding a key is a reviewed change: extend FROZEN together with shardengine/config/schema.py."""
    accepted = {status.name: sorted(key.name for key in KEYS.values() if key.status is status) for status in Status}
    for status, names in FROZEN.items():
        new, gone = set(accepted[status]) - set(names.split()), set(names.split()) - set(accepted[status])
        assert not new and not gone, f"{status}: FROZEN lacks {sorted(new)}, and the schema {sorted(gone)}"
    assert accepted == {status: sorted(names.split()) for status, names in FROZEN.items()}


def test_the_old_names_are_frozen() -> None:
    accepted = sorted(f"{old}: {new}" for old, new in ALIASES.items())
    assert accepted == FROZEN_ALIASES.strip().splitlines()


def test_old_names_lead_to_known_keys() -> None:
    for old, new in ALIASES.items():
        assert old not in KEYS
        assert new in KEYS or any(name.startswith(new + ".") for name in KEYS)


def test_every_key_without_meaning_is_accepted_with_a_reason() -> None:
    for key in KEYS.values():
        if key.status is Status.NO_EFFECT:
            section, _, leaf = key.name.rpartition(".")
            written = {leaf: 1}
            if section == "optimizer":
                written |= {"type": "AdamW"}  # type: ignore[dict-item]
            config = load(**({section: written} if section else written))
            assert f"{key.name} has no effect, because {key.note}" in config.notices
            assert len(key.note) > 10


@pytest.mark.parametrize("name", [path.stem for path in Path(str(config_module.__file__)).parent.glob("*.py")])
def test_the_config_imports_no_torch(name: str) -> None:
    path = Path(str(config_module.__file__)).with_name(f"{name}.py")
    imported = {
        module.partition(".")[0]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for module in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
    }
    standard = {
        "__future__",
        "ast",
        "collections",
        "dataclasses",
        "difflib",
        "contextlib",
        "enum",
        "re",
        "json",
        "math",
        "pathlib",
        "typing",
    }
    assert imported <= standard | {"shardengine"}
