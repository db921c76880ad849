"""Keys of other engines' files: keys that this engine lacks, each with the reason, and other names of keys that it has.

Owns: the sentences, old names, the values that Hugging Face's Trainer fills in. Must not know: the values of our keys.

A row of `REFUSED` is (the values that mean "off", the reason and what to do instead); null, false, {} and an object
whose "enabled" is false are always off. A row of `NO_EFFECT` is the reason alone. A name whose value is an object
stands for everything inside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
        "pipeline": (
            (),
            "the model is not cut into pipeline stages; stage 3 trains models that one device cannot hold",
        ),
        "progressive_layer_drop": ((), "layers are dropped by the model's own forward; do it there"),
        "quantize_training": ((), _NOT_QUANTIZED),
        "sequence_parallel_size": ((1,), f"sequences are not cut over ranks; {_SPLIT_FIRST}"),
        "sparse_attention": ((), "attention is the model's business; choose it there"),
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
            "it steps with gradients of an earlier step, which changes the training; "
            "`offload_optimizer.step_in_backward` hides the step on the CPU without that",
        ),
        "zero_quantized_nontrainable_weights": (
            (),
            "frozen weights travel in their own dtype; cast them before `initialize`",
        ),
        "zeropp_loco_param": ((), "error_feedback of comm_hook does that; leave it out, or name that"),
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
_TRACE = "`engine.trace(path)` draws where the time of a step goes, and `train` prints it"
_TRAFFIC = "`engine.traffic()` counts the bytes of every collective, and `engine.trace(path)` draws them"
_COMPILE = "nothing is compiled by itself; call torch.compile on the model or its blocks before `initialize`"
_DIVIDED_ONCE = (
    "it splits the division into a part before the sum and one after it; here sums over ranks are divided once, when "
    "complete; "
    "`gradient_divide_factor` says by what"
)
_NO_SEQUENCES = "sequences are not cut over ranks"
NO_EFFECT: dict[str, dict[str, str]] = {
    "": {
        "allgather_size": "weights are gathered in the buckets that gradients are reduced in",
        "comms_config": _TRAFFIC,
        "comms_logger": _TRAFFIC,
        "cuda_visible_devices": "the launcher's environment says which devices there are",
        "dataloader_drop_last": "the engine makes no data loader",
        "datastates_ckpt": _ASYNC_SAVE,
        "disable_allgather": "the stage decides which tensors are gathered",
        "disable_python_gc": "Python's garbage collector is left alone",
        "dump_state": "`shardengine config FILE --resolved` prints the resolved config",
        "flops_profiler": "torch.profiler counts operations, and `engine.trace(path)` draws the step",
        "gradient_predivide_factor": _DIVIDED_ONCE,
        "graph_harvesting": "steps are not captured as CUDA graphs",
        "log_level": "messages go through Python's logging, under the name shardengine",
        "memory_breakdown": "`engine.memory()` reports memory",
        "monitor_config": "monitors are sections of their own: `csv_monitor`, `tensorboard`, `monitor.jsonl`",
        "nebula": _ASYNC_SAVE,
        "prescale_gradients": _DIVIDED_ONCE,
        "seq_parallel_communication_data_type": _NO_SEQUENCES,
        "timers": _TRACE,
        "use_data_before_expert_parallelism": "every rank holds all experts of the model",
        "vocabulary_size": "buckets are padded, so no size of the vocabulary is better than another",
        "wall_clock_breakdown": _TRACE,
        "zero_allow_untested_optimizer": "a class of optimizer is tried on slices first, and admitted or refused",
        "zero_force_ds_cpu_optimizer": "an optimizer has one arithmetic on all devices",
    },
    "optimizer": {"legacy_fusion": "the engine chooses how a step is computed"},
    "bf16": {"immediate_grad_update": "a bucket of gradients is reduced as soon as it is complete"},
    "monitor.comet": {"api_key": "a config is copied and printed: give the key as the environment's COMET_API_KEY"},
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
        "allgather_partitions": "the stage decides which tensors are gathered",
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
        "stage3_gather_16bit_weights_on_model_save": "`engine.save_pretrained` always writes full parameters",
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
        "save_muon_momentum_buffer_in_memory": "Muon's momentum is kept with the other states",
        "stage3_allgather_sequential": "a unit's buckets are gathered in order, ahead of their use",
        "cpu_offload_use_pin_memory": "`offload_optimizer.pin_memory` says it",
    },
    "zero_optimization.offload_optimizer": {
        "cpuadam_cores_perc": "the CPU's step takes as many threads as SHARDENGINE_THREADS says, or as torch has",
        "fast_init": "master weights are written to their tier as the model is read",
        "pipeline": _PIPELINE,
        "pipeline_read": _PIPELINE,
        "pipeline_write": _PIPELINE,
    },
    "zero_optimization.offload_param": {
        "buffer_size": "a buffer is as large as the largest bucket's shard",
        "max_in_cpu": "tensors on the disk are in host memory only while they are moved",
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
        "tag_validation": "ranks always compare the tags that they save",
        "use_node_local_storage": "the output directory is the caller's choice",
        "parallel_write": "every rank writes its own shard",
        "load_universal": _ANY_TOPOLOGY,
    },
}

OPTIMIZER_NO_EFFECT: dict[str, str] = dict.fromkeys(
    ("torch_adam", "foreach", "fused", "capturable", "set_grad_none"),
    "the engine chooses how a step is computed; its results are the same",
)
"""Hyper-parameters that every optimizer accepts and ignores -> the reason."""

_BY_CLASS = ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
"""Optimizers of torch.optim that are stepped by their own class."""

OPTIMIZER_FIXED: dict[str, tuple[bool | float, tuple[str, ...], str]] = {
    "fp32_optimizer_states": (
        True,
        ("AdamW", "Adam", "Lion", "Muon", *_BY_CLASS),
        "`data_types.optimizer_state_dtype` says in what states are kept",
    ),
    "max_grad_norm": (
        0.0,
        ("AdamW", "Adam", "SGD", "Lion", "Muon", "Adafactor", *_BY_CLASS),
        "gradients are clipped by the key gradient_clipping",
    ),
    "bias_correction": (True, ("AdamW", "Adam"), "moments are always bias-corrected"),
    "differentiable": (False, ("AdamW", "Adam", "SGD", *_BY_CLASS), "the step writes in place"),
}
"""Hyper-parameters with one supported value -> (that value, the optimizers that have it, the reason)."""

OPTIMIZERS_REFUSED: dict[str, str] = {
    **dict.fromkeys(("Shampoo", "SOAP"), "it needs the rows and columns of full matrices"),
    **dict.fromkeys(("LAMB", "LARS", "FusedLamb"), "it needs the norm of each full parameter"),
    "LBFGS": "it needs inner products over all parameters",
    "SparseAdam": "it needs sparse gradients, and gradients are dense when they are stepped",
    **dict.fromkeys(("OneBitAdam", "ZeroOneAdam", "OneBitLamb"), "it compresses its own communication"),
}
"""Optimizers that cannot be stepped slice by slice -> the reason."""

_SAVE_16BIT = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
ALIASES: dict[str, str] = {
    **{
        f"zero_optimization.{name}": f"zero_optimization.stage3_{name}"
        for name in (
            "max_live_parameters max_reuse_distance prefetch_bucket_size param_persistence_threshold "
            "model_persistence_threshold module_granularity_threshold use_all_reduce_for_fetch_params "
            "allgather_sequential gather_16bit_weights_on_model_save"
        ).split()
    },
    "zero_optimization.gather_fp16_weights_on_model_save": _SAVE_16BIT,
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": _SAVE_16BIT,
    "zero_optimization.cpu_offload": "zero_optimization.offload_optimizer",
    "zero_optimization.cpu_offload_param": "zero_optimization.offload_param",
    "zero_optimization.cpu_offload_params": "zero_optimization.offload_param",
    "zero_optimization.mics_shard_size": "zero_optimization.shard_group_size",
    "zero_optimization.overlap_comm": "overlap_comm",
    "activation_checkpointing.cpu_checkpointing": "activation_checkpointing.cpu_offload",
    "aio.intra_op_parallelism": "aio.thread_count",
    "bfloat16": "bf16",
    "bf16.check_grad_overflow": "nonfinite_gradients",
    "bf16.bf16_master_weights_and_grads": "bf16.master_weights",
    "tensor_parallel.tensor_parallel": "tensor_parallel.tp",
    "tensorboard": "monitor.tensorboard",
    "comet": "monitor.comet",
    "wandb": "monitor.wandb",
    "csv_monitor": "monitor.csv",
    "mlflow": "monitor.mlflow",
}
"""Old or other dotted name -> current dotted name."""
ALIAS_NEEDS: dict[str, str] = {"bf16.check_grad_overflow": "bf16.enabled"}
"""Such a name -> the key that must be true for it to have an effect."""


def _device(value: Any) -> Any:
    return {"device": "cpu" if value else "none"} if isinstance(value, bool) else value


ALIAS_VALUES: dict[str, Callable[[Any], Any]] = {
    **{f"zero_optimization.cpu_offload{end}": _device for end in ("", "_param", "_params")},
    "zero_optimization.mics_shard_size": lambda value: "all" if value == -1 else value,
    "bf16.check_grad_overflow": lambda value: ("step", "skip")[value] if isinstance(value, bool) else value,
    "bf16.bf16_master_weights_and_grads": lambda value: not value if isinstance(value, bool) else value,
}
"""Such a name -> the conversion of its value to the current name's; values of other names are the same."""

ONLY_CALLER: frozenset[str] = frozenset(
    (
        *("zero_optimization.stage", "optimizer.type", "optimizer.params.lr", "scheduler.type"),
        *("scheduler.params.warmup_num_steps", "scheduler.params.total_num_steps"),
    )
)
"""Keys whose "auto" nothing here can replace. Any other key takes its default; batch sizes follow from each other."""

FILLED_FROM: dict[str, str] = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "fp16.enabled": "fp16",
    "bf16.enabled": "bf16",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "adam_beta1 and adam_beta2",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "max_steps",
}
"""Key -> the training argument that Hugging Face's Trainer replaces its "auto" with."""


def is_off(value: Any) -> bool:
    """Return whether ``value`` leaves a feature of other engines switched off.

    Null, false, {} and "auto" do; so does an object whose "enabled" is false, or one that holds objects with "enabled"
    that are all off.
    """
    if isinstance(value, Mapping):
        return not value or _switches(value) == {False}
    return value is None or value is False or value == "auto"


def _switches(tree: Mapping[str, Any]) -> set[bool]:
    if "enabled" in tree:
        return {not is_off(tree["enabled"])}
    return {switch for inner in tree.values() if isinstance(inner, Mapping) for switch in _switches(inner)}
