"""Optimizers of other libraries: which of them have an arithmetic that the engine has, and what to use for others.

Known by the name of their class; nothing of them is imported. Must not know: shards, the step.

[Note: The same arithmetic] AdamW with states of 8 bits is AdamW with fewer digits: it is stepped with states of 8 bits
in the engine's own code, whose bits no stage changes (``kernels.moments``); with 4 bits or fp8, in fp32. What these
libraries call Adam decays weights as Adam does in some of them and as AdamW in others: it is known without weight decay
alone, or where its ``adam_w_mode`` says which of the two it is.
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
"""Without weight decay, which each library means in its own way."""
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
    """(the kind whose arithmetic it has, in what it keeps states, a sentence of what is different); None: it is not
    known, or has another."""
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
    """Whether its class brings kernels and states of its own, so that a trial on small numbers says nothing."""
    return type(optimizer).__module__.split(".")[0] in _LIBRARIES


def advice_for(optimizer: torch.optim.Optimizer) -> str:
    """Why it is none for shards, or what to use; "" where nothing is known."""
    return _ADVICE.get(type(optimizer).__name__, "")
