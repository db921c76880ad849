"""Programs of Trainer and of accelerate on a tiny model, each the same under DDP and over our engine.

Importing this file takes seconds: processes that fork runs do it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import GradScalerKwargs, set_seed
from peft import AdaLoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

from shardengine.config import STAGE
from shardengine.errors import UsageError
from shardengine.integrations.accelerate import ShardAccelerator, ShardOptimizer
from shardengine.integrations.loading import load_pretrained
from shardengine.integrations.transformers import ShardTrainer, ShardTrainerMixin, _take_over
from shardengine.planner import automatic
from shardengine.start import initialize
from tests.integrations.contract import gone
from tests.support.tiny_llama import LENGTH, Rows, Run, Say, arguments_of, load, logged, make_model

__all__ = ["Run", "make_model"]


def private_mib() -> float:
    """Memory that this process shares with nobody."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1024


def load_large(say: Say, rank: int, folder_of_small: str, run: Run) -> None:
    """Says what loading 48 MiB takes: in the files' dtype, cast, and cast on rank 0 alone; then trains a step.

    Rank 0 makes the files first: its allocator may have room left.
    """
    folder = Path(run.output) / "large"
    torch.distributed.init_process_group("gloo")
    if rank == 0:
        shape = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1, "num_attention_heads": 2}
        LlamaForCausalLM(LlamaConfig(vocab_size=10000, **shape)).save_pretrained(folder)
    torch.distributed.barrier()
    LlamaForCausalLM.from_pretrained(folder_of_small)  # what the first load imports
    taken, models = [], []
    for loads in (
        lambda: LlamaForCausalLM.from_pretrained(folder),
        lambda: LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16),
        lambda: load_pretrained(LlamaForCausalLM, folder, dtype=torch.bfloat16),
    ):
        before = private_mib()
        models.append(loads())
        taken.append(private_mib() - before)
    say(taken)
    losses = []
    for model in models[1:]:
        accelerator = ShardAccelerator(engine_config={**config_of(run), "bf16": {"enabled": True}}, cpu=True)
        engine, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(2):
            tokens = torch.arange(rank + step, rank + step + 8)[None]
            loss = engine(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        accelerator.free_memory(engine)
    say(losses)


def config_of(run: Run) -> dict[str, Any]:
    """What a user writes."""
    zero = {"stage": run.stage, **run.config.get("zero_optimization", {})}
    return {**run.config, "zero_optimization": zero}


def make_trainer(run: Run, model: Any) -> Any:
    """Stock Trainer, or ours."""
    given = {"model": model, "args": arguments_of(run, use_cpu=True), "train_dataset": Rows(), "eval_dataset": Rows()}
    return Trainer(**given) if run.stage is None else ShardTrainer(**given, engine_config=config_of(run))


def runs_out_of_memory(trainer: Any) -> None:
    """With two samples, in the second step."""
    compute_loss = trainer.compute_loss

    def compute(model: Any, inputs: Any, **options: Any) -> Any:
        if len(inputs["input_ids"]) > 1 and model.training and trainer.state.global_step == 1:
            raise RuntimeError("CUDA out of memory.")
        return compute_loss(model, inputs, **options)

    trainer.compute_loss = compute


def train(say: Say, rank: int, folder: str, run: Run) -> None:
    """Train the model of ``folder``; says the log history. tour: evaluates before, generates, trains again, then by
    another trainer at another stage. With auto_find_batch_size the first size does not fit."""
    trainer = make_trainer(run, load(folder, lora=run.lora))
    logs: list[dict[str, Any]] = []
    if run.options.get("auto_find_batch_size"):
        runs_out_of_memory(trainer)
    if run.tour:  # transformers 5.23 leaves a model that it has evaluated out of DDP: there another one is evaluated
        first = make_trainer(run, load(folder)) if run.stage is None else trainer
        first.evaluate()
        logs += first.state.log_history
    trainer.train(resume_from_checkpoint=run.resume)
    logs += trainer.state.log_history
    if run.tour:
        prompt = torch.tensor([[1, 2 + rank]])
        made = trainer.model.generate(prompt, max_new_tokens=2 + 3 * rank, do_sample=False, pad_token_id=0)
        predicted = trainer.predict(Rows())
        logs.append({"loss": predicted.metrics["test_loss"], "step": int(predicted.predictions.argmax(-1).sum())})
        trainer.train()
        logs += trainer.state.log_history
        assert made.shape[1] == 4 + 3 * rank
        stage = None if run.stage is None else 3 - run.stage
        if stage is None:
            vars(trainer.model).pop("_is_accelerate_prepared", None)  # predict() has set it
        trainer = make_trainer(replace(run, stage=stage), trainer.model)
        trainer.train()
        logs += trainer.state.log_history
    trainer.save_model(str(Path(run.output) / "final"))
    say(logged(logs))


class ShortFirst(Rows):
    """The first rows are shorter than those after them."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = super().__getitem__(index)
        return {name: each[: LENGTH // 6] for name, each in row.items()} if index < 2 else row


class OwnLoss(ShardTrainer):
    """With a loss of which nobody else knows what it is."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return super().compute_loss(*args, **kwargs)


def planned(say: Say, rank: int, folder: str, run: Run) -> None:
    """Says what is logged of a plan, and the log history: with rows of one length, with short ones first, of a loss
    that is not the model's, and where nobody hears it."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    log = logging.getLogger("shardengine.integrations.transformers")
    log.addHandler(handler)
    for kind, rows, level in (
        (ShardTrainer, Rows(), logging.INFO),
        (ShardTrainer, ShortFirst(), logging.INFO),
        (OwnLoss, Rows(), logging.INFO),
        (ShardTrainer, Rows(), logging.WARNING),
    ):
        log.setLevel(level)
        arguments = arguments_of(run, use_cpu=True, save_strategy="no")
        trainer: Any = kind(
            load(folder), arguments, train_dataset=rows, eval_dataset=Rows(), data_collator=padded,
            engine_config=config_of(run),
        )  # fmt: skip
        trainer.train()
        say(([text for text in heard if "plan" in text], logged(trainer.state.log_history)))
        heard.clear()
        trainer.engine.close()


def decided(say: Say, rank: int, folder: str, run: Run) -> None:
    """Says for which micro-batch a stage was decided, and that of the engines: of a trainer, in two trainings, and of
    an accelerator of its own."""
    tasks: list[Any] = []

    def decide(task: Any, mesh: Any) -> dict[str, int]:
        tasks.append(task)
        return {STAGE: 1}

    automatic.decide = decide  # type: ignore[assignment]
    trainer: Any = ShardTrainer(
        load(folder), arguments_of(run, use_cpu=True, save_strategy="no"), train_dataset=Rows(),
        eval_dataset=Rows(), engine_config={"zero_optimization": {"stage": "auto"}},
    )  # fmt: skip
    stages = []
    for _ in range(2):
        trainer.train()
        stages.append(trainer.engine.config.zero_optimization.stage)
    shape = tuple(tasks[0].batch()["input_ids"].shape)
    trainer.engine.close()
    accelerator = ShardAccelerator(engine_config={"zero_optimization": {"stage": "auto"}}, cpu=True)
    model = load(folder)
    engine, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    say((shape, stages, engine.config.zero_optimization.stage, [task.batch is None for task in tasks]))


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """As long as the longest one."""
    fill = {"input_ids": 0, "labels": -100}
    pad = torch.nn.utils.rnn.pad_sequence
    return {name: pad([row[name] for row in rows], batch_first=True, padding_value=fill[name]) for name in fill}


def make_accelerator(run: Run) -> Any:
    """Stock Accelerator, or ours."""
    given = {"gradient_accumulation_steps": run.k, "cpu": True, **run.options}
    return Accelerator(**given) if run.stage is None else ShardAccelerator(engine_config=config_of(run), **given)


def make_loop(accelerator: Any, model: Any) -> tuple[Any, ...]:
    """A model, its optimizer, a loader and a schedule, prepared: accelerate steps it once per rank."""
    groups = [
        {"params": [p for p in model.parameters() if p.requires_grad and p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.requires_grad and p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=2, shuffle=True)
    return tuple(accelerator.prepare(model, optimizer, loader, schedule))


def run_epoch(accelerator: Any, prepared: tuple[Any, ...]) -> list[dict[str, Any]]:
    """As accelerate's own examples; the last window may be shorter."""
    model, optimizer, loader, schedule = prepared
    log = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            row = {"loss": float(accelerator.gather(loss.detach()).mean()), "learning_rate": schedule.get_last_lr()[0]}
            if accelerator.sync_gradients:
                row["grad_norm"] = float(accelerator.clip_grad_norm_(model.parameters(), 0.7))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        log.append(row)
    return log


def loop(say: Say, rank: int, folder: str, run: Run) -> None:
    """Two epochs, with the state saved twice after the first one; says the log. resume: only the second one.

    tour: the model is let go of and prepared again, and trains a third epoch.
    """
    accelerator = make_accelerator(run)
    set_seed(3)
    prepared = make_loop(accelerator, load(folder, lora=run.lora))
    state = Path(run.output) / "state"
    log: list[dict[str, Any]] = []
    if run.resume is None:
        log += run_epoch(accelerator, prepared)
        for _ in range(2):
            accelerator.save_state(str(state))
    else:
        accelerator.load_state(run.resume)
    assert not accelerator.optimizer_step_was_skipped
    log += run_epoch(accelerator, prepared)
    model = prepared[0]
    accelerator.save_model(model, str(Path(run.output) / "final"))
    whole = accelerator.get_state_dict(model)
    if run.stage is not None and not run.lora:
        assert bool(whole) == accelerator.is_main_process
    if run.tour:
        inner = accelerator.unwrap_model(model)
        prepared = accelerator.free_memory(*prepared)
        assert run.stage is None or not model.is_open
        log += run_epoch(accelerator, make_loop(accelerator, inner))
    say(log)


def save_hooks(say: Say, rank: int, folder: str, run: Run) -> None:
    """Hooks of ``save_state`` that write a model in a way of their own; says its weights per way, and what else was
    written."""
    accelerator = make_accelerator(run)
    set_seed(3)
    model, optimizer, loader = make_loop(accelerator, load(folder))[:3]
    found: dict[str, Any] = {}

    def hook(models: list[Any], weights: list[Any], place: str) -> None:
        own = accelerator.unwrap_model(models[0])
        ways = {
            "get_state_dict": accelerator.get_state_dict(models[0]),
            "weights": weights[-1],
            "unwrap": own.state_dict(),
        }
        if accelerator.is_main_process:
            found.update({way: {name: value.tolist() for name, value in state.items()} for way, state in ways.items()})
            own.save_pretrained(Path(place) / "alone")
        if run.tour:
            weights.pop()

    handle = accelerator.register_save_state_pre_hook(hook)
    batch = next(iter(loader))
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    state = Path(run.output) / "state"
    accelerator.save_state(str(state))
    handle.remove()
    accelerator.wait_for_everyone()
    say(found)
    say(sorted(path.name for path in state.iterdir() if not path.name.startswith("random_states")))


def habits(say: Say, rank: int, folder: str, run: Run) -> None:
    """Loops that do not look like accelerate's examples; says the losses of each."""
    accelerator = make_accelerator(run)

    def prepare() -> tuple[Any, Any, list[Any]]:
        model = load(folder)
        loader = torch.utils.data.DataLoader(Rows(), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader)
        return model, optimizer, list(loader)

    def expect_no_more_bytes(engine: Any) -> None:
        """Than the stage needs: gradients that stay whole are sent once per window."""
        if run.stage is not None:
            assert engine.traffic()["measured_bytes_last_step"] == engine.traffic()["formula_bytes_per_step"]

    def with_loss_backward() -> Iterator[Any]:
        model, optimizer, _ = prepare()
        for batch in accelerator._dataloaders[-1]:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                loss.backward()
                if accelerator.sync_gradients:
                    yield accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            yield loss
        expect_no_more_bytes(model)

    def accumulating_by_hand() -> Iterator[Any]:
        model, optimizer, batches = prepare()
        for number, batch in enumerate(batches):
            loss = model(**batch).loss / 2
            accelerator.backward(loss * run.k)
            if number % 2 or number + 1 == len(batches):
                yield accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            yield loss

    def without_sync() -> Iterator[Any]:
        model, optimizer, batches = prepare()
        for first, second in zip(batches[::2], batches[1::2], strict=False):
            with accelerator.no_sync(model):
                accelerator.backward(model(**first).loss)
            loss = model(**second).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            yield loss
        expect_no_more_bytes(model)
        if run.stage is not None:  # under DDP each rank would step its own way
            with accelerator.no_sync(model):
                accelerator.backward(model(**first).loss)
            optimizer.step()
            assert model.global_steps == len(batches) // 2 + 1

    def two_models() -> Iterator[Any]:
        torch.manual_seed(0)
        models = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)]
        optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in models]
        makes, judges, first, second = accelerator.prepare(*models, *optimizers)
        if run.stage is not None:
            with accelerator.no_sync(makes):
                assert judges.is_gradient_accumulation_boundary() and not makes.is_gradient_accumulation_boundary()
        for step in range(3):
            torch.manual_seed(10 * step + rank)
            noise, real = torch.randn(3, 4), torch.randn(3, 4)
            second.zero_grad()
            apart = judges(real).mean() - judges(makes(noise).detach()).square().mean()
            accelerator.backward(apart)
            second.step()
            first.zero_grad()
            near = judges(makes(noise)).square().mean()
            accelerator.backward(near)
            first.step()
            yield from (apart, near)

    def clipping_values() -> Iterator[Any]:
        model, optimizer, _ = prepare()
        for batch in accelerator._dataloaders[-1]:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_value_(list(model.parameters())[1:], 1e-3)
                elif run.stage is not None:  # which is told, and changes nothing
                    accelerator.clip_grad_value_(model.parameters(), 1e-9)
                optimizer.step()
                optimizer.zero_grad()
            yield loss

    for each in (with_loss_backward, accumulating_by_hand, without_sync, two_models, clipping_values):
        accelerator.free_memory()
        accelerator.gradient_state._set_sync_gradients(True)
        say([float(value.detach()) for value in each()])


