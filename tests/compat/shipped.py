"""One config file that a framework ships, filled as that framework does, and a few steps beside plain torch.

Owns: what Trainer and accelerate make of a file, a model, its reference in plain torch. Importing this file takes
seconds and changes the process (``stand_in``): only processes that fork runs do.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import shardengine.compat.deepspeed as deepspeed
from shardengine.compat.deepspeed import stand_in
from shardengine.errors import ConfigError

stand_in.install()

import accelerate  # noqa: E402
from accelerate.utils import DeepSpeedPlugin  # noqa: E402
from transformers import TrainingArguments  # noqa: E402
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig  # noqa: E402

HIDDEN, STEPS, LR = 8, 3, 1e-3
File = dict[str, Any]
Say = Callable[[Any], None]


class Model(nn.Module):
    """Three layers, and a config as transformers' models have one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.config = SimpleNamespace(hidden_size=HIDDEN)
        self.layers = nn.Sequential(nn.Linear(6, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def micro_batch(rows: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(rows, 6, generator=generator), torch.randn(rows, 2, generator=generator)


def loss_of(out: Tensor, y: Tensor) -> Tensor:
    return 0.05 * nn.functional.mse_loss(out.float(), y)  # scaled by 2**16 it is finite in fp16


# What becomes of a file before DeepSpeed sees it


def has_auto(tree: Any) -> bool:
    return any(map(has_auto, tree.values())) if isinstance(tree, dict) else bool(tree == "auto")


def fill(config: File) -> File:
    """``config`` as Trainer fills it, with arguments that agree with what the file says itself."""
    filled = HfTrainerDeepSpeedConfig(config)

    def said(key: str, otherwise: Any) -> Any:
        value = filled.get_value(key)
        return otherwise if value in (None, "auto") else value

    bf16, fp16 = filled.get_value("bf16.enabled"), filled.get_value("fp16.enabled")
    arguments = TrainingArguments(
        output_dir="unused",
        use_cpu=True,
        report_to=[],
        per_device_train_batch_size=said("train_micro_batch_size_per_gpu", 4),
        gradient_accumulation_steps=said("gradient_accumulation_steps", 2),
        max_grad_norm=said("gradient_clipping", 0.01),
        learning_rate=said("optimizer.params.lr", LR),
        weight_decay=said("optimizer.params.weight_decay", 0.1),
        warmup_steps=said("scheduler.params.warmup_num_steps", 5),
        bf16=bf16 in (True, "auto"),
        fp16=fp16 is True or (fp16 == "auto" and bf16 is None),
    )
    filled.trainer_config_process(arguments)
    filled.trainer_config_finalize(arguments, Model(), 10)
    result: File = filled.config
    return result


def on_this_disk(config: File, folder: str) -> File:
    """``config`` with a folder that exists in the place of every path of a disk."""
    tree = {**config, "zero_optimization": dict(config.get("zero_optimization", {}))}
    for name in ("offload_optimizer", "offload_param"):
        section = tree["zero_optimization"].get(name)
        if isinstance(section, dict) and section.get("device") == "nvme":
            tree["zero_optimization"][name] = {**section, "nvme_path": folder}
    return tree if "zero_optimization" in config else config


def started(file: File, folder: str) -> tuple[Any, list[Tensor]]:
    """The engine of a file, and the first values of its model's parameters."""
    config, model = file["config"], Model()
    first = [value.detach().clone() for value in model.parameters()]
    if "mixed_precision" in file:
        return prepared(config, file["mixed_precision"], model), first
    config = on_this_disk(config, folder)
    if has_auto(config):
        config = fill(config)
    # Trainer makes the optimizer where the file has none, accelerate that of the host where the file forces it
    forced = config.get("zero_force_ds_cpu_optimizer") is True
    made: Any = deepspeed.ops.adam.DeepSpeedCPUAdam if forced else torch.optim.AdamW
    given = None if config.get("optimizer") else made(model.parameters(), lr=LR, weight_decay=0.1)
    parameters = model.parameters() if given is None else None
    engine, *_ = deepspeed.initialize(model=model, optimizer=given, model_parameters=parameters, config=config)
    return engine, first


def prepared(fields: File, mixed_precision: str, model: nn.Module) -> Any:
    """The engine that accelerate makes of the ``deepspeed_config`` of its own file."""
    os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "LOCAL_WORLD_SIZE": "1"}
    launcher = ("deepspeed_multinode_launcher",)
    plugin = DeepSpeedPlugin(**{name: value for name, value in fields.items() if name not in launcher})
    accelerator = accelerate.Accelerator(mixed_precision=mixed_precision, deepspeed_plugin=plugin)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    loader: Any = torch.utils.data.DataLoader([0.0] * 4, batch_size=4)  # type: ignore[arg-type]
    engine, *_ = accelerator.prepare(model, optimizer, loader)
    return engine


# Training


def train(say: Say, _rank: int, file: File, folder: str) -> None:
    """Some steps of an engine and of plain torch; says the losses of both, how far each weight has moved, how far the
    two are apart, the sizes of buckets, what was logged; of a file that is refused, only why."""
    try:
        with told() as sentences:
            engine, masters = started(file, folder)
    except ConfigError as error:
        say({"refused": str(error)})
        return
    ours = Plain(engine.config, masters)
    sizes = engine._engine.config
    losses: tuple[list[float], list[float]] = ([], [])
    first = [value.clone() for value in masters]
    for step in range(STEPS):
        rate = engine.get_lr()[0]
        for number in range(sizes.gradient_accumulation_steps):
            x, y = micro_batch(sizes.train_micro_batch_size_per_gpu, 1000 * step + number)
            x = x.to(ours.dtype) if not engine.config.get("fp16", {}).get("auto_cast") else x
            loss = loss_of(engine(x), y)
            engine.backward(loss)
            engine.step()
            losses[0].append(loss.item())
            losses[1].append(ours.backward(x, y, sizes.gradient_accumulation_steps))
        ours.step(rate)
    assert engine.global_steps == STEPS and engine.was_step_applied()
    with engine.full_optimizer_state() as states:
        weights = [states[name]["weight"].clone() for name, _ in engine.module.named_parameters()]
    say(
        {
            "losses": losses,
            "moved": [(one - before).abs().max().item() for one, before in zip(ours.masters, first, strict=True)],
            "apart": [(one - other).abs().max().item() for one, other in zip(weights, ours.masters, strict=True)],
            "buckets": (
                sizes.zero_optimization.reduce_bucket_size,
                sizes.zero_optimization.stage3_prefetch_bucket_size,
            ),
            "told": sentences,
        }
    )
    engine.destroy()


class Plain:
    """The reference: fp32 weights, a model in the dtype of the config, torch's optimizer, gradients summed in fp32."""

    def __init__(self, config: File, masters: list[Tensor]) -> None:
        self.masters = [value.requires_grad_() for value in masters]

        def enabled(*names: str) -> bool:
            return any(config.get(name, {}).get("enabled") is True for name in names)

        low = torch.bfloat16 if enabled("bf16", "bfloat16") else torch.float16 if enabled("fp16") else torch.float32
        self.dtype, self.model = low, Model().to(low)
        self.scale = 2.0**16 if low is torch.float16 else 1.0
        self.clipping = config.get("gradient_clipping", 1.0)  # as DeepSpeed
        params = (config.get("optimizer") or {"params": {"lr": LR, "weight_decay": 0.1}})["params"]
        known = ("lr", "betas", "eps", "weight_decay")
        self.optimizer = torch.optim.AdamW(
            self.masters, **{"weight_decay": 0.0, **{name: params[name] for name in known if name in params}}
        )
        self._show()

    def _show(self) -> None:
        with torch.no_grad():
            for value, master in zip(self.model.parameters(), self.masters, strict=True):
                value.copy_(master)

    def backward(self, x: Tensor, y: Tensor, share: int) -> float:
        """Add the gradients of one micro-batch; its loss."""
        loss = loss_of(self.model(x.to(self.dtype)), y)
        (loss * self.scale / share).backward()
        for value, master in zip(self.model.parameters(), self.masters, strict=True):
            assert value.grad is not None
            master.grad = value.grad.float() + (0.0 if master.grad is None else master.grad)
            value.grad = None
        return loss.item()

    def step(self, rate: float) -> None:
        """Clip and step with this learning rate."""
        for master in self.masters:
            assert master.grad is not None
            master.grad = master.grad.to(self.dtype).float() / self.scale  # as they are sent
        if self.clipping:
            torch.nn.utils.clip_grad_norm_(self.masters, self.clipping)
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._show()


@contextmanager
def told() -> Iterator[list[str]]:
    """What the package logs inside."""
    sentences: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            sentences.append(record.getMessage())

    log, keep = logging.getLogger("shardengine"), Keep()
    log.addHandler(keep)
    try:
        yield sentences
    finally:
        log.removeHandler(keep)
