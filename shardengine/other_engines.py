"""Names that other engines have and this one lacks, each with what to call here. Owns: the sentences, and the errors.

Must not know: the engine, its optimizer (they are passed in); names that exist here (a test compares).

The lists follow the public names of DeepSpeed's engine and optimizers, torch's DistributedDataParallel, both FSDPs and
ZeroRedundancyOptimizer, fairscale, and the methods of accelerate's Accelerator that scripts call beside a model. In a
sentence every text in backticks exists: a call, an attribute, a key of the config.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any


def _each(names: str, sentence: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), sentence)


def _read_from(**paths: str) -> dict[str, str]:
    """Return sentences for names of settings. paths: place in the config → such names, separated by spaces."""
    return {
        name: f"read `engine.config.{path.replace('__', '.')}`"
        for path, names in paths.items()
        for name in names.split()
    }


_WHOLE = "parameters are whole inside of `with engine.full_params():`, and are freed again after it"
_OWN_FILES = "call `engine.save_checkpoint(dir)` on every rank, which has weights, optimizer and scheduler"
_STATES = (
    "call `engine.optimizer.state_dict()` on every rank, read whole states inside of "
    "`with engine.full_optimizer_state() as states:`, or call `engine.save_checkpoint(dir)` to keep them"
)
_LOADS = "call `engine.load_checkpoint(dir)`, which takes states of any number of ranks and stage"
_STATE_DICT = "call `engine.state_dict()` on every rank: rank 0 gets the whole state dict, the others an empty one"
_REDUCED = "gradients are reduced in `engine.backward(loss)`, and in `loss.backward()`"
_JOIN = "use `with engine.join():` around the loop where ranks have unequal numbers of batches"
_NO_SYNC = "use `with engine.no_sync():` for micro-batches that do not communicate"
_DIVISOR = (
    "sums over ranks are divided once, by their number, or by what `engine.set_gradient_divide_factor(factor)` or "
    "`gradient_divide_factor` in the config says"
)
_SCALE = "read `engine.get_loss_scale()`"
_LEFT_OUT = "ask `engine.was_step_applied()` after the step; `engine.skipped_steps` counts those that were skipped"
_BUFFERS = "buffers are broadcast before the first micro-batch of a step: `broadcast_buffers` in the config"
_FREED = "`engine.offload_states()` moves what rests on the device to host memory and frees transient buffers"
_OWN_COUNT = "`engine.set_train_batch_size(samples)` changes it; `engine.step(flush=True)` ends a window early"
_LOOP = "a training loop calls `engine(...)`, `engine.backward(loss)` and `engine.step()` itself"
_RANK = "read `engine.rank`"
_RANKS = "read `engine.world_size`"
_PREFETCH = "the order of the last pass is followed as far as `zero_optimization.stage3_prefetch_bucket_size` allows"
_GROUPS = "collectives run over all ranks, `engine.world_size` of them"
_NOT_HERE = "shardengine shards training state and leaves this to other libraries"
_ONE_AXIS = "all ranks are data-parallel here, there are no tensor, sequence, expert or pipeline groups"
_UNWRAPPED = "the model that was given to initialize is `engine.module`"
_MAIN = "compare `engine.rank` with 0"
_ANNOUNCED = "every call of the engine that is collective keeps the ranks in step; torch.distributed has the rest"
_ITS_OWN = "this is how another engine works inside; nothing has to be called here"
_DATA = "the engine makes no data loader; give each rank its own part with a torch DistributedSampler"
_UNUSED = (
    "unused parameters are supported at every stage without being announced, also such as change from step to step; "
    "with `static_graph` in the config they may not change"
)
_ALWAYS = "nothing has to be said about it; the config says what there is to choose"
_NO_KEY = "that key has no effect here; `shardengine config FILE --resolved` prints the values in effect"
_WRITTEN = (
    "call `engine.load_state_dict(state_dict)` on every rank, or `engine.load_checkpoint(dir, weights_only=True)` for "
    "a checkpoint"
)
_DEVICES = "read `engine.device`; the launcher's LOCAL_RANK says which one of its machine a rank has"

ENGINE: Mapping[str, str] = {
    # Saving and loading
    **_each(
        "save_16bit_model save_fp16_model save_model consolidate_shard_weights",
        "call `engine.save_pretrained(dir)` on every rank: rank 0 writes the whole model as safetensors",
    ),
    **_each("module_state_dict get_state_dict", _STATE_DICT),
    **_each("state_dict_type set_state_dict_type get_state_dict_type", _STATE_DICT + "; there is one type"),
    **_each("load_module_state_dict", _WRITTEN),
    **_each("local_state_dict sharded_state_dict local_metadata_dict save_state", _OWN_FILES),
    **_each("load_local_state_dict load_sharded_state_dict load_state load_universal_checkpoint", _LOADS),
    **_each(
        "full_optim_state_dict optim_state_dict sharded_optim_state_dict gather_full_optim_state_dict "
        "flatten_sharded_optim_state_dict rekey_optim_state_dict",
        _STATES,
    ),
    **_each(
        "scatter_full_optim_state_dict shard_full_optim_state_dict optim_state_dict_to_load "
        "get_shard_from_optim_state_dict",
        _LOADS,
    ),
    **_each("checkpoint_engine save_zero_checkpoint save_non_zero_checkpoint", _OWN_FILES),
    # Whole and sharded parameters
    **_each("summon_full_params gather_params unshard", _WHOLE),
    "reshard": "a unit is freed after its use; " + _WHOLE,
    **_each(
        "set_reshard_after_forward reshard_after_forward",
        "`zero_optimization.stage3_reshard_after_forward` in the config says it, for the whole model",
    ),
    **_each(
        "set_reshard_after_backward set_unshard_in_backward",
        "the stage says where weights rest after backward: `zero_optimization.stage` in the config",
    ),
    **_each("set_modules_to_forward_prefetch set_modules_to_backward_prefetch reset_iter_state", _PREFETCH),
    **_each("empty_partition_cache free_memory", _FREED),
    "fsdp_modules": "`zero_optimization.units` in the config names the classes that are gathered as one",
    **_each("check_is_root append_shared_param non_shared_params params_with_grad reset_parameters", _ITS_OWN),
    "refresh_trainable": "freezing and unfreezing is noticed at the next forward; nothing has to be called",
    # Backward and communication
    **_each("allreduce_gradients coalesce_grad_reduction reduce_gradients reduce", _REDUCED),
    **_each(
        "set_requires_gradient_sync set_requires_all_reduce require_backward_grad_sync trigger_sync_in_backward",
        _NO_SYNC,
    ),
    **_each(
        "set_is_last_backward sync_gradients accumulate",
        "`gradient_accumulation_steps` in the config says which micro-batch ends a step, or "
        "`engine.set_gradient_accumulation_boundary(b)` before its backward",
    ),
    **_each(
        "set_reduce_scatter_divide_factor set_gradient_divide_factors "
        "gradient_predivide_factor postscale_gradients gradient_average set_force_sum_reduction_for_comms",
        _DIVISOR,
    ),
    **_each(
        "set_all_reduce_hook set_custom_all_gather set_custom_reduce_scatter",
        "`engine.register_comm_hook(state, hook)`, or `comm_hook` in the config, says how gradients travel",
    ),
    **_each("join_hook join_device join_process_group join_uneven_inputs", _JOIN),
    **_each(
        "set_allocate_memory_from_process_group_for_comm set_post_optim_event set_reduce_scatter_max_input_buffers "
        "set_reduce_scatter_unused_params set_separate_reduce_scatter_group set_symm_mem_for_comm",
        _ITS_OWN,
    ),
    **_each(
        "find_unused_parameters static_graph",
        _UNUSED,
    ),
    **_each("process_group process_group_reduce_scatter data_parallel_group", _GROUPS),
    **_each("sync_buffers will_sync_module_buffers", _BUFFERS),
    **_each("mixed_precision compute_dtype", "`bf16`, `fp16` or `torch_autocast` in the config says the precision"),
    "compute_device": "read `engine.device`",
    **_each("register_for_checkpointing", "pass what else to keep as `engine.save_checkpoint(dir, client_state=...)`"),
    "bucket_bytes_cap": "`zero_optimization.reduce_bucket_size` in the config says it, in elements",
    **_each(
        "scale_wrt_gas",
        "`engine.backward(loss)` multiplies the loss with the scale and divides it by the accumulation steps",
    ),
    **_each(
        "zero_grad_hooks zero_allgather_sequential swap_tensor_config graph_harvesting cpuadam_cores_perc "
        "allreduce_bucket allreduce_and_copy allreduce_no_retain buffered_allreduce_fallback all_gather_scalar "
        "enable_backward_allreduce inside_no_sync_ctxt gas_boundary_ctr",
        _ITS_OWN,
    ),
    # The step
    "clip_fp32_gradients": "call `engine.clip_grad_norm_(max_norm)` before the step, or set `gradient_clipping`",
    "clip_grad_value_": "call torch.nn.utils.clip_grad_value_(engine.parameters(), value) before `engine.step()`, or "
    "set `gradient_clipping_value`",
    **_each("unscale_gradients unscale_", "`engine.step()` takes the loss scale off the gradients by itself"),
    **_each("loss_scale cur_scale loss_scaler scaler", _SCALE),
    **_each("optimizer_step_was_skipped overflow", _LEFT_OUT),
    **_each(
        "set_lr get_mom get_type",
        "the options of the optimizer are in `engine.optimizer.param_groups`, for reading and writing",
    ),
    **_each("basic_optimizer client_optimizer", "the optimizer that steps the shards is `engine.optimizer`"),
    "client_lr_scheduler": "the scheduler is `engine.lr_scheduler`",
    # Numbers and ranks
    **_each("global_rank get_data_parallel_rank process_index", _RANK),
    **_each("local_rank local_process_index device_ids output_device", _DEVICES),
    **_each("dp_world_size num_processes seq_dp_world_size", _RANKS),
    **_each("managed_gradient_accumulation set_gradient_accumulation_steps", _OWN_COUNT),
    "get_batch_info": "call `engine.train_batch_size()`, `engine.train_micro_batch_size_per_gpu()` and "
    "`engine.gradient_accumulation_steps()`",
    **_each(
        "is_main_process is_local_main_process is_last_process main_process_first local_main_process_first "
        "on_main_process print",
        _MAIN,
    ),
    **_each("wait_for_everyone gather gather_for_metrics pad_across_processes scatter", _ANNOUNCED),
    # Life
    **_each("destroy end_training", "call `engine.close()` on every rank: the module is an ordinary one afterwards"),
    **_each("unwrap_model unwrap", _UNWRAPPED),
    **_each("prepare prepare_model", "the engine is ready to train; " + _UNWRAPPED),
    **_each(
        "deepspeed_io training_dataloader training_data collate_fn prepare_data_loader",
        _DATA,
    ),
    **_each("train_batch eval_batch set_dataloader set_dataiterator set_batch_fn", _LOOP),
    **_each(
        "monitor summary_events get_tracker init_trackers log",
        "the config's csv_monitor, tensorboard, wandb, mlflow or comet, or `shardengine.initialize(..., "
        "monitors=[...])` with an object of yours, takes the numbers of every step; `engine.get_global_grad_norm()`, "
        "`engine.get_lr()`, `engine.memory()` and `engine.traffic()` give them, too",
    ),
    **_each("elasticity_enabled is_elastic_model_parallel_supported", _LOADS),
    **_each("autocast amp_enabled", "`torch_autocast` in the config runs every forward in a region of autocast"),
    **_each(
        "memory_breakdown print_forward_breakdown get_wall_clock_timers wall_clock_breakdown timers tput_timer",
        "`engine.memory()` and `engine.traffic()` account for bytes, `with engine.trace(path):` for time",
    ),
    "dump_state": "`engine.config.resolved()` lists every value in effect",
    **_each(
        "is_compiled get_compile_time register_compile_pass is_deepcompile_enabled is_deepcompile_active",
        "compile the model, or its blocks, with torch.compile",
    ),
    # Settings
    **_read_from(
        gradient_clipping="gradient_clipping",
        communication_data_type="communication_data_type",
        steps_per_print="steps_per_print",
        broadcast_buffers="broadcast_buffers",
        overlap_comm="zero_overlap_comm",
        fp16="dynamic_loss_scale_args",
        fp16__enabled="fp16_enabled",
        fp16__auto_cast="fp16_auto_cast",
        fp16__loss_scale="dynamic_loss_scale",
        fp16__initial_scale_power="initial_dynamic_scale",
        bf16__enabled="bfloat16_enabled",
        bf16__master_weights="bf16_master_weights_and_gradients",
        data_types="get_data_types",
        torch_autocast__enabled="torch_autocast_enabled",
        torch_autocast__dtype="torch_autocast_dtype",
        optimizer="optimizer_name optimizer_params",
        scheduler="scheduler_name scheduler_params",
        aio="aio_config",
        zero_optimization="zero_optimization",
        zero_optimization__stage="zero_optimization_partition_gradients zero_optimization_partition_weights",
        zero_optimization__reduce_bucket_size="zero_reduce_bucket_size",
        zero_optimization__stage3_prefetch_bucket_size="zero_prefetch_bucket_size",
        zero_optimization__offload_optimizer="zero_offload_optimizer zero_cpu_offload zero_use_cpu_optimizer "
        "zero_nvme_offload_optimizer cpu_offload",
        zero_optimization__offload_optimizer__ratio="zero_partial_offload",
        zero_optimization__offload_param="zero_offload_param",
    ),
    **_each(
        "zero_allgather_bucket_size zero_allgather_partitions zero_contiguous_gradients "
        "zero_elastic_checkpoint zero_force_ds_cpu_optimizer zero_gather_16bit_weights_on_model_save "
        "zero_ignore_unused_parameters zero_legacy_stage1 zero_load_from_fp32_weights zero_log_trace_cache_warnings "
        "zero_max_live_parameters zero_max_reuse_distance zero_model_persistence_threshold "
        "zero_module_granularity_threshold zero_multi_rank_bucket_allreduce zero_param_persistence_threshold "
        "zero_reduce_scatter zero_round_robin_gradients zero_sub_group_size dataloader_drop_last "
        "optimizer_legacy_fusion use_node_local_storage checkpoint_tag_validation_enabled",
        _NO_KEY,
    ),
    # Features that are not here
    **_each(
        "is_first_stage is_last_stage get_pipeline_parallel_rank get_model_parallel_rank get_tensor_parallel_rank "
        "get_sequence_parallel_group mp_world_size mpu sequence_parallel_size seq_parallel_group "
        "expert_parallel_group expert_data_parallel_group autotp_size tensor_parallel_config load_moe_state_dict",
        _ONE_AXIS,
    ),
    **_each(
        "flops_profiler_enabled flops_profiler eigenvalue_enabled curriculum_enabled_legacy "
        "curriculum_learning_enabled "
        "set_custom_curriculum_learning_schedule data_efficiency_enabled random_ltd_enabled pld_enabled get_pld_theta "
        "quantize_training compression_scheduler autotuning_enabled "
        "set_data_post_process_func curriculum_learning_config curriculum_params_legacy data_efficiency_config "
        "data_sampling_config data_sampling_enabled eigenvalue block_eigenvalue pld_params pld_theta pld_gamma "
        "progressive_layer_drop random_ltd_config random_ltd_initialize quantizer flops_profiler_profile_step "
        "autotuning_metric autotuning_profile_model_info is_sanity_checks_enabled zenflow_config super_offload",
        _NOT_HERE,
    ),
    "sparse_gradients_enabled": "`engine.config.sparse_gradients`",
    **_each(
        "sparse_allreduce sparse_all_gather sparse_allreduce_bucket",
        "the engine reduces gradients itself, those of embeddings by rows where `sparse_gradients` says so",
    ),
    "zeropp_loco_param": _NOT_HERE,
    "zero_quantized_weights": "`engine.config.zero_optimization.zero_quantized_weights`",
    "zero_quantized_gradients": "`engine.config.zero_optimization.zero_quantized_gradients`",
    "zero_hpz_partition_size": "`engine.config.zero_optimization.zero_hpz_partition_size`",
    "mics_shard_size": "`engine.config.zero_optimization.shard_group_size`",
}
"""Name on the engine → what to do, as the end of a sentence."""

_MASTERS = (
    "this rank's part of master weights and states lies in buckets; whole ones are read inside of "
    '`with engine.full_optimizer_state() as states:`, under "weight"'
)
_GRADIENTS = "read whole gradients inside of `with engine.full_grads() as gradients:`"

OPTIMIZER: Mapping[str, str] = {
    **_each("cur_scale loss_scaler scaler dynamic_loss_scale get_scale external_loss_scale", _SCALE),
    **_each("override_loss_scale", "`fp16.loss_scale` in the config makes the scale a fixed one"),
    **_each("overflow step_was_skipped check_overflow has_overflow local_overflow found_inf", _LEFT_OUT),
    **_each("consolidate_state_dict sharded_state_dict gather_full_optim_state_dict", _STATES),
    **_each("load_hp_checkpoint_state load_state_dict_from_checkpoint", _LOADS),
    **_each(
        "fp32_partitioned_groups_flat single_partition_of_fp32_groups fp32_groups_flat_partition fp32_groups_flat "
        "fp32_groups get_full_hp_param get_local_fp32_param master_params fp32_from_fp16 params_in_partition",
        _MASTERS,
    ),
    **_each(
        "set_full_hp_param set_local_hp_param refresh_fp32_params",
        "write inside of `with engine.full_optimizer_state(writable=True) as states:`, or to the weights inside of "
        "`with engine.full_params(writable=True):`",
    ),
    **_each(
        "averaged_gradients get_fp32_grad_for_param get_param_gradient_attribute fp32_groups_gradients "
        "get_local_fp32_grad_for_param",
        _GRADIENTS,
    ),
    **_each("set_fp32_grad_for_param", "write inside of `with engine.full_grads(writable=True) as gradients:`"),
    **_each(
        "fp16_groups fp16_groups_flat bit16_groups bit16_groups_flat fp16_partitioned_groups bf16_groups "
        "parallel_partitioned_bit16_groups fp16_partitioned_groups_flat",
        _WHOLE,
    ),
    **_each(
        "clip_grad_norm clip_grad_norm_ clip_grad clip_master_grads unscale_and_clip_grads",
        "call `engine.clip_grad_norm_(max_norm)` before the step, or set `gradient_clipping` in the config",
    ),
    **_each("get_global_norm scaled_global_norm get_grad_norm_direct", "read `engine.get_global_grad_norm()`"),
    **_each("backward", "call `engine.backward(loss)`"),
    **_each("get_lr set_lr", "the learning rates are in `engine.optimizer.param_groups`; `engine.get_lr()` lists them"),
    **_each(
        "reduce_gradients allreduce_gradients overlapping_partition_gradients_reduce_epilogue backward_epilogue "
        "backward_prologue independent_gradient_partition_epilogue",
        _REDUCED,
    ),
    **_each("is_gradient_accumulation_boundary", "call `engine.is_gradient_accumulation_boundary()`"),
    **_each("set_gradient_accumulation_boundary", "call `engine.set_gradient_accumulation_boundary(b)`"),
    **_each("gradient_accumulation_steps", "call `engine.gradient_accumulation_steps()`"),
    **_each("offload_states", "call `engine.offload_states()`"),
    **_each("reload_states", "call `engine.reload_states()`"),
    **_each("empty_partition_cache", _FREED),
    **_each("destroy", "it ends with `engine.close()`"),
    **_each(
        "optimizer optim", "no other optimizer is inside; the one that was given to initialize steps through this one"
    ),
    **_each("partition_parameters refresh_trainable initialize_optimizer_states", _ITS_OWN),
    **_each("join_hook join_device join_process_group", ENGINE["join_hook"]),
    **_each("rank global_rank", _RANK),
    **_each("world_size", _RANKS),
}
"""Name on ``engine.optimizer`` → what to do."""

_CONFIGURED = "there are no arguments of the command line to add: pass a dict or the path of a JSON file as config"
_INITIALIZE = "call `shardengine.initialize(model, config)`, whose config says what is sharded"
PACKAGE: Mapping[str, str] = {
    "zero": "weights need no zero.Init: load the model as usual, `shardengine.initialize(model, config)` shards it "
    "one flat buffer at a time; for zero.GatheredParameters use `with engine.full_params():`",
    **_each(
        "init_distributed initialize_mesh_device",
        "`shardengine.initialize(model, config)` joins the ranks from the variables of the launcher, and "
        "`shardengine.launch(fn, ranks)` starts them",
    ),
    **_each("add_config_arguments add_tuning_arguments", _CONFIGURED),
    **_each("DeepSpeedEngine PipelineEngine DeepSpeedHybridEngine", "the class is `shardengine.Engine`"),
    **_each(
        "DeepSpeedConfig DeepSpeedConfigError HfDeepSpeedConfig", "`shardengine.load_config(source)` reads a config"
    ),
    **_each(
        "FullyShardedDataParallel FSDP fully_shard FSDPModule DistributedDataParallel DDP ShardedDataParallel wrap "
        "auto_wrap enable_wrap Accelerator prepare OSS ZeroRedundancyOptimizer ShardingStrategy",
        _INITIALIZE,
    ),
    **_each(
        "MixedPrecision MixedPrecisionPolicy", "`bf16`, `fp16` or `torch_autocast` in the config says the precision"
    ),
    **_each(
        "CPUOffload CPUOffloadPolicy", "`zero_optimization.offload_optimizer` in the config says what rests elsewhere"
    ),
    **_each("StateDictType FullStateDictConfig", _STATE_DICT),
    **_each("ShardedGradScaler GradScaler", "`fp16` in the config scales the loss; `engine.get_loss_scale()` tells it"),
    **_each("OnDevice", "load the model as usual: initialize moves it to the device one flat buffer at a time"),
    **_each(
        "checkpoint_wrapper apply_activation_checkpointing", "`activation_checkpointing.enabled` in the config does it"
    ),
    **_each("PipelineModule pipe moe tp_model_init", _ONE_AXIS),
    **_each("init_inference default_inference_config InferenceEngine module_inject ops utils", _NOT_HERE),
    **_each("get_accelerator accelerator", "the device of a rank is `engine.device`"),
}
"""Name on ``shardengine`` itself → what to do."""


ARGUMENTS: Mapping[str, Mapping[str, str]] = {
    "initialize": {
        "args": "pass config=, a dict or the path of a JSON file; nothing is read from a command line",
        "config_params": "the argument is config=",
        **_each("training_data collate_fn", _DATA),
        **_each("find_unused_parameters static_graph", _UNUSED),
        **_each(
            "gradient_as_bucket_view sync_module_states use_orig_params forward_prefetch limit_all_gathers", _ALWAYS
        ),
        **_each("bucket_cap_mb", "`zero_optimization.reduce_bucket_size` in the config says it, in elements"),
        **_each("process_group", _GROUPS),
        "dist_init_required": "a process group is made where there is none",
        "distributed_port": "the launcher's MASTER_PORT says it",
        **_each("mpu mesh_param mesh_device", _ONE_AXIS),
        **_each("scheduler lr_schedulers", "the argument is lr_scheduler="),
        **_each("optimizers", "the argument is optimizer="),
        **_each(
            "lr learning_rate betas eps weight_decay",
            "make a torch optimizer and pass it as optimizer=, or set `optimizer` in the config",
        ),
        **_each("params parameters", "the argument is model_parameters=, beside `optimizer` in the config"),
        **_each("sharding_strategy stage zero_stage", "`zero_optimization.stage` in the config says it"),
        **_each("cpu_offload offload_policy", "`zero_optimization.offload_optimizer` in the config says it"),
        **_each("auto_wrap_policy", "`zero_optimization.units` in the config names the classes gathered as one"),
        **_each(
            "mp_policy mixed_precision compute_dtype",
            "`bf16`, `fp16` or `torch_autocast` in the config says the precision",
        ),
        **_each(
            "device device_id device_ids output_device", "each rank takes its own; the launcher's LOCAL_RANK says which"
        ),
    },
    "backward": {
        "scale_wrt_gas": "`engine.backward(loss, divide=False)` takes a loss that is divided already",
    },
    "step": {"lr_kwargs": "learning rates are set in `engine.optimizer.param_groups`, or by a scheduler"},
    "save_checkpoint": {
        "save_latest": "the newest checkpoint that is whole is always named so",
        "exclude_frozen_parameters": "call `engine.save_checkpoint(dir, frozen=False)`, which leaves them out",
    },
    "save_pretrained": {
        "exclude_frozen_parameters": "call `engine.save_pretrained(dir, trainable_only=True)`",
        "state_dict": "the engine gathers it",
    },
    "state_dict": {
        "exclude_frozen_parameters": "call `engine.state_dict(trainable_only=True)`",
        **_each("prefix destination keep_vars", "it is a copy on the CPU of rank 0, with the module's own names"),
    },
    "load_checkpoint": {
        "load_module_strict": "call `engine.load_checkpoint(dir, strict=False)` to take what fits",
        **_each(
            "load_module_only load_optimizer_states load_lr_scheduler_states",
            "call `engine.load_checkpoint(dir, weights_only=True)` for the weights alone",
        ),
    },
}
"""``initialize`` or a method of the engine → keyword argument that others have and it lacks → what to do."""


def explain_arguments(error: TypeError) -> None:
    """Raise a TypeError with the remedy, if Python's ``error`` is about an argument of other engines."""
    found = re.match(r"(?:Engine|Checkpointing)\.(\w+)\(\) got an unexpected keyword argument '(\w+)'", str(error))
    if found and found[2] in ARGUMENTS.get(found[1], {}):
        raise TypeError(about_argument(found[1], found[2], ())) from None


