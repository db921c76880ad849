"""The ranks of ``convergence.py``: the text, the precisions, and the training of the same small model in each of them.

Owns: the setting, what each precision asks of the engine, and what one run leaves behind (curves, and what the engine
says it trained in). The loop, the order of the data, the schedule and the parameter groups are those of ``shardengine
train``; the vocabulary alone is smaller. Knows nothing of bounds and reports.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

import shardengine
from benchmarks.ranks import collected, joined, leave
from benchmarks.workload import CLIP, Setting, make_model
from shardengine import kernels
from shardengine.app import corpus, data, evaluation, loop, reading
from shardengine.app.rank_sums import RankSums
from shardengine.app.settings import BUILTIN
from shardengine.app.stopping import StopRequest
from shardengine.comm import mesh

BASE = "fp32"
OPTIMIZER = {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
"""Of ``configs/demo.json``."""
VALIDATIONS = 4
"""In a run, beside the one before its first step."""

PRECISIONS: dict[str, dict[str, Any]] = {
    BASE: {},
    "fp16": {"fp16": {"enabled": True}},
    "bf16": {"bf16": {"enabled": True}},
    "bf16-pure-stochastic": {"bf16": {"enabled": True, "master_weights": False, "stochastic_rounding": True}},
    "bf16-pure": {"bf16": {"enabled": True, "master_weights": False}},
    "bf16-autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "states-bf16": {"data_types": {"optimizer_state_dtype": "bf16"}},
    "states-8bit": {"data_types": {"optimizer_state_dtype": "8bit"}},
    "states-8bit-nearest": {"data_types": {"optimizer_state_dtype": "8bit"}},
    "states-8bit-zero": {},
    "bf16-states-bf16": {"bf16": {"enabled": True}, "data_types": {"optimizer_state_dtype": "bf16"}},
    "bf16-states-8bit": {"bf16": {"enabled": True}, "data_types": {"optimizer_state_dtype": "8bit"}},
    "bf16-split-states-8bit": {
        "bf16": {"enabled": True, "split_masters": True},
        "data_types": {"optimizer_state_dtype": "8bit"},
    },
    "fp32-slow": {},
    "slow-states-8bit": {"data_types": {"optimizer_state_dtype": "8bit"}},
    "slow-states-8bit-nearest": {"data_types": {"optimizer_state_dtype": "8bit"}},
    "hook-fp16": {"comm_hook": {"name": "fp16"}},
    "hook-bf16": {"comm_hook": {"name": "bf16"}},
    "hook-int8": {"comm_hook": {"name": "int8"}},
    "hook-int8-alone": {"comm_hook": {"name": "int8", "params": {"error_feedback": False}}},
    "hook-int4": {"comm_hook": {"name": "int4"}},
    "hook-power_sgd": {"comm_hook": {"name": "power_sgd", "params": {"rank": 4, "start_step": 20}}},
    "hook-power_sgd-16": {"comm_hook": {"name": "power_sgd", "params": {"rank": 16, "start_step": 20}}},
    "hook-power_sgd-torch": {},
    "hook-noop": {"comm_hook": {"name": "noop"}},
}
"""What the config says beside the optimizer and the stage."""
SLOW = frozenset({"fp32-slow", "slow-states-8bit", "slow-states-8bit-nearest"})
"""Trained with AdamW's default betas, whose second moment moves by a thousandth per step, not by a twentieth."""
BASES = (BASE, "fp32-slow")
"""What others are compared with: ``base_of``."""


def base_of(precision: str) -> str:
    """The fp32 that ``precision`` is compared with: with the same betas."""
    return BASES[precision in SLOW]


@dataclass(frozen=True)
class Training:
    """One length of training. work: model, ranks and batch · rate: the highest learning rate · stage: of ZeRO."""

    work: Setting
    steps: int
    rate: float
    stage: int = 2


@dataclass(frozen=True)
class Plan:
    """What a group of ranks does. jobs: (precision, seed of the weights and of the order of the data), in turn."""

    training: Training
    jobs: tuple[tuple[str, int], ...]
    blocks: data.TokenBlocks
    folder: str = ""


@dataclass
class Run:
    """What one precision made of one seed.

    losses: over the global batch, by step · validation: (step, loss) · loss_scales: (step, scale) at first and after
    each change · skipped: steps left out after an overflow · parameter_dtypes: of the weights that forward reads ·
    computed_in: what a layer of the first block hands on · state_bytes: of optimizer states and master weights over
    all ranks, per parameter.
    """

    precision: str
    seed: int
    losses: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    loss_scales: list[tuple[int, float]] = field(default_factory=list)
    skipped: int = 0
    parameter_dtypes: list[str] = field(default_factory=list)
    computed_in: str = ""
    state_bytes: float = 0.0
    seconds: float = 0.0


class NeverStopped(StopRequest):
    """For the command's loop: signals keep their meaning, so that an interrupted benchmark ends at once."""

    def __init__(self) -> None:
        """Take over nothing."""

    def __bool__(self) -> bool:
        return False


