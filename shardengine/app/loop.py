"""One rank of `shardengine train`: a training loop, to be read as an example of the library.

Owns: the order of the calls (load, initialize, resume, step, validate, save, sample). Must not know: how ranks are
started, how a stage works. Every rank makes the calls marked collective, in the same order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import shardengine
from shardengine.app import adapters, corpus, data, four_bits, global_mean, packing, planning, reading, sources
from shardengine.app.chat import Chat
from shardengine.app.evaluation import validate
from shardengine.app.rank_sums import RankSums
from shardengine.app.report import Progress, RunReport
from shardengine.app.resume import Checkpoints
from shardengine.app.settings import APART, DEFAULT_LENGTH, FROM_CONFIG, Settings
from shardengine.app.stopping import StopRequest
from shardengine.config import Config
from shardengine.errors import UsageError
from shardengine.loading import NotInSlices

SAMPLE_TOKENS = 48
_VALIDATIONS = 10


def train(settings: Settings, config: Config, rank_sums: RankSums) -> bool:
    """Train as ``settings`` and ``config`` specify; collective over the ranks of ``rank_sums``.

    Returns whether this rank stopped early because another one was asked to. Raises UsageError for a model or a corpus
    that cannot be used.
    """
    stop = StopRequest()
    tokenizer, model = load_model(settings, config.seed, four_bits.dtype_of(config), rank_sums.mesh.device)
    blocks = load_data(settings, tokenizer, model)
    config = planning.decided(settings, config, model, blocks, rank_sums.mesh)
    settings = settings.with_steps(len(blocks.training), config.train_batch_size or 1)
    out = RunReport(settings, steps=settings.steps, every=config.steps_per_print, enabled=rank_sums.rank == 0)
    plan = planning.of_run(settings, config, model, blocks, rank_sums)  # on rank 0: the memory that this run needs

    engine = shardengine.initialize(
        model,
        replace(sources.in_folder(config, settings.output), notices=()),  # the header prints them
        model_parameters=decay_groups(model),
        lr_scheduler=None if config.scheduler else lambda optimizer: warmup_cosine(optimizer, settings.planned_steps),
        mesh=rank_sums.mesh,
    )
    torch.manual_seed(config.seed + engine.rank)  # dropout differs between ranks; weights are alike on all

    checkpoints = Checkpoints(engine, settings, blocks, rank_sums)
    checkpoints.begin()  # a resumed run: weights, optimizer, schedule and counters are as they were, on any ranks

    out.header(engine, blocks, config.notices, plan.line)
    if settings.resume is None:
        out.validation(0, validate(engine, blocks.validation, rank_sums))
    batches = data.training_batches(
        blocks.training,
        engine.train_micro_batch_size_per_gpu(),
        engine.rank,
        engine.world_size,
        config.seed,
        start=engine.global_samples,
    )
    interval = settings.validate_every or max(1, settings.steps // _VALIDATIONS)
    progress = Progress(engine.global_steps)
    with engine.trace(settings.trace) if settings.trace else nullcontext():
        watching = plan.watching(engine, settings.steps)
        for progress in steps(engine, batches, settings.steps, rank_sums, stop, watching):
            out.step(engine, progress)
            if progress.step % interval == 0 or progress.step == settings.steps or progress.stopped:
                out.validation(progress.step, validate(engine, blocks.validation, rank_sums))
            checkpoints.after(progress)

    engine.average_replicas()
    engine.save_pretrained(settings.output / "model")  # collective: rank 0 writes what the others send
    out.saved(tokenizer)
    out.summary(engine, progress, *plan.measured(engine))
    prompt = blocks.validation.prompt(len(blocks.validation) // 2)
    new = max(1, min(SAMPLE_TOKENS, blocks.length - len(prompt)))
    out.sample(tokenizer, prompt, sample(engine, prompt, new, tokenizer))
    engine.close()  # waits for the last checkpoint
    checkpoints.close()
    return progress.stopped and not stop.signalled


def steps(
    engine: shardengine.Engine,
    batches: Iterator[data.Batch],
    count: int,
    rank_sums: RankSums,
    stop: StopRequest,
    watching: Callable[[int], AbstractContextManager[object]] = lambda _: nullcontext(),
) -> Iterable[Progress]:
    """Run optimizer steps up to number ``count`` and yield after each. Ends early if any rank was asked to stop.

    watching: returns, for a step's number, a context manager to run the step in.
    """
    for number in range(engine.global_steps + 1, count + 1):
        engine.train()
        rate = engine.get_lr()[0]
        started, waited = time.perf_counter(), engine.traffic()["exposed_s_total"]
        with watching(number):
            total = torch.zeros((), device=engine.device)
            window = global_mean.fetch(batches, engine.gradient_accumulation_steps(), rank_sums)
            for batch, weight in zip(window.batches, window.weights, strict=True):
                batch = {name: tensor.to(engine.device) for name, tensor in batch.items()}
                loss = engine(**batch, use_cache=False).loss * weight  # so that every valid token counts the same
                engine.backward(loss)
                engine.step()  # updates the weights after the last micro-batch of the window; before it only counts
                total += loss.detach()
        mean = total.item() / engine.gradient_accumulation_steps()
        loss_sum, asked = rank_sums.sums([mean, float(bool(stop))])  # so that all ranks stop after the same step
        seconds, waited = time.perf_counter() - started, engine.traffic()["exposed_s_total"] - waited
        yield Progress(number, loss_sum / engine.world_size, rate, seconds, asked > 0, window.tokens, waited)
        if asked:
            return


@torch.no_grad()
def sample(engine: shardengine.Engine, prompt: torch.Tensor, length: int, tokenizer: Any) -> torch.Tensor:
    """Return ``length`` sampled tokens after ``prompt`` [tokens]; collective, with the same tokens on every rank.

    At stage 3 every forward gathers weights from all ranks. Equal seeds and a fixed length keep the ranks in step.
    """
    engine.eval()
    torch.manual_seed(engine.config.seed)
    end = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ids = prompt.unsqueeze(0).to(engine.device)
    output = engine.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        min_new_tokens=length,
        max_new_tokens=length,
        do_sample=True,
        temperature=0.8,
        top_k=40,
        pad_token_id=0 if end is None else end,
    )
    new: torch.Tensor = output[0, len(prompt) :].cpu()
    return new


def load_model(
    settings: Settings,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    *,
    values: bool = True,
) -> tuple[Any, Any]:
    """Return (tokenizer, causal LM in fp32) from a Hugging Face directory or name.

    The parent has built the default model. The settings choose the weights and the adapters; random ones come from
    ``seed``. The model has no memory: ``initialize`` gives each rank its part, in the dtype of the run's config.
    Quantised weights, and files other than safetensors, cannot be read in parts; such a model is whole on every rank.

    dtype, device: of the run, for a packed base (``--lora bits=4``) · values: if False, the model is on torch's meta
    device and only its config is read, unless its files are quantised.
    """
    from transformers import AutoConfig, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    name = settings.model or str(corpus.default_model(settings.model_cache))
    tokenizer = AutoTokenizer.from_pretrained(name)
    config = AutoConfig.from_pretrained(name)
    packed = adapters.packs_base(settings.lora)
    if packed:
        four_bits.refuse_quantised(config, name)
    make = partial(
        _make, name, config, tokenizer, settings, seed, (dtype, device or torch.device("cpu")) if packed else None
    )
    if (four_bits.is_quantised(config) and settings.init != FROM_CONFIG) or (packed and values):
        model = make()
    elif not values:
        with torch.device("meta"):
            model = make(random=True)
    else:
        try:
            with shardengine.meta_init():
                model = make(random=settings.init == FROM_CONFIG)
        except NotInSlices:
            model = make()
    if settings.packing == APART and values and (reason := packing.leaks(small := packing.small(config))):
        raise UsageError(
            f"--packing {APART}: {type(small).__name__} cannot keep the documents of a row apart, because {reason}; "
            "leave --packing out",
            code="packing-documents-not-apart",
        )
    return tokenizer, model


def _make(
    name: str,
    config: Any,
    tokenizer: Any,
    settings: Settings,
    seed: int,
    packed: tuple[torch.dtype, torch.device] | None,
    *,
    random: bool = False,
) -> Any:
    """Make the model of ``load_model``, with its own or random weights.

    packed: the run's dtype and device, for 4 bits.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    if random:
        model = AutoModelForCausalLM.from_config(config, dtype=packed[0] if packed else torch.float32)
        if packed is not None:
            four_bits.pack_without_values(model, packed[0])
    elif packed is not None:
        model = four_bits.load(name, *packed)
    else:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise UsageError(
            f"--model {name}: its tokenizer has {len(tokenizer)} tokens, its embedding only {rows} rows; "
            "expected a row for every token",
            code="tokenizer-beyond-embedding",
        )
    if settings.lora is not None:
        torch.manual_seed(seed)
        model = adapters.attach(model, adapters.parse(settings.lora))
    return model