def about_argument(call: str, name: str, known: Iterable[str]) -> str:
    """Return the message for an argument ``name`` that ``call`` does not have. known: the arguments that it has."""
    call_of = f"{'shardengine' if call == 'initialize' else 'engine'}.{call}"
    sentence = ARGUMENTS.get(call, {}).get(name)
    if sentence is None:
        near = [f"{each}=" for each in _alike(name, known)]
        sentence = f"it takes {', '.join(known)}{_meant(near)}"
    return f"{call_of} has no argument {name!r}: {sentence}"


def read_from_module(engine: Any, module: Any, name: str) -> Any:
    """Return ``module``'s attribute ``name``, which ``engine`` lacks. Raises AttributeError with what to call instead.

    An AttributeError from inside of a property, the engine's or the module's, is raised unchanged.
    """
    if hasattr(type(engine), name):
        return object.__getattribute__(engine, name)  # a property that raised; it does so again, with its own message
    try:
        return getattr(module, name)
    except AttributeError as error:
        if hasattr(type(module), name) or f"'{name}'" not in str(error):
            raise
    kind = type(module).__name__
    if name in ENGINE:
        raise AttributeError(f"the engine has no {name!r}, and neither has the model {kind}: {ENGINE[name]}")
    ours = _alike(name, (*dir(type(engine)), *vars(engine)))
    theirs = [near for near in _alike(name, dir(module)) if near not in ours]
    near = [f"engine.{each}" for each in ours] + [f"{each!r} of the model" for each in theirs]
    raise AttributeError(f"the engine has no {name!r}, and neither has the model {kind}{_meant(near)}")


