"""LoRA adapters of peft. Owns: the values of --lora, adding adapters to a model, their description.

Must not know: ranks, the engine, files. peft is imported when adapters are made.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardengine.errors import UsageError
from shardengine.sharding import inner

ALL_LINEAR = "all-linear"
_FORM = "--lora r=8,alpha=16,targets=q_proj+v_proj"
_NAMED = 12
"""A message names so many modules of the model at most."""


@dataclass(frozen=True)
class Lora:
    """The values of --lora.

    r: the rank of the two matrices · alpha: their product is multiplied by alpha / r · targets: names of linear
    modules; ("all-linear",): all but the output layer; (): peft's choice for the architecture · bits: 4: a base of 4
    bits (see four_bits); None: a base as in its files.
    """

    r: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    bits: int | None = None


def parse(text: str) -> Lora:
    """Parse ``r=8,alpha=16,targets=q_proj+v_proj,dropout=0.05,bits=4``. UsageError for anything else.

    alpha is 2 r by default.
    """
    values: dict[str, Any] = {}
    readers: dict[str, Callable[[str], Any]] = {
        "r": _rank,
        "alpha": _alpha,
        "dropout": _dropout,
        "targets": _targets,
        "bits": _bits,
    }
    for part in text.split(","):
        key, equals, value = (each.strip() for each in part.partition("="))
        if not equals or key not in readers:
            raise UsageError(
                f"--lora {text}: {part.strip() or 'nothing'!r} between the commas; expected {', '.join(readers)}, each "
                f"with its value: {_FORM}",
                code="lora-option-unknown",
            )
        if key in values:
            raise UsageError(f"--lora {text}: {key} is there twice", code="lora-option-twice")
        try:
            values[key] = readers[key](value)
        except ValueError as error:
            raise UsageError(f"--lora {text}: {key}={value}: expected {error}", code="lora-value-invalid") from None
    rank = values.setdefault("r", Lora.r)
    values.setdefault("alpha", 2.0 * rank)
    return Lora(**values)


def packs_base(text: str | None) -> bool:
    """Whether ``--lora text`` trains on a base of 4 bits. None means a run without adapters."""
    return text is not None and parse(text).bits is not None


def _rank(value: str) -> int:
    if not value.isascii() or not value.isdigit() or int(value) < 1:
        raise ValueError("an integer >= 1")
    return int(value)


def _alpha(value: str) -> float:
    return _number(value, "a number > 0", lambda number: number > 0)


def _dropout(value: str) -> float:
    return _number(value, "a number >= 0 and < 1", lambda number: 0 <= number < 1)


def _number(value: str, expected: str, fits: Callable[[float], bool]) -> float:
    try:
        number = float(value)
    except ValueError:
        raise ValueError(expected) from None
    if not math.isfinite(number) or not fits(number):
        raise ValueError(expected)
    return number


def _bits(value: str) -> int:
    if value != "4":
        raise ValueError("4, or no bits= for a base as its files have it")
    return 4


def _targets(value: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in value.split("+"))
    if not all(names) or (ALL_LINEAR in names and len(names) > 1):
        raise ValueError(f"names of modules with + between them, as q_proj+v_proj, or {ALL_LINEAR}")
    return names


def attach(model: Any, lora: Lora) -> Any:
    """Add adapters to ``model``; only these are trained. Their first values come from torch's random state.

    UsageError if no module of the model has a target's name, or if peft has no targets for its architecture.
    """
    import peft

    linear = _linear_names(model)
    for name in lora.targets:
        if name != ALL_LINEAR and not any(_is_named(module, name) for module, _ in model.named_modules()):
            raise UsageError(
                f"--lora targets={'+'.join(lora.targets)}: no module of {_class(model)} is called {name}; expected "
                f"{ALL_LINEAR}, or names out of {_few(linear)}",
                code="lora-target-unknown",
            )
    targets: Any = ALL_LINEAR if lora.targets == (ALL_LINEAR,) else list(lora.targets) or None
    config = peft.LoraConfig(
        r=lora.r,
        lora_alpha=_whole(lora.alpha),
        lora_dropout=lora.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    place = Path(str(model.name_or_path))
    if place.exists():  # the files name the base model, wherever they are read
        model.name_or_path = str(place.resolve())
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set")  # peft corrects it itself
            warnings.simplefilter("ignore", FutureWarning)  # of transformers, about what peft reads
            return peft.get_peft_model(model, config)
    except ValueError as error:
        if targets is None:
            raise UsageError(
                f"--lora: peft knows no targets for {_class(model)}; expected targets={ALL_LINEAR}, or names out of "
                f"{_few(linear)}",
                code="lora-targets-needed",
            ) from None
        raise UsageError(
            f"--lora targets={'+'.join(lora.targets)}: {_first_line(error)}", code="lora-targets-refused"
        ) from None


def check(model: str, lora: Lora) -> None:
    """Raise the UsageError that ``attach`` would raise, without the weights of ``model``, a directory or a name."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        attach(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)), lora)


def describe(model: Any) -> str:
    """Describe the model's only adapter, and its base if that is packed: ``LoRA, r 8, alpha 16 on c_attn, c_proj``."""
    (config,) = model.peft_config.values()
    targets = sorted({name.rsplit(".", 1)[-1] for name in model.targeted_module_names})
    dropout = f", dropout {config.lora_dropout:g}" if config.lora_dropout else ""
    whole = sum(map(inner.weights_in, model.parameters()))
    packed = sum(inner.weights_in(each) for each in model.parameters() if hasattr(each, "quant_state"))
    base = f"; {packed / whole:.0%} of all weights have 4 bits" if packed else ""
    return f"LoRA, r {config.r}, alpha {config.lora_alpha:g}{dropout} on {', '.join(targets)}{base}"


def has_adapters(model: Any) -> bool:
    """Whether the model is peft's wrapper."""
    return hasattr(model, "peft_config")


def _linear_names(model: Any) -> list[str]:
    """Return the last parts of the names of all linear modules."""
    kinds = ("Linear", "Conv1D", "Linear4bit")
    found = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if type(module).__name__ in kinds}
    return sorted(found)


def _is_named(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")


def _few(names: Iterable[str]) -> str:
    everything = list(names)
    more = f" and {len(everything) - _NAMED} more" if len(everything) > _NAMED else ""
    return ", ".join(everything[:_NAMED]) + more


def _class(model: Any) -> str:
    return type(model).__name__


def _whole(number: float) -> float:
    return int(number) if number == int(number) else number


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
