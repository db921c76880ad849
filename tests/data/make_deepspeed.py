"""Makes the DeepSpeed checkpoints beside it, and what DeepSpeed itself says that they hold.

Run from the repository with an interpreter that has DeepSpeed (and torch, safetensors; no GPU is needed):

    DS_ACCELERATOR=cpu python -m tests.data.make_deepspeed [NAME …]

Each directory ``tests/data/deepspeed-NAME`` then holds a checkpoint as DeepSpeed wrote it and ``expected.safetensors``:
whole tensors named "weight/PARAMETER", "exp_avg/PARAMETER" and so on (fp32 masters where DeepSpeed has them) and
"buffer/NAME", asked from DeepSpeed's engine. ``TinyModel`` and ``CASES`` serve the tests as well.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

HERE = Path(__file__).resolve().parent
STEPS, RANKS = 3, 2
ADAM = {"betas": (0.9, 0.95), "eps": 1e-8}

CASES: dict[str, dict[str, Any]] = {
    "stage0-fp32": {"stage": 0},
    "stage1-fp32": {"stage": 1},
    "stage2-fp32": {"stage": 2},
    "stage2-robin": {"stage": 2, "zero": {"round_robin_gradients": True}, "like": "stage2-fp32"},
    "stage2-sgd": {"stage": 2, "kind": "SGD"},
    "stage3-fp32": {"stage": 3},
    "stage0-bf16": {"stage": 0, "low": "bf16"},
    "stage1-bf16": {"stage": 1, "low": "bf16"},
    "stage1-mixed": {"stage": 1, "low": "bf16", "config": {"data_types": {"grad_accum_dtype": "fp32"}}},
    "stage2-bf16": {"stage": 2, "low": "bf16", "zero": {"parameter_alignment": True}, "ranks": 3},
    "stage3-bf16": {"stage": 3, "low": "bf16", "zero": {"sub_group_size": 30}},
    "stage2-fp16": {"stage": 2, "low": "fp16"},
    "stage3-fp16": {"stage": 3, "low": "fp16", "ranks": 3},
}
"""Options: stage, zero (merged into "zero_optimization"), low (half precision), config (merged), kind, ranks.

like: the case whose values these are too, where DeepSpeed's own functions return others (with round_robin_gradients
they look in the wrong places; order does not change an elementwise update).
"""


class TinyModel(nn.Module):
    """Tied, frozen and 0-dim parameters, odd sizes, two kinds of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.fixed = nn.Linear(6, 5).requires_grad_(False)
        self.inner = nn.Linear(5, 7)
        self.back = nn.Linear(7, 6)
        self.gain = nn.Parameter(torch.tensor([1.25, 0.75, 1.5]))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.shift: Tensor
        self.register_buffer("shift", torch.linspace(-1, 1, 6))
        self.register_buffer("seen", torch.tensor([3, 5], dtype=torch.int64))

    def forward(self, ids: Tensor) -> Tensor:
        """Mean cross-entropy of predicting each token's successor."""
        x = self.norm(self.embed(ids))
        x = x + self.shift.to(x.dtype)
        x = x + self.back(torch.tanh(self.inner(self.fixed(x)))) * self.gain.prod()
        return nn.functional.cross_entropy(self.head(x[:-1]).float(), ids[1:])


def make_model() -> TinyModel:
    """The model as every rank starts with it."""
    torch.manual_seed(21)
    return TinyModel()


def batch(step: int, rank: int) -> Tensor:
    """The tokens of one rank and step."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randint(0, 11, (9,), generator=generator)


def groups_of(model: nn.Module, kind: str) -> list[dict[str, Any]]:
    """Two groups of trainable parameters: matrices with weight decay, the rest without."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    common: dict[str, Any] = {"momentum": 0.9} if kind == "SGD" else ADAM
    return [
        {"params": [p for p in trainable if p.dim() >= 2], "lr": 1e-2, "weight_decay": 0.1, **common},
        {"params": [p for p in trainable if p.dim() < 2], "lr": 2e-3, "weight_decay": 0.0, **common},
    ]


