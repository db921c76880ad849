"""Keys that other engines have and this one has not: refused, or without effect, each with its reason.

Owns: the sentences. Must not know: keys that exist here.

A row of `REFUSED` is (the values that mean "off", the reason and what to do instead); null, false, {} and an object
whose "enabled" is false are always off. A row of `NO_EFFECT` is the reason alone. A name whose value is an object
stands for everything inside of it.
"""

from __future__ import annotations

from typing import Any

_PIPELINE = "the next bucket is always read, and the last one written, while one is stepped"
_NO_TENSOR_PARALLEL = "tensor parallelism changes the model, and data-parallel ranks each run all of it"
_SPLIT_FIRST = "split the model with a library of your choice and give `initialize` a `mesh` of the data-parallel ranks"
_NOT_QUANTIZED = "weights are trained in fp32, bf16 or fp16; quantize them after training"
_YOUR_LOADER = "which samples a step sees is the data loader's business; choose them there"
REFUSED: dict[str, dict[str, tuple[tuple[Any, ...], str]]] = {
    "": {
        "amp": ((), "apex is not used; take `torch_autocast`, `bf16` or `fp16`"),
        "autotuning": ((), "nothing is searched for by trial runs; write the batch size and the stage that fit"),
        "compression_training": ((), _NOT_QUANTIZED),
        "curriculum_learning": ((), _YOUR_LOADER),
        "data_efficiency": ((), _YOUR_LOADER),
        "eigenvalue": ((), "it steers quantized training; leave it out"),
        "elasticity": (
            (),
            "the number of ranks does not choose the batch size; write `train_batch_size`, which stays the same on any "
            "number of ranks that divides it",
        ),
        "expert_parallel": (
            (),
            "every rank holds all experts of the model; stages 1 to 3 shard them like other weights",
        ),
        "hybrid_engine": (
            (),
            "there is no second engine for inference; call `engine.generate`, or `engine.full_params()` around it",
        ),
        "managed_gradient_accumulation": (
            (True,),
            "the engine counts micro-batches; `engine.set_gradient_accumulation_boundary` or `engine.step(flush=True)` "
            "ends a window where you choose",
        ),
        "pipeline": ((), "the model is not cut into pipeline stages; stage 3 trains what one device cannot hold"),
        "progressive_layer_drop": ((), "layers are dropped by the model's own forward; do it there"),
        "quantize_training": ((), _NOT_QUANTIZED),
        "sequence_parallel_size": ((1,), f"sequences are not cut over ranks; {_SPLIT_FIRST}"),
        "sparse_attention": ((), "attention is the model's business; choose it there"),
        "sparse_gradients": ((), "gradients are reduced as dense buckets; leave it out"),
        "weight_quantization": ((), _NOT_QUANTIZED),
    },
    "bf16": {
        "bf16_optimizer_states": ((), "optimizer states are fp32; `offload_optimizer` moves them off the device"),
    },
    "compile": {
        "deepcompile": (
            (),
            "the schedule of gathers is not compiled; call torch.compile on the model or its blocks yourself",
        ),
    },
    "data_types": {
        "buffer_dtype": ((), "buffers keep the dtype that they have; cast them before `initialize`"),
        "param_dtype": ((), "`bf16.enabled` or `fp16.enabled` says to what parameters are cast; use one of them"),
    },
    "fp16": {
        "fp16_master_weights_and_grads": (
            (),
            "small updates are lost in fp16; use the fp32 master weights, or `bf16` with `master_weights` false and "
            "`stochastic_rounding`",
        ),
    },
    "tensor_parallel": {"autotp_size": ((0, 1), f"{_NO_TENSOR_PARALLEL}; {_SPLIT_FIRST}")},
    "tensor_parallel.tp": {"tp_size": ((1,), f"{_NO_TENSOR_PARALLEL}; {_SPLIT_FIRST}")},
    "zero_optimization": {
        "zenflow": (
            (),
            "it steps with gradients of an earlier step, which changes what is learnt; "
            "`offload_optimizer.step_in_backward` hides the step on the CPU without that",
        ),
        "zero_quantized_nontrainable_weights": (
            (),
            "frozen weights travel in their own dtype; cast them before `initialize`",
        ),
        "zeropp_loco_param": ((), "gradients are not quantized, so there is no error to feed back; leave it out"),
    },
    "zero_optimization.offload_optimizer": {
        "super_offload": ((), "the CPU's step is hidden by `step_in_backward`; use that"),
    },
}

