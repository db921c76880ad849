"""The models, data and training runs that tests share: one definition for the oracle and for the engine."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardengine
from shardengine.comm import mesh as mesh_module
from shardengine.optim.lion import Lion
from shardengine.sharding import slices_of
from tests import oracle

LossOf = Callable[[Any, int, int, int], Any]
"""``loss_of(model, step, rank, micro)``."""
VOCAB, LENGTH = 51, 12
CLIP = 0.7


class Mlp(nn.Module):
    """Odd sizes, a tied matrix, a 0-dim parameter, fewer elements than ranks in some."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(7, 13)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(13, 29), nn.Tanh(), nn.Linear(29, 13)) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.25))
        self.out = nn.Linear(13, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = x + block(x) * self.scale
        return self.out(x)


def make_mlp() -> nn.Module:
    torch.manual_seed(11)
    return Mlp()


def make_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(12)
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=20, n_layer=2, n_head=2, use_cache=False,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()


def make_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(13)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=LENGTH, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


MODELS = {"mlp": make_mlp, "gpt2": make_gpt2, "llama": make_llama}


def seed_of(step: int, rank: int, micro: int) -> int:
    return 1 + micro + 100 * rank + 10_000 * step


def loss_of(model: Any, step: int, rank: int, micro: int) -> Tensor:
    """The loss of one micro-batch; data and dropout depend on (step, rank, micro) alone."""
    torch.manual_seed(seed_of(step, rank, micro))
    bare: Any = getattr(model, "module", model)
    if isinstance(bare, Mlp):
        x, y = torch.randn(5, 7), torch.randn(5, 3)
        return (model(x.to(bare.inp.weight.dtype)) - y).square().mean()
    ids = torch.randint(0, VOCAB, (2, LENGTH))
    return model(input_ids=ids, labels=ids).loss


def groups_of(model: nn.Module, kind: str) -> list[dict[str, Any]]:
    """Two groups: matrices with weight decay, the rest without and with another learning rate."""
    decay = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    rest = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    if kind == "SGD":
        common: dict[str, Any] = {"momentum": 0.9, "dampening": 0.0, "nesterov": False}
        return [{"params": decay, "lr": 0.05, "weight_decay": 0.1, **common},
                {"params": rest, "lr": 0.02, "weight_decay": 0.0, **common}]  # fmt: skip
    if kind == "Lion":
        common = {"betas": (0.9, 0.95)}
        return [{"params": decay, "lr": 1e-3, "weight_decay": 0.1, **common},
                {"params": rest, "lr": 2e-4, "weight_decay": 0.0, **common}]  # fmt: skip
    common = {"betas": (0.9, 0.95), "eps": 1e-8}
    return [{"params": decay, "lr": 1e-2, "weight_decay": 0.1, **common},
            {"params": rest, "lr": 2e-3, "weight_decay": 0.0, **common}]  # fmt: skip


def make_optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    groups = [group for group in groups_of(model, kind) if group["params"]]
    classes = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam, "SGD": torch.optim.SGD, "Lion": Lion}
    return classes[kind](groups)


@functools.lru_cache(maxsize=64)
def truth(
    model: str, kind: str, ranks: int, micros: int, order: str, steps: int = 10, clip: float = CLIP, **precision: Any
) -> oracle.Trace:
    """The oracle's answer, computed once. precision: its options; "scaling" are the arguments of its Scaler."""
    precision = {**groups_told(order), **precision}
    network = MODELS[model]()
    if (scaling := precision.pop("scaling", None)) is not None:
        precision["scaler"] = oracle.Scaler(*scaling)
    return oracle.train(
        network, loss_of, ranks=ranks, micros=micros, steps=steps, kind=kind, groups=groups_of(network, kind),
        order=order if micros > 1 else "full", clip=clip, **precision,
    )  # fmt: skip


STAGES: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3k": {"stage": 3, "stage3_reshard_after_forward": False},
    "3": {"stage": 3},
}
HYBRID: dict[str, dict[str, Any]] = {
    **{f"{name} hybrid": {**STAGES[name], "shard_group_size": 2} for name in ("1", "2", "3k", "3")},
    "3 hpZ": {"stage": 3, "zero_hpz_partition_size": 2},
}
"""The stages of hybrid meshes, in shard groups of two: on four ranks."""


def groups_told(order: str) -> dict[str, Any]:
    """What the oracle is told of shard groups, where the order of sums asks for them; the others need none."""
    return {"inside": 2} if order == "inside" else {}


TIER: dict[str, Any] = json.loads(os.environ.get("SHARDENGINE_TEST_TIER", "{}"))
"""What every config says of tiers: tests that know nothing of them must pass with any."""
LETTER = {"0": "full", "1": "full", "2": "sharded", "3k": "sharded", "3": "sharded"}
LETTER |= {"1 hybrid": "full", "2 hybrid": "inside", "3k hybrid": "inside", "3 hybrid": "inside", "3 hpZ": "sharded"}


