"""Keys that other engines have and this one has not: refused, or without effect, each with its reason.

Owns: the sentences. Must not know: keys that exist here.
"""

from __future__ import annotations

_OTHER_PROJECT = "shardengine shards training state and leaves this to other libraries"
_PIPELINE = "the next bucket is always read, and the last one written, while one is stepped"
REFUSED: dict[str, str] = dict.fromkeys(
    (
        *("elasticity", "autotuning", "flops_profiler", "curriculum_learning", "data_efficiency", "hybrid_engine"),
        *("compression_training", "progressive_layer_drop", "eigenvalue", "sparse_attention", "pipeline"),
    ),
    _OTHER_PROJECT,
) | {
    "amp": "apex mixed precision is not supported",
    "sparse_gradients": "gradients are reduced as dense buckets",
    "zero_optimization.zero_quantized_nontrainable_weights": "frozen weights travel in their own dtype",
}
_ONE_LAYOUT = "gradients always lie in contiguous buckets and every rank owns a slice of each"
_ONE_HOLD = "a unit is gathered just before it is used and freed just after"
_ANY_TOPOLOGY = "every checkpoint loads at any number of ranks and stage"
_NO_PARTITION = "checkpointed activations stay whole on their rank"
NO_EFFECT: dict[str, dict[str, str]] = {
    "": {
        "prescale_gradients": "sums over ranks are fp32 and are divided once, when complete",
        "gradient_predivide_factor": "sums over ranks are fp32 and are divided once, when complete",
        "disable_allgather": "the stage decides what is gathered",
        "dump_state": "`shardengine config FILE --resolved` prints the resolved config",
        "memory_breakdown": "`engine.memory()` reports memory",
        "dataloader_drop_last": "the engine makes no data loader",
        "zero_force_ds_cpu_optimizer": "there is one optimizer arithmetic for all devices",
    },
    "optimizer": {"legacy_fusion": "there is one optimizer arithmetic"},
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
        "cpu_offload_use_pin_memory": "`offload_optimizer.pin_memory` says it",
    },
    "zero_optimization.offload_optimizer": {
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
        "tag_validation": "ranks always compare what they save",
        "use_node_local_storage": "the output directory is the caller's choice",
        "parallel_write": "every rank writes its own shard",
        "load_universal": _ANY_TOPOLOGY,
    },
}