_ONE_LAYOUT = "gradients always lie in contiguous buckets and every rank owns a slice of each"
_ONE_HOLD = "a unit is gathered just before it is used and freed just after"
_ANY_TOPOLOGY = "every checkpoint loads at any number of ranks and stage"
_NO_PARTITION = "checkpointed activations stay whole on their rank"
_FAST_FILES = (
    "checkpoints are always written in large direct requests, by every rank; `checkpoint.async_save` overlaps them"
)
_ASYNC_SAVE = "`checkpoint.async_save` writes checkpoints behind training"
_OWN_MONITOR = (
    "the package of that service is not called from here: give `initialize(..., monitors=[...])` an object of yours "
    "with write(step, values) and close()"
)
_TRACE = "`engine.trace(path)` draws where the time of a step goes, and `train` prints it"
_TRAFFIC = "`engine.traffic()` counts the bytes of every collective, and `engine.trace(path)` draws them"
_COMPILE = "nothing is compiled by itself; call torch.compile on the model or its blocks before `initialize`"
_NO_SEQUENCES = "sequences are not cut over ranks"
NO_EFFECT: dict[str, dict[str, str]] = {
    "": {
        "allgather_size": "weights are gathered in the buckets that gradients are reduced in",
        "comms_config": _TRAFFIC,
        "comms_logger": _TRAFFIC,
        "cuda_visible_devices": "the launcher's environment says which devices there are",
        "dataloader_drop_last": "the engine makes no data loader",
        "datastates_ckpt": _ASYNC_SAVE,
        "disable_allgather": "the stage decides what is gathered",
        "disable_python_gc": "Python's garbage collector is left alone",
        "dump_state": "`shardengine config FILE --resolved` prints the resolved config",
        "flops_profiler": "torch.profiler counts operations, and `engine.trace(path)` draws the step",
        "gradient_predivide_factor": "sums over ranks are fp32 and are divided once, when complete",
        "graph_harvesting": "steps are not captured as CUDA graphs",
        "log_level": "messages go through Python's logging, under the name shardengine",
        "memory_breakdown": "`engine.memory()` reports memory",
        "monitor_config": "monitors are sections of their own: `csv_monitor`, `tensorboard`, `monitor.jsonl`",
        "nebula": _ASYNC_SAVE,
        "prescale_gradients": "sums over ranks are fp32 and are divided once, when complete",
        "seq_parallel_communication_data_type": _NO_SEQUENCES,
        "timers": _TRACE,
        "use_data_before_expert_parallelism": "every rank holds all experts of the model",
        "vocabulary_size": "buckets are padded, so no size of the vocabulary is better than another",
        "wall_clock_breakdown": _TRACE,
        "zero_allow_untested_optimizer": "an optimizer is either compared with its reference bit for bit, or refused",
        "zero_force_ds_cpu_optimizer": "there is one optimizer arithmetic for all devices",
    },
    "optimizer": {"legacy_fusion": "there is one optimizer arithmetic"},
    "bf16": {"immediate_grad_update": "a bucket of gradients is reduced as soon as it is complete"},
    "monitor": {"wandb": _OWN_MONITOR, "comet": _OWN_MONITOR},
    "compile": dict.fromkeys(
        (
            *("backend", "debug_log", "disable", "double_buffer", "enabled", "free_activation", "kwargs", "passes"),
            *("free_activation_threshold", "keep_all_input_tensors", "keep_int_input_tensors", "offload_activation"),
            *("offload_activation_pin_memory", "offload_opt_states", "offload_parameters", "symmetric_memory"),
            *("sync_after_allgather", "sync_after_reduce", "sync_before_allgather", "sync_before_reduce"),
        ),
        _COMPILE,
    ),
    "tensor_parallel": dict.fromkeys(
        (
            *("dtype", "injection_policy_tuple", "keep_module_on_host", "partition_config", "preset_model"),
            *("replace_with_kernel_inject", "kernel_inject", "tp_overlap_comm"),
        ),
        _NO_TENSOR_PARALLEL,
    ),
    "tensor_parallel.tp": dict.fromkeys(("tp_grain_size", "mpu", "tp_group"), _NO_TENSOR_PARALLEL),
    "zero_optimization": {
        "elastic_checkpoint": _ANY_TOPOLOGY,
        "allgather_partitions": "the stage decides what is gathered",
        "allgather_bucket_size": "weights are gathered in the buckets that gradients are reduced in",
        "reduce_scatter": "the stage decides how gradients are reduced",
        "contiguous_gradients": _ONE_LAYOUT,
        "round_robin_gradients": _ONE_LAYOUT,
        "use_multi_rank_bucket_allreduce": _ONE_LAYOUT,
        "sub_group_size": "the optimizer steps bucket by bucket",
        "stage3_max_live_parameters": _ONE_HOLD,
        "stage3_max_reuse_distance": _ONE_HOLD,
        "stage3_param_persistence_threshold": "small parameters travel in their unit's bucket",
        "stage3_model_persistence_threshold": "small parameters travel in their unit's bucket",
        "stage3_gather_16bit_weights_on_model_save": "`engine.save_pretrained` always writes whole parameters",
        "stage3_module_granularity_threshold": "`units` says which modules are gathered as one",
        "stage3_use_all_reduce_for_fetch_params": "a gather sends the fewest bytes",
        "ignore_unused_parameters": "unused parameters are supported at every stage",
        "memory_efficient_linear": "weights are views of their bucket, no module is replaced",
        "load_from_fp32_weights": "master weights are always saved and loaded",
        "legacy_stage1": "there is one implementation of all stages",
        "override_module_apply": "no torch function is replaced",
        "log_trace_cache_warnings": "a wrong prefetch costs time only",
        "enable_sanity_checks": "`debug` compares every collective over the ranks",
        "leaf_module": "`units` says which modules are gathered as one",
        "mics_hierarchical_params_gather": "a gather sends the fewest bytes",
        "pipeline_loading_checkpoint": "a checkpoint is read bucket by bucket",
        "save_muon_momentum_buffer_in_memory": "Muon is not available",
        "stage3_allgather_sequential": "a unit's buckets are gathered in order, ahead of their use",
        "cpu_offload_use_pin_memory": "`offload_optimizer.pin_memory` says it",
    },
    "zero_optimization.offload_optimizer": {
        "cpuadam_cores_perc": "the CPU's step takes as many threads as torch has (OMP_NUM_THREADS)",
        "fast_init": "master weights are written to their tier as the model is read",
        "pipeline": _PIPELINE,
        "pipeline_read": _PIPELINE,
        "pipeline_write": _PIPELINE,
    },
    "zero_optimization.offload_param": {
        "buffer_size": "a buffer is as large as the largest bucket's shard",
        "max_in_cpu": "what rests on the disk is in host memory only while it is on its way",
    },
    "activation_checkpointing": {
        "partition_activations": _NO_PARTITION,
        "contiguous_memory_optimization": _NO_PARTITION,
        "number_checkpoints": "every repeated block is a checkpoint",
        "synchronize_checkpoint_boundary": _NO_PARTITION,
        "profile": "torch's profiler shows the recomputation",
    },
    "aio": {
        "single_submit": "requests are submitted by threads",
        "overlap_events": "requests are submitted by threads",
        "use_gds": "requests are submitted by threads",
    },
    "checkpoint": {
        "checkpoint_serialization": "checkpoints are safetensors and JSON, without pickles",
        "writer": _FAST_FILES,
        "tag_validation": "ranks always compare what they save",
        "use_node_local_storage": "the output directory is the caller's choice",
        "parallel_write": "every rank writes its own shard",
        "load_universal": _ANY_TOPOLOGY,
    },
}