def config_of(stage: str, micros: int = 1, **options: Any) -> dict[str, Any]:
    """A config; options "zero" are merged into zero_optimization."""
    zero = {"reduce_bucket_size": 4096, **(STAGES | HYBRID)[stage], **TIER, **options.pop("zero", {})}
    base = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": micros, "gradient_clipping": CLIP}
    return {**base, "zero_optimization": zero, **options}


@functools.lru_cache(maxsize=1)
def mesh_of_this_process() -> mesh_module.Mesh:
    """One mesh for all engines of a rank process: groups are expensive to build."""
    return mesh_module.build(torch.device("cpu"), timeout_s=60)


def make_engine(
    model: nn.Module, config: dict[str, Any], kind: str | None = "AdamW", **kwargs: Any
) -> shardengine.Engine:
    mesh = mesh_of_this_process() if dist.is_initialized() else None
    optimizer = make_optimizer(model, kind) if kind is not None else None
    return shardengine.initialize(model, config, optimizer=optimizer, mesh=mesh, **kwargs)


def copy_out(tensor: Tensor) -> Tensor:
    """A copy on the CPU that may leave the process (a view of a flat buffer must not be turned into numpy)."""
    return tensor.detach().clone().cpu()


def local_state(engine: shardengine.Engine) -> list[tuple[str, str, int, Any]]:
    """(parameter name, state name, first element, values) of everything this rank's optimizer holds."""
    optimizer = engine.optimizer
    assert optimizer is not None
    core = engine._core
    held = (
        part
        for bucket in (state.bucket for state in core.reducer.buckets)
        for part in slices_of(core.layout, bucket.layout, bucket.state_interval, optimizer.held(bucket))
    )
    whole = [(spec.name, key, 0, value) for spec, values in optimizer.whole_states() for key, value in values.items()]
    found = [*((part.name, part.key, part.first, part.values) for part in held), *whole]
    return [(name, key, first, copy_out(value).float().reshape(-1).numpy()) for name, key, first, value in found]


def steps_of(engine: shardengine.Engine) -> list[int]:
    """The step count of each parameter."""
    assert engine.optimizer is not None
    return engine.optimizer.steps


def digest(pieces: list[list[tuple[str, str, int, Any]]]) -> str:
    """SHA-256 over the whole of every parameter and state, put together from all ranks' pieces."""
    total = hashlib.sha256()
    for (name, key), flat in sorted(assemble(pieces).items()):
        total.update(f"{name}/{key}".encode())
        total.update(flat.tobytes())
    return total.hexdigest()


def assemble(pieces: list[list[tuple[str, str, int, Any]]]) -> dict[tuple[str, str], Any]:
    """Whole flat arrays from all ranks' pieces; where ranks hold the same elements they must hold the same bits."""
    import numpy as np

    whole: dict[tuple[str, str], dict[int, Any]] = {}
    for rank_pieces in pieces:
        for name, key, first, values in rank_pieces:
            known = whole.setdefault((name, key), {}).setdefault(first, values)
            assert known.tobytes() == values.tobytes(), f"ranks disagree about {name}/{key} from element {first}"
    return {at: np.concatenate([part for _, part in sorted(parts.items())]) for at, parts in whole.items()}


def run_micro_batch(engine: Any, loss_of: LossOf, step: int, micro: int) -> float:
    """The ordinary micro-batch: forward, backward, ``engine.step()``. Its loss."""
    loss = loss_of(engine, step, engine.rank, micro)
    engine.backward(loss)
    engine.step()
    return float(loss.item())


def run_steps(
    engine: shardengine.Engine,
    steps: int,
    loss_of: LossOf = loss_of,
    run: Callable[[Any, LossOf, int, int], float] = run_micro_batch,
    before: Callable[[int], None] = lambda step: None,
    after: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Train, in one rank: losses of all micro-batches, norms, weights (whole, rank 0), this rank's optimizer state.

    run: one micro-batch, as ``run_micro_batch`` does it · before: called with the number of each step before it ·
    after: called when all are done.
    """
    losses: list[list[float]] = []
    norms: list[float | None] = []
    scales: list[float] = []
    skipped: list[int] = []
    for step in range(steps):
        before(step)
        losses.append([run(engine, loss_of, step, micro) for micro in range(engine.gradient_accumulation_steps())])
        norms.append(engine.get_global_grad_norm())
        scales.append(engine.get_loss_scale())
        skipped += [] if engine.was_step_applied() else [step]
    after()
    weights = {name: copy_out(value).float().numpy() for name, value in engine.state_dict().items()}
    scaling = {"scales": scales, "skipped": skipped}
    return {"losses": losses, "norms": norms, "weights": weights, "state": local_state(engine), **scaling}


def train_engine(model: str, kind: str, config: dict[str, Any], steps: int = 10) -> dict[str, Any]:
    """One rank's run of the shared training: losses, norms, weights (rank 0) and this rank's optimizer state."""
    engine = make_engine(MODELS[model](), config, kind)
    result = run_steps(engine, steps)
    engine.close()
    return result