def read_from_optimizer(optimizer: Any, name: str) -> Any:
    """Raise AttributeError with the replacement of ``name``, which the engine's ``optimizer`` lacks.

    An AttributeError from inside of a property is raised unchanged.
    """
    if hasattr(type(optimizer), name):
        return object.__getattribute__(optimizer, name)
    if name in OPTIMIZER:
        raise AttributeError(f"engine.optimizer has no {name!r}: {OPTIMIZER[name]}")
    near = [] if name.startswith("_") else _alike(name, (*dir(type(optimizer)), *vars(optimizer)))
    raise AttributeError(f"engine.optimizer has no {name!r}{_meant(near)}")


def missing_in_package(name: str, names: Iterable[str]) -> AttributeError:
    """Return the error for a ``name`` that ``shardengine`` does not have. names: the names that it has."""
    if name in PACKAGE:
        return AttributeError(f"module 'shardengine' has no attribute {name!r}: {PACKAGE[name]}")
    near = [] if name.startswith("_") else [f"shardengine.{each}" for each in _alike(name, names)]
    return AttributeError(f"module 'shardengine' has no attribute {name!r}{_meant(near)}")


def _alike(name: str, names: Iterable[str]) -> list[str]:
    """Return up to two public names that are spelt nearly like ``name``."""
    return difflib.get_close_matches(name, sorted({each for each in names if not each.startswith("_")}), 2, 0.75)


def _meant(near: list[str]) -> str:
    return f"; did you mean {' or '.join(near)}?" if near else ""
