"""Checks of several keys together. Owns: conflicts between valid keys, and the equation of the batch sizes.

Must not know: how a file is read. A key that could not be read has its default here: a check asks ``Reader.usable``
about each key whose default it would reject (reader, [Note: One mistake, one problem]).
"""

from __future__ import annotations

from typing import Any

from shardengine.config.kinds import check_table, nearest
from shardengine.config.reader import Reader
from shardengine.config.schema import COMM_HOOKS, STEPPING_APART, TRIPLE, CommHookConfig, TopLevel

EQUATION = f"{TRIPLE[0]} = {TRIPLE[1]} * {TRIPLE[2]} * world size must hold"
MISSING_TRIPLE = (
    f"the batch size is missing: {EQUATION}; expected {TRIPLE[0]} or {TRIPLE[1]} (one alone, or any two of the three)"
)
_SMALLEST_SCALE = 2.0**-126


def check_together(config: TopLevel, reader: Reader) -> None:
    """Add the conflicts between keys of ``config`` to the reader's problems."""
    _check_precision(config, reader)
    _check_offload(config, reader)
    _check_shard_groups(config, reader)
    _check_comm_hook(config, reader)
    _check_sparse_gradients(config, reader)
    _check_step_in_backward(config, reader)
    if config.aio.block_size % 4096:
        reader.problem("aio.block_size", f"expected a multiple of 4096 bytes, got {config.aio.block_size}")
    activations = config.activation_checkpointing
    if activations.cpu_offload and not activations.enabled and reader.usable("activation_checkpointing.enabled"):
        reader.problem(
            "activation_checkpointing.cpu_offload",
            "it moves what checkpointed blocks keep to host memory, and no block is checkpointed; set "
            '"activation_checkpointing": {"enabled": true}, or leave it out',
        )
    if config.gradient_clipping_value and config.gradient_clipping:
        reader.problem(
            "gradient_clipping_value",
            f"expected gradients to be clipped by norm or by value, got both, and gradient_clipping "
            f"{config.gradient_clipping:g}; leave one of them out",
        )
    if config.gradient_divide_factor is not None and reader.sources.get("gradient_allreduce_op") == "file":
        reader.problem(
            "gradient_divide_factor",
            f'it says what sums are divided by, and gradient_allreduce_op "{config.gradient_allreduce_op}" says that '
            "as well; leave one of them out",
        )
    if reader.usable(*TRIPLE):
        _check_triple(config, reader)
    _check_ema(config, reader)


def _check_precision(config: TopLevel, reader: Reader) -> None:
    bf16, fp16 = config.bf16, config.fp16
    if fp16.enabled and bf16.enabled:
        reader.problem("fp16.enabled", "expected fp16 or bf16, got both; switch one of them off")
    if bf16.split_masters and not bf16.master_weights and reader.usable("bf16.master_weights"):
        reader.problem(
            "bf16.split_masters",
            'it keeps a part of master weights, and "master_weights": false keeps none; leave one of them out',
        )
    name = "" if config.optimizer is None else config.optimizer.type
    other = config.data_types.optimizer_state_dtype != "8bit"
    if name.endswith("8bit") and other and reader.sources.get("data_types.optimizer_state_dtype") == "file":
        reader.problem(
            "data_types.optimizer_state_dtype",
            f"{name} keeps its states in 8 bits; leave this out, or name {name.removesuffix('8bit')}",
        )
    rounds = bf16.enabled and bf16.stochastic_rounding
    if rounds and bf16.master_weights and reader.usable("bf16.master_weights"):
        reader.problem(
            "bf16.stochastic_rounding",
            "it rounds bf16 weights that are stepped themselves, and with fp32 master weights they are not; set "
            '"master_weights": false, or leave it out',
        )
    for name, scale in (("loss_scale", fp16.loss_scale), ("min_loss_scale", fp16.min_loss_scale)):
        if 0 < scale < _SMALLEST_SCALE:
            text = f"expected a number that fp32 can divide by, at least 2 ** -126, got {scale:g}"
            reader.problem(f"fp16.{name}", text)
    if not _scales_loss(config, reader) or fp16.loss_scale or not reader.usable("fp16.loss_scale"):
        return
    if config.nonfinite_gradients in ("raise", "step"):
        reader.problem(
            "nonfinite_gradients",
            'expected "skip" with a dynamic loss scale, which finds its value by skipping steps, got '
            f'"{config.nonfinite_gradients}"; give fp16.loss_scale a fixed value, or leave this key out',
        )
    first = 2.0**fp16.initial_scale_power
    if first < fp16.min_loss_scale and reader.usable("fp16.initial_scale_power", "fp16.min_loss_scale"):
        reader.problem(
            "fp16.min_loss_scale",
            f"expected at most the first loss scale, 2 ** initial_scale_power = {first:g}, got {fp16.min_loss_scale:g}",
        )