def loss_scales(say: Say, _rank: int, _folder: str, run: Run) -> None:
    """Of mixed_precision="fp16", which accelerate has on GPUs alone: torch's GradScaler, and what the config says.

    Says (first scale, steps until it is doubled, overflows until it is halved) of both, without options and with some.
    """
    every: list[dict[str, Any]] = [{}, {"init_scale": 1024.0, "growth_interval": 7}, {"init_scale": 3.0}]
    for options in every:
        scaler, handlers = torch.amp.GradScaler("cpu", **options), [GradScalerKwargs(**options)] if options else []
        accelerator = ShardAccelerator(engine_config=config_of(run), cpu=True, kwargs_handlers=handlers)
        accelerator.state._mixed_precision = "fp16"
        try:
            ours = accelerator._config(1)
        except UsageError as error:
            say(str(error))
        else:
            assert ours.torch_autocast.dtype == "float16" and not ours.fp16.enabled
            scale = (2.0**ours.fp16.initial_scale_power, ours.fp16.loss_scale_window, ours.fp16.hysteresis)
            say((scale, (scaler._init_scale, scaler._growth_interval, 1)))
        finally:
            accelerator.state._mixed_precision = "no"


# What frameworks must have, and what users get wrong


def contract(say: Say, _rank: int, _folder: str, _run: Run) -> None:
    """Says what is gone of each framework; and of a class that has lost something."""
    own = {
        "adopt",
        "_begin",
        "_config",
        "_settle_precision",
        "_pair",
        "_shard",
        "_batch_size",
        "_engines",
        "_engine_of",
    }
    own |= {"_say_boundary", "_stepping", "_ends_window", "_save_engines", "_other_optimizers"}
    own |= {"_goes_with_the_rest", "_decide_stage"}
    set_by_it: tuple[str, ...] = ("native_amp", "scaler", "_models", "_optimizers", "state", "split_batches", "step")
    set_by_it += ("_save_model_state_pre_hook",)
    say(gone(ShardAccelerator, Accelerator, own, set_by_it))
    say(gone(ShardOptimizer, AcceleratedOptimizer, set(), ("gradient_state", "optimizer")))
    own = {"engine", "_read_schedule", "_has_adapters", "_need_engine", "_writing_weights"}
    own |= {"_log_plan", "_smooths", "_first_rows"}
    set_by_it = ("model_wrapped", "optimizer_cls_and_kwargs", "_created_lr_scheduler", "accelerator", "_save")
    say(gone(ShardTrainerMixin, Trainer, own, set_by_it))

    class Lost:
        """Without most names."""

        def save_model(self, path: str) -> None:
            """Other parameters."""

    say(gone(ShardTrainerMixin, Lost, own, ("model_wrapped",)))