def read_blocks(vocabulary: int, length: int) -> data.TokenBlocks:
    """The built-in text of ``shardengine train`` in rows of ``length``, by a byte-level BPE of ``vocabulary`` tokens.

    The tokenizer is trained on the training part, as the command's is (``app/corpus.py``), of at least 257 tokens.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[corpus.END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text, _ = corpus.split(corpus.read_text(BUILTIN))
    bpe.train_from_iterator([text], trainer)
    return reading.load_blocks(BUILTIN, lambda part: list(bpe.encode(part).ids), length)


def unigram_loss(blocks: data.TokenBlocks, vocabulary: int) -> float:
    """What the validation rows cost, in nats per token, a model that knows how frequent each token is and nothing else.

    Frequencies are the training rows', each count plus one.
    """
    counts = torch.bincount(blocks.training.input_ids.flatten(), minlength=vocabulary).double() + 1
    predicted = blocks.validation.input_ids[:, 1:].flatten()
    return float(-(counts / counts.sum()).log()[predicted].mean())


def config_of(training: Training, precision: str, seed: int) -> dict[str, Any]:
    """The engine's config of one run."""
    slow = {"betas": [0.9, 0.999]} if precision in SLOW else {}
    return {
        "train_micro_batch_size_per_gpu": training.work.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": training.rate, **OPTIMIZER, **slow}},
        "zero_optimization": {"stage": training.stage},
        "seed": seed,
        **PRECISIONS[precision],
    }


def rounded_to_nearest(update: Callable[..., None], flats: dict[str, Tensor], *given: Any, **options: Any) -> None:
    """An update without random bits for states."""
    update(flats, *given, **options | {"state_noise": None})


def small_become_zero(update: Callable[..., None], flats: dict[str, Tensor], *given: Any, **options: Any) -> None:
    """An update of fp32 states whose second moment is then rounded to 255 equal steps per 256 elements, some to 0."""
    update(flats, *given, **options)
    for block in flats["exp_avg_sq"].split(256):
        largest = block.max()
        if largest > 0:
            block.copy_((block * (255 / largest)).round_() * (largest / 255))


def register_hook(engine: shardengine.Engine, precision: str) -> None:
    """torch's PowerSGD, to compare ours with."""
    if precision == "hook-power_sgd-torch":
        state = powerSGD_hook.PowerSGDState(None, 4, start_powerSGD_iter=20)
        engine.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


ALTERED = {
    "states-8bit-nearest": rounded_to_nearest,
    "slow-states-8bit-nearest": rounded_to_nearest,
    "states-8bit-zero": small_become_zero,
}
"""What takes the place of the kernels' update in precisions that the engine does not have."""


def altered(precision: str) -> contextlib.AbstractContextManager[Any]:
    """Updates meanwhile are those of ``precision``."""
    if precision not in ALTERED:
        return contextlib.nullcontext()
    return mock.patch.object(kernels, "update", functools.partial(ALTERED[precision], kernels.update))


def train(plan: Plan, precision: str, seed: int, rank_sums: RankSums) -> Run:
    """One run from its first weights to its last validation; collective over the ranks of ``rank_sums``."""
    training, run, began = plan.training, Run(precision, seed), time.perf_counter()
    model = make_model(training.work, seed=seed)
    engine = shardengine.initialize(
        model,
        config_of(training, precision, seed),
        model_parameters=loop.decay_groups(model),
        lr_scheduler=lambda optimizer: loop.warmup_cosine(optimizer, training.steps),
        mesh=rank_sums.mesh,
    )
    register_hook(engine, precision)
    run.parameter_dtypes = sorted({name_of(parameter.dtype) for parameter in model.parameters()})
    run.loss_scales.append((0, engine.get_loss_scale()))
    first: nn.Module = model.transformer.h[0].mlp  # type: ignore[union-attr, index]
    handle = first.register_forward_hook(lambda _module, _inputs, output: seen(run, output))
    run.validation.append((0, evaluation.validate(engine, plan.blocks.validation, rank_sums)))
    handle.remove()
    batches = data.training_batches(plan.blocks.training, training.work.batch, engine.rank, engine.world_size, seed)
    interval = max(1, training.steps // VALIDATIONS)
    for progress in loop.steps(engine, batches, training.steps, rank_sums, NeverStopped()):
        run.losses.append(round(progress.loss, 6))
        if engine.get_loss_scale() != run.loss_scales[-1][1]:
            run.loss_scales.append((progress.step, engine.get_loss_scale()))
        if progress.step % interval == 0 or progress.step == training.steps:
            run.validation.append((progress.step, evaluation.validate(engine, plan.blocks.validation, rank_sums)))
    run.skipped = engine.skipped_steps
    (run.state_bytes,) = rank_sums.sums([engine.memory()["live_state_bytes"] / training.work.parameters()])
    engine.close()
    run.seconds = time.perf_counter() - began
    return run


def name_of(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` becomes ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def seen(run: Run, output: Tensor) -> None:
    """Keep the dtype of what a module computed."""
    run.computed_in = name_of(output.dtype)


def rank_main(rank: int, plan: Plan) -> None:
    """One rank from start to end: join the group, train, leave what it found in ``plan.folder``."""
    with joined(rank, plan.training.work.ranks, plan.folder):
        rank_sums = RankSums(mesh.build(torch.device("cpu")))
        runs = []
        for number, (precision, seed) in enumerate(plan.jobs):
            with altered(precision):
                run = train(plan, precision, seed, rank_sums)
            runs.append(vars(run))
            if rank == 0:
                done = f"{number + 1} of {len(plan.jobs)}: {precision}, seed {seed}, {run.seconds:.0f} s"
                print(f"{done}, validation loss {run.validation[-1][1]:.4f}", file=sys.stderr, flush=True)
        leave(rank, plan.folder, {"runs": runs})


def run_ranks(training: Training, jobs: Sequence[tuple[str, int]], blocks: data.TokenBlocks) -> list[Run]:
    """Start the ranks and return a run for each of ``jobs``, as rank 0 saw it."""
    with tempfile.TemporaryDirectory(prefix="shardengine-bench-") as folder:
        plan = Plan(training, tuple(jobs), blocks, folder)
        found = collected(rank_main, plan, training.work.ranks, folder)[0]
    return [Run(**run) for run in found["runs"]]