def _scales_loss(config: TopLevel, reader: Reader) -> bool:
    autocast = config.torch_autocast
    fp16 = config.fp16.enabled and reader.usable("fp16.enabled")
    return fp16 or (autocast.enabled and autocast.dtype == "float16")


def _check_offload(config: TopLevel, reader: Reader) -> None:
    zero = config.zero_optimization
    offload = zero.offload_optimizer
    for name, tier in (("offload_optimizer", offload), ("offload_param", zero.offload_param)):
        path = f"zero_optimization.{name}.nvme_path"
        if tier.device == "nvme" and tier.nvme_path is None and reader.usable(path):
            reader.problem(path, "expected a directory on the disk, because device is nvme, got none")
    ratio, device, memory = (
        f"zero_optimization.offload_optimizer.{name}" for name in ("ratio", "device", "device_memory")
    )
    if not reader.usable(ratio, device, memory):
        pass
    elif offload.ratio == "auto":
        if offload.device == "none":
            reader.problem(
                ratio, 'expected device "cpu" or "nvme" beside "auto", got "none": there is nowhere to go; set it'
            )
    elif offload.device_memory is not None:
        came = f"ratio {offload.ratio:g}, which says itself what stays"
        reader.problem(memory, f'expected "ratio": "auto" beside it, got {came}; set that, or leave this out')
    if zero.offload_param.device != "none" and zero.stage < 3 and reader.usable("zero_optimization.stage"):
        reader.problem(
            "zero_optimization.offload_param.device",
            f"expected stage 3, where weights are kept sharded, got stage {zero.stage}; offload_optimizer is for every "
            "stage",
        )


def _check_shard_groups(config: TopLevel, reader: Reader) -> None:
    zero = config.zero_optimization
    group, partition = "zero_optimization.shard_group_size", "zero_optimization.zero_hpz_partition_size"
    if zero.zero_hpz_partition_size != 1 and reader.usable(group, partition):
        if zero.shard_group_size != "all":
            reader.problem(
                partition,
                'expected shard_group_size "all" beside it: with shard groups no gather leaves the group anyway; '
                "leave one of them out",
            )
        if not (zero.stage == 3 and zero.stage3_reshard_after_forward) and reader.usable("zero_optimization.stage"):
            reader.problem(
                partition,
                "expected stage 3 with stage3_reshard_after_forward, where units are gathered for forward and again "
                f"for backward, got stage {zero.stage}; leave it out",
            )
    if zero.shard_group_size != "all" and zero.stage == 0 and reader.usable(group, "zero_optimization.stage"):
        reader.problem(group, "expected stage 1, 2 or 3: stage 0 shards nothing; leave it out, or set the stage")
    if zero.shard_group_size != "all" and zero.offload_optimizer.step_in_backward and reader.usable(group):
        reader.problem(
            "zero_optimization.offload_optimizer.step_in_backward",
            'expected shard_group_size "all": with shard groups a gradient is complete when the groups have been '
            "added up, after backward; leave one of them out",
        )


def _check_comm_hook(config: TopLevel, reader: Reader) -> None:
    hook, quantized = config.comm_hook, config.zero_optimization.zero_quantized_gradients
    if reader.usable("comm_hook.name"):
        _check_hook_params(hook, reader)
    codes = hook.name not in STEPPING_APART
    if not codes:
        _check_stepping_apart(config, reader)
    zero = config.zero_optimization
    if zero.zero_quantized_weights and zero.stage != 3 and reader.usable("zero_optimization.stage"):
        reader.problem(
            "zero_optimization.zero_quantized_weights",
            f"expected stage 3, where weights are gathered for each use, got stage {zero.stage}; leave it out",
        )
    if hook.name != "none" and config.step_unused_parameters:
        reader.problem(
            "step_unused_parameters",
            f"expected false beside a comm_hook, got {hook.name}, whose messages also say what earlier ones left out; "
            "leave one of them out",
        )
    if quantized and hook.name != "none":
        reader.problem(
            "zero_optimization.zero_quantized_gradients",
            f"cannot be combined with comm_hook, got {hook.name}: both define the format of gradients; remove one of "
            "them",
        )
    if ((codes and hook.name != "none") or quantized) and config.communication_data_type is not None:
        reader.problem(
            "communication_data_type",
            "expected none beside a comm_hook, which says what travels; leave one of them out",
        )


def _check_hook_params(hook: CommHookConfig, reader: Reader) -> None:
    table = COMM_HOOKS[hook.name]

    def wrong(name: str, text: str) -> None:
        reader.problem(f"comm_hook.params.{name}", text)

    def unknown(name: str, _: Any) -> None:
        if not table:
            wrong(name, f"{hook.name} has no params; leave it out")
        else:
            meant = "rank" if name.endswith("rank") and "rank" in table else nearest(name, table)
            wrong(name, f"{hook.name} has no such one; did you mean {meant!r}?")

    check_table(table, hook.params, wrong, unknown)


