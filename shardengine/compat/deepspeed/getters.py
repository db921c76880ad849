"""DeepSpeedEngine's getters of config settings. Owns: the attribute of the config that each getter reads.

Must not know: engines. For keys without effect here, a getter returns the config's value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch

from shardengine.compat.deepspeed import foreign
from shardengine.compat.deepspeed.config_classes import DeepSpeedConfig


def _asks(dotted: str) -> Callable[[Getters], Any]:
    """Return a getter for one attribute of ``DeepSpeedConfig``."""

    def ask(self: Getters) -> Any:
        return reduce(getattr, dotted.split("."), self._config)

    ask.__doc__ = f"``DeepSpeedConfig``'s ``{dotted}``."
    return ask


def _key(dotted: str, default: Any) -> Callable[[Getters], Any]:
    """Return a getter for a key that has no attribute."""

    def ask(self: Getters) -> Any:
        found = foreign.value(self._config._param_dict, dotted)
        return default if found is None else found

    ask.__doc__ = f"The config's ``{dotted}``, {default!r} without it."
    return ask


def _whether(dotted: str) -> Callable[[Getters], bool]:
    """Return a getter that tests whether a section exists and is not off."""
    ask = _key(dotted, None)

    def answer(self: Getters) -> bool:
        found = ask(self)
        if isinstance(found, Mapping):
            return bool(found.get("enabled", found.get("device", "none") != "none"))
        return bool(found)

    answer.__doc__ = f"Whether the config's ``{dotted}`` is there and not off."
    return answer


def _shards(what: str) -> Callable[[Getters], bool]:
    def answer(self: Getters) -> bool:
        return foreign.shards(self._config._param_dict, what)

    answer.__doc__ = f"Whether {what} are sharded."
    return answer


def _zero(name: str) -> Callable[[Getters], Any]:
    return _asks(f"zero_config.{name}")


class Getters:
    """A mixin of DeepSpeedEngine."""

    _config: DeepSpeedConfig

    steps_per_print = _asks("steps_per_print")
    log_level = _asks("log_level")
    managed_gradient_accumulation = _asks("managed_gradient_accumulation")
    wall_clock_breakdown = _asks("wall_clock_breakdown")
    memory_breakdown = _asks("memory_breakdown")
    dump_state = _asks("dump_state")
    dataloader_drop_last = _asks("dataloader_drop_last")
    sparse_gradients_enabled = _asks("sparse_gradients")
    gradient_predivide_factor = _asks("gradient_predivide_factor")
    zero_allow_untested_optimizer = _asks("zero_allow_untested_optimizer")
    zero_force_ds_cpu_optimizer = _asks("zero_force_ds_cpu_optimizer")
    load_universal_checkpoint = _asks("load_universal_checkpoint")
    use_node_local_storage = _asks("use_node_local_storage")
    scheduler_name = _asks("scheduler_name")
    scheduler_params = _asks("scheduler_params")
    optimizer_name = _asks("optimizer_name")
    optimizer_params = _asks("optimizer_params")
    gradient_clipping = _asks("gradient_clipping")
    loss_scale = _asks("float16_config.loss_scale")
    fp16_auto_cast = _asks("float16_config.auto_cast")
    zero_reduce_scatter = _zero("reduce_scatter")
    zero_overlap_comm = _zero("overlap_comm")
    zero_contiguous_gradients = _zero("contiguous_gradients")
    zero_reduce_bucket_size = _zero("reduce_bucket_size")
    zero_allgather_bucket_size = _zero("allgather_bucket_size")
    zero_allgather_partitions = _zero("allgather_partitions")
    zero_sub_group_size = _zero("sub_group_size")
    zero_round_robin_gradients = _zero("round_robin_gradients")
    zero_ignore_unused_parameters = _zero("ignore_unused_parameters")
    zero_elastic_checkpoint = _zero("elastic_checkpoint")
    zero_load_from_fp32_weights = _zero("load_from_fp32_weights")
    zero_max_live_parameters = _zero("max_live_parameters")
    zero_max_reuse_distance = _zero("max_reuse_distance")
    zero_prefetch_bucket_size = _zero("prefetch_bucket_size")
    zero_param_persistence_threshold = _zero("param_persistence_threshold")
    zero_hpz_partition_size = _zero("zero_hpz_partition_size")
    zero_quantized_weights = _zero("zero_quantized_weights")
    zero_quantized_gradients = _zero("zero_quantized_gradients")
    zero_offload_optimizer = _zero("offload_optimizer")
    zero_offload_param = _zero("offload_param")
    zero_optimization = _shards("states")
    zero_optimization_partition_gradients = _shards("gradients")
    zero_optimization_partition_weights = _shards("weights")
    zero_use_cpu_optimizer = zero_cpu_offload = _whether("zero_optimization.offload_optimizer")
    flops_profiler_enabled = _whether("flops_profiler")
    curriculum_learning_enabled = _whether("curriculum_learning")
    pld_enabled = _whether("progressive_layer_drop")
    amp_enabled = _whether("amp")
    torch_autocast_enabled = _whether("torch_autocast")

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """The names of modules with sparse gradients: empty, the engine detects sparse gradients without names."""
        return set()

    def postscale_gradients(self) -> bool:
        """Return whether the sum over ranks is divided, not each rank's gradients before it."""
        return not _asks("prescale_gradients")(self)

    def dynamic_loss_scale(self) -> bool:
        """Return whether the loss scale of fp16 is adjusted automatically."""
        return self._config.float16_config.loss_scale == 0

    def initial_dynamic_scale(self) -> float:
        """Return the initial loss scale of fp16."""
        return float(2 ** int(_asks("float16_config.initial_scale_power")(self)))

    def torch_autocast_dtype(self) -> Any:
        """Return the dtype of the config's autocast."""
        return getattr(torch, str(_key("torch_autocast.dtype", "bfloat16")(self)).removeprefix("torch."))

    def is_first_weights_partition_group(self) -> bool:
        """Return whether this rank saves the weights that its group holds whole: always True."""
        return True

    def checkpoint_tag_validation_enabled(self) -> bool:
        """Return whether the config's `tag_validation` is not Ignore. Ranks compare their tags in any case."""
        return str(_key("checkpoint.tag_validation", "Warn")(self)).lower() != "ignore"

    def checkpoint_tag_validation_fail(self) -> bool:
        """Return True: tags that differ between ranks are always an error."""
        return True
