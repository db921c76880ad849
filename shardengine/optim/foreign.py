"""Optimizers of other libraries: which of them the engine's arithmetic can replace, and alternatives for others.

They are recognised by the name of their class; no library is imported. Must not know: shards, the step.

[Note: The same arithmetic] AdamW with 8-bit states is AdamW with fewer digits. The engine steps it with 8-bit states in
a code of its own, whose bits no stage changes (``kernels.moments``). Optimizers with 4-bit or fp8 states are stepped
with fp32 states. The class named Adam decays weights as Adam does in some of these libraries and as AdamW does in
others. So it is recognised only without weight decay, or if its attribute ``adam_w_mode`` says which of the two it is.
"""

from __future__ import annotations

import torch

_STATES = {
    "AdamW8bit": "its states of 8 bits", "AdamW4bit": "its states of 4 bits", "AdamWFp8": "its states in fp8",
    "PagedAdamW": "its paged states", "PagedAdamW8bit": "its paged states of 8 bits", "PagedAdamW32bit":
    "its paged states", "Lion8bit": "its states of 8 bits", "PagedLion8bit": "its paged states of 8 bits",
    "PagedLion32bit": "its paged states", "PagedLion": "its paged states",
}  # fmt: skip
_ADAMW = (
    "AdamW", "AdamW8bit", "AdamW32bit", "AdamW4bit", "AdamWFp8", "PagedAdamW", "PagedAdamW8bit", "PagedAdamW32bit",
)  # fmt: skip
_ADAM = (
    "Adam", "Adam8bit", "Adam32bit", "Adam4bit", "AdamFp8", "PagedAdam", "PagedAdam8bit", "PagedAdam32bit",
)  # fmt: skip
"""Recognised only without weight decay, which differs between libraries."""
_LION = ("Lion", "Lion8bit", "Lion32bit", "PagedLion", "PagedLion8bit", "PagedLion32bit")
_BY_MODE = ("FusedAdam", "DeepSpeedCPUAdam")
"""Their attribute ``adam_w_mode`` says which of the two they are."""
_LIBRARIES = ("bitsandbytes", "torchao", "apex", "deepspeed", "transformer_engine")
_MATRICES = "it looks at whole matrices, of which a rank has slices"
_ADVICE = {
    "Adafactor": f"{_MATRICES}: use torch.optim.Adafactor, or transformers.optimization.Adafactor",
    "Muon": f"{_MATRICES}: use torch.optim.Muon",
    "Shampoo": _MATRICES, "SOAP": _MATRICES, "GaLoreAdamW": _MATRICES, "GaLoreAdamW8bit": _MATRICES,
    "APOLLOAdamW": _MATRICES, "LBFGS": "it evaluates the loss several times per step",
    "LOMO": "it steps while backward runs: use SGD, with offload_optimizer if memory is short",
    "AdaLomo": "it steps while backward runs: use AdamW with offload_optimizer",
}  # fmt: skip


def recognise(optimizer: torch.optim.Optimizer) -> tuple[str, str, str] | None:
    """Return (kind with the same arithmetic, format of its states, a sentence about the differences).

    None: the class is unknown, or its arithmetic is another one.
    """
    made_by, name = type(optimizer), type(optimizer).__name__
    library, groups = made_by.__module__.split(".")[0], optimizer.param_groups
    if library not in _LIBRARIES or not all(group.get("bias_correction", True) for group in groups):
        return None
    if name in _ADAMW:
        kind = "AdamW"
    elif name in _LION:
        kind = "Lion"
    elif name in _BY_MODE:
        kind = "AdamW" if getattr(optimizer, "adam_w_mode", True) else "Adam"
    elif name in _ADAM and not any(group.get("weight_decay") for group in groups):
        kind = "Adam"
    else:
        return None
    states, kept_in = _STATES.get(name, "its states"), "8bit" if name.endswith("8bit") else "fp32"
    kept = "in 8 bits of the engine's own code" if kept_in == "8bit" else "in fp32"
    return (
        kind,
        kept_in,
        f"optimizer {library}.{name} is stepped as {kind} in the engine's own kernels; {states} are kept {kept}, "
        "sharded",
    )


def is_of_library(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its class brings kernels and states of its own, so that a trial on small numbers proves nothing."""
    return type(optimizer).__module__.split(".")[0] in _LIBRARIES


def advice_for(optimizer: torch.optim.Optimizer) -> str:
    """Return why it cannot step shards, or which one to use instead; "" for unknown classes."""
    return _ADVICE.get(type(optimizer).__name__, "")