def misuse(say: Say, rank: int, folder: str, run: Run) -> None:
    """Says the sentence for each of several mistakes."""

    def said(mistake: Callable[[], Any]) -> None:
        try:
            mistake()
        except Exception as error:
            say(f"{type(error).__name__}: {error}")
        else:
            say("nothing")

    def trainer(config: dict[str, Any], **options: Any) -> Any:
        given = {**config, "zero_optimization": {"stage": 3, **config.get("zero_optimization", {})}}
        arguments = arguments_of(Run(3, run.output, options=options), use_cpu=True)
        return ShardTrainer(load(folder), arguments, train_dataset=Rows(), engine_config=given)

    def accelerator() -> Any:
        return ShardAccelerator(engine_config=config_of(run), cpu=True)

    said(lambda: trainer({"zero_optimization": {"stages": 2}}))
    said(lambda: trainer({"gradient_accumulation_steps": 5}))
    said(lambda: trainer({"train_micro_batch_size_per_gpu": 8}))
    said(lambda: trainer({"torch_autocast": {"enabled": True}}))
    said(lambda: trainer({"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}}))
    said(lambda: trainer({}, bf16_full_eval=True))
    said(lambda: ShardAccelerator(engine_config=3, cpu=True))  # type: ignore[arg-type]
    said(lambda: load_pretrained(LlamaForCausalLM, folder, device_map="auto"))
    model = load(folder)
    ours, engine = accelerator(), None
    engine = ours.prepare(model)
    said(lambda: ours.prepare(torch.optim.SGD(model.parameters())))
    ours, model = accelerator(), load(folder)
    parameters = list(model.parameters())
    said(lambda: ours.prepare(model, torch.optim.SGD(parameters[:3]), torch.optim.SGD(parameters[3:])))
    engine, optimizer = ours.prepare(model, torch.optim.SGD(model.parameters()))
    said(lambda: ours.clip_grad_norm_(parameters[:3], 1.0))
    said(lambda: ours.clip_grad_norm_(parameters, 1.0, norm_type=1))
    said(lambda: ours.unwrap_model(engine).save_pretrained(run.output))
    other, file = torch.optim.AdamW(load(folder).parameters()), Path(run.output).with_name(f"optimizer-{rank}.pt")
    for parameter in other.param_groups[0]["params"]:
        parameter.grad = torch.zeros_like(parameter)
    other.step()
    torch.save(other.state_dict(), file)
    said(lambda: _take_over(engine, file))
    ours.free_memory(engine)
    said(lambda: ours.prepare(model, optimizer))


def save_that_fails(say: Say, rank: int, folder: str, run: Run) -> None:
    """A save that rank 0 cannot write; says what each rank raised, and that the next one works."""
    trainer = ShardTrainer(
        model=load(folder),
        args=arguments_of(run, use_cpu=True, max_steps=1, eval_strategy="no"),
        train_dataset=Rows(),
        engine_config={"zero_optimization": {"stage": run.stage}},
    )
    trainer.train()

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    trainer._save = fail
    try:
        trainer.save_model(f"{run.output}/full")
        say("nothing")
    except Exception as error:
        say(f"{type(error).__name__}: {error}")
    del trainer._save
    trainer.save_model(f"{run.output}/after")
    torch.distributed.barrier()


def adalora(say: Say, _rank: int, folder: str, _run: Run) -> None:
    """AdaLoRA to be trained, and frozen, at every stage; says what is raised."""
    for stage in range(4):
        for trains in (True, False):
            config = AdaLoraConfig(init_r=4, target_r=2, total_step=10, tfinal=2, target_modules=["q_proj"])
            model = get_peft_model(load(folder), config)
            if not trains:
                model.requires_grad_(False)
            try:
                initialize(model, {"train_batch_size": 4, "zero_optimization": {"stage": stage}}).close()
                say("nothing")
            except UsageError as error:
                say(str(error))