def load_data(settings: Settings, tokenizer: Any, model: Any) -> data.TokenBlocks:
    """Return the rows of tokens, of the settings' length, or of the model's positions if they are fewer.

    UsageError if --length asks for more than the positions, except in a resumed run, which keeps its rows.
    """
    positions = int(getattr(model.config, "max_position_embeddings", None) or settings.length)
    if settings.length > positions and settings.length != DEFAULT_LENGTH and settings.resume is None:
        raise UsageError(
            f"--length {settings.length}: {type(model).__name__} has {positions} positions; expected --length "
            f"{positions} or less",
            code="length-beyond-positions",
        )
    length = min(settings.length, positions)
    return reading.load_blocks(
        settings.data,
        lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
        length,
        tokenizer.eos_token_id,
        begin_tokens(tokenizer),
        Chat(tokenizer).encode,
        reading.How(settings.packing, settings.too_long, settings.held_out),
    )


def begin_tokens(tokenizer: Any) -> list[int]:
    """Return the begin-of-text token if the tokenizer puts one before a text, as Llama's does; otherwise none."""
    return [token for token in tokenizer("")["input_ids"][:1] if token == tokenizer.bos_token_id]


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return two parameter groups: matrices with the optimizer's weight decay, vectors (biases, norms) with none."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in trainable if parameter.ndim >= 2]},
        {"params": [parameter for parameter in trainable if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def warmup_cosine(optimizer: torch.optim.Optimizer, count: int) -> LambdaLR:
    """Return a schedule: linear warm-up over the first tenth of ``count`` steps, then a cosine to 0.1 of the rate."""
    warmup = max(1, count // 10)

    def ratio(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, count - warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    return LambdaLR(optimizer, ratio)
