"""QLoRA's base (Dettmers et al. 2023): frozen weights of 4 bits, by bitsandbytes.

The format is nf4, whose scales are quantised as well. Owns: packing a model while it is read, and the same model
without values, for plans. Must not know: adapters, ranks, the engine, which keeps packed weights as they are. Inputs of
a packed layer are multiplied in the dtype that the model is read in: that of the run.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from shardengine.config import Config
from shardengine.errors import UsageError

_BLOCK, _BLOCK_OF_SCALES = 64, 256
"""Weights per scale, and scales per scale of the scales. bitsandbytes has the first for nf4, and always the second."""


def dtype_of(config: Config) -> torch.dtype:
    """Return the dtype that a run of ``config`` computes in.

    The base is read in it, because packed weights cannot be cast.
    """
    return torch.bfloat16 if config.bf16.enabled else torch.float16 if config.fp16.enabled else torch.float32


def is_quantised(config: Any) -> bool:
    """Whether a model's config says that its weights are quantised, in another library's format."""
    return getattr(config, "quantization_config", None) is not None


def refuse_quantised(config: Any, name: str) -> None:
    """UsageError if the files of the model ``name`` are quantised already."""
    if is_quantised(config):
        raise UsageError(
            f"--lora bits=4: the files of {name} are quantised already; leave bits=4 out",
            code="lora-base-already-quantised",
        )


def load(name: str, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the causal LM of a folder or name, packed on ``device``. It is whole there until ``initialize``."""
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about what it hands to bitsandbytes
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, quantization_config=_packing(dtype), device_map={"": device}
        )
    for module in filter(_is_packed, model.modules()):
        vars(module)["support_avx512bf16_for_cpu"] = False  # in eval() it would replace weights that an engine holds
    return model


def pack_without_values(model: Any, dtype: torch.dtype) -> None:
    """Give a model on the meta device the layers and shapes that ``load`` gives one with values."""
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import get_keys_to_not_convert

    packing = _packing(dtype)
    replace_with_bnb_linear(model, get_keys_to_not_convert(model), packing)
    for module in model.modules():
        if _is_packed(module):
            _pack(module, dtype)
    model.config.quantization_config = packing
    model.is_loaded_in_4bit = model.is_quantized = True  # peft asks


def _packing(dtype: torch.dtype) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def _is_packed(module: nn.Module) -> bool:
    from bitsandbytes.nn import Linear4bit

    return isinstance(module, Linear4bit)


def _pack(module: Any, dtype: torch.dtype) -> None:
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Params4bit

    weights = module.in_features * module.out_features
    scales = -(-weights // _BLOCK)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    of_scales = QuantState(
        absmax=empty(-(-scales // _BLOCK_OF_SCALES)),
        code=empty(256),
        blocksize=_BLOCK_OF_SCALES,
        dtype=torch.float32,
    )
    state = QuantState(
        absmax=empty(scales, dtype=torch.uint8),
        shape=torch.Size((module.out_features, module.in_features)),
        code=empty(16),
        blocksize=_BLOCK,
        quant_type="nf4",
        dtype=dtype,
        offset=empty(),
        state2=of_scales,
    )
    weight = Params4bit(
        empty(-(-weights // 2), 1, dtype=torch.uint8),
        requires_grad=False,
        quant_state=state,
        blocksize=_BLOCK,
        quant_type="nf4",
        compress_statistics=True,
        bnb_quantized=True,
        module=module,
    )
    module.register_parameter("weight", weight)
    vars(module)["quant_state"] = state