def states_of(kind: str) -> tuple[str, ...]:
    """Names of the optimizer's states."""
    return ("momentum_buffer",) if kind == "SGD" else ("exp_avg", "exp_avg_sq")


def _config(options: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": options["stage"], **options.get("zero", {})},
        "zero_allow_untested_optimizer": True,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "steps_per_print": 10_000,
        **options.get("config", {}),
    }
    if "low" in options:
        config[options["low"]] = {"enabled": True}
        if options["low"] == "fp16":
            config["fp16"]["initial_scale_power"] = 8
    return config


def _expected(deepspeed: Any, engine: Any, kind: str) -> dict[str, Tensor]:
    """Whole values by DeepSpeed's own public functions. Collective."""
    utils = importlib.import_module("deepspeed.utils")
    found = {f"buffer/{name}": value for name, value in engine.module.named_buffers()}
    inner = engine.optimizer
    if hasattr(inner, "_hp_optimizer_states_linked"):  # DeepSpeed links the states when only group 0 has stepped
        inner._hp_optimizer_states_linked = False
        inner._lazy_init_hp_params_optimizer_state()
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found[f"weight/{name}"] = parameter.detach().clone()
        if not parameter.requires_grad:
            continue
        master = utils.safe_get_full_fp32_param(parameter)
        if master is not None:
            found[f"weight/{name}"] = master
        for state in states_of(kind):
            whole = utils.safe_get_full_optimizer_state(parameter, state)
            if whole is not None:
                found[f"{state}/{name}"] = whole
                continue
            low = getattr(inner, "fp16_groups", None)
            held = parameter
            if low is not None:  # the optimizer that wraps another one at stage 0
                at = [(g, i) for g, group in enumerate(low) for i, p in enumerate(group) if p is parameter]
                held = inner.fp32_groups[at[0][0]][at[0][1]]
                found[f"weight/{name}"] = held
            basic = getattr(inner, "optimizer", inner)
            found[f"{state}/{name}"] = basic.state[held][state]
    return {name: value.detach().clone().contiguous() for name, value in found.items()}


def _train(rank: int, ranks: int, port: int, name: str) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    deepspeed = importlib.import_module("deepspeed")
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True  # torch computes it on the CPU, slowly
    options = CASES[name]
    kind = options.get("kind", "AdamW")
    model = make_model()
    classes: dict[str, Any] = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=classes[kind](groups_of(model, kind), lr=1e-3), config=_config(options)
    )
    for step in range(STEPS):
        engine.backward(engine(batch(step, rank)))
        engine.step()
    folder = HERE / f"deepspeed-{name}"
    engine.save_checkpoint(str(folder), client_state={"epoch": 2})
    expected = _expected(deepspeed, engine, kind)
    if rank == 0:
        files = importlib.import_module("safetensors.torch")
        if "like" in options:
            expected = files.load_file(str(HERE / f"deepspeed-{options['like']}" / "expected.safetensors"))
            for name, parameter in engine.module.named_parameters():
                assert torch.equal(parameter, expected[f"weight/{name}"])
        files.save_file(expected, str(folder / "expected.safetensors"))
        for script in folder.glob("*.py"):
            script.unlink()
    engine.destroy()


def main() -> None:
    """Make the named checkpoints, or all."""
    parser = argparse.ArgumentParser(description="Make the DeepSpeed checkpoints that tests read.")
    parser.add_argument("names", nargs="*", choices=[[], *CASES], metavar="NAME", default=[])
    for name in parser.parse_args().names or CASES:
        shutil.rmtree(HERE / f"deepspeed-{name}", ignore_errors=True)
        ranks = CASES[name].get("ranks", RANKS)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        spawn(_train, args=(ranks, port, name), nprocs=ranks)


if __name__ == "__main__":
    main()