def _check_sparse_gradients(config: TopLevel, reader: Reader) -> None:
    if not config.sparse_gradients:
        return
    zero = config.zero_optimization
    if zero.stage != 0 and reader.usable("zero_optimization.stage"):
        reader.problem(
            "sparse_gradients",
            f"expected stage 0, where whole gradients travel, got stage {zero.stage}; leave it out, or set the stage",
        )
    if config.comm_hook.name != "none" or zero.zero_quantized_gradients:
        reader.problem(
            "sparse_gradients",
            "cannot be combined with comm_hook, which defines the format of all gradients; remove one of them",
        )


def _check_stepping_apart(config: TopLevel, reader: Reader) -> None:
    hook, zero = config.comm_hook, config.zero_optimization
    beside = f"beside comm_hook {hook.name}"
    if zero.stage == 0 and reader.usable("zero_optimization.stage"):
        reader.problem(
            "zero_optimization.stage",
            f"expected 1, 2 or 3 {beside}, whose groups are shard groups, got 0; take 1 with shard_group_size 1, where "
            "each rank is a group and has all of everything, as at stage 0",
        )
    if zero.zero_hpz_partition_size != 1:
        reader.problem(
            "zero_optimization.zero_hpz_partition_size",
            f"expected shard_group_size {beside}: with hpZ groups share the optimizer's states, and cannot step apart",
        )
    if config.gradient_accumulation == "sharded":
        reader.problem(
            "gradient_accumulation",
            f'expected "full", or none, {beside}: "sharded" adds micro-batches up over all ranks before it is known '
            "what a group's own gradient is",
        )
    if config.gradient_divide_factor is not None or config.gradient_allreduce_op != "mean":
        reader.problem(
            "comm_hook.name",
            f"{hook.name} takes means, over the ranks of a group and over groups: expected gradient_allreduce_op "
            '"mean" and no gradient_divide_factor; leave them out',
        )


def _check_ema(config: TopLevel, reader: Reader) -> None:
    if config.ema.decay is None:
        return
    keeps_masters = config.bf16.master_weights and not config.bf16.split_masters
    if config.bf16.enabled and not keeps_masters and reader.usable("bf16.master_weights"):
        reader.problem(
            "ema.decay",
            "expected bf16.master_weights true and split_masters false beside it: averages are fp32, and without fp32 "
            "master weights they would lose their bits; set that, or leave this out",
        )
    if config.zero_optimization.offload_optimizer.step_in_backward:
        reader.problem(
            "ema.decay", "expected offload_optimizer.step_in_backward false beside it; leave one of them out"
        )


def _check_step_in_backward(config: TopLevel, reader: Reader) -> None:
    zero, name = config.zero_optimization, "zero_optimization.offload_optimizer.step_in_backward"
    if not zero.offload_optimizer.step_in_backward:
        return
    if zero.offload_optimizer.device == "none" and reader.usable("zero_optimization.offload_optimizer.device"):
        reader.problem(
            name, "expected a device that is not none: what is kept with the weights is stepped after backward"
        )
    if zero.stage == 0 and reader.usable("zero_optimization.stage"):
        reader.problem(name, "expected stage 1, 2 or 3: at stage 0 every rank steps everything, after backward")
    if config.gradient_clipping:
        reader.problem(name, "expected gradient_clipping 0: the norm that clips is known after backward")
    if config.gradient_clipping_value:
        reader.problem(name, "expected gradient_clipping_value 0: elements are clipped when all gradients are complete")
    if _scales_loss(config, reader):
        reader.problem(name, "expected no fp16: whether the scaled gradients are finite is known after backward")
    if config.nonfinite_gradients == "skip":
        reader.problem(
            name,
            'expected nonfinite_gradients "raise" (its default here) or "step", got "skip": a step that has begun in '
            "backward cannot be skipped",
        )


def _check_triple(config: TopLevel, reader: Reader) -> None:
    total, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    steps = config.gradient_accumulation_steps
    if total is None and micro is None:
        automatic = [name for name in TRIPLE[:2] if name in reader.automatic]
        more = (
            f'; {" and ".join(automatic)} "auto" is filled by Hugging Face\'s Trainer from its arguments: here '
            f'write a number, or give one: load_config(file, auto={{"{TRIPLE[1]}": …}})'
        )
        reader.problems.append(MISSING_TRIPLE + (more if automatic else ""))
    elif total is not None and total % ((micro or 1) * (steps or 1)):
        shown = " * ".join("?" if factor is None else str(factor) for factor in (micro, steps, None))
        reader.problems.append(f"{EQUATION}, but {total} = {shown} holds for no world size; change one of them")
