"""What an ordinary Lightning user writes, to be run in processes that have Lightning imported; see test_lightning."""

from __future__ import annotations

import ast
import inspect
import os
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning, Callback, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from shardengine.integrations.lightning import _OF_LIGHTNING, ShardStrategy
from tests.integrations.contract import gone

Say = Callable[[Any], None]


class Net(L.LightningModule):
    """Blocks, and a weight of its own, which its forward reads."""

    def __init__(self, optimizer: str = "AdamW", rate: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.gain = nn.Parameter(torch.ones(8))
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.last(x * self.gain)

    def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
        loss = (self(batch[0]) - batch[1]).square().mean()
        self.losses.append(loss.item())
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], _index: int) -> None:
        self.log("error", (self(batch[0]) - batch[1]).square().mean(), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], _index: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        options = {"momentum": 0.9} if self.hparams["optimizer"] == "SGD" else {}
        optimizer = getattr(torch.optim, self.hparams["optimizer"])(
            self.parameters(), lr=self.hparams["rate"], **options
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def data(rows: int = 44) -> DataLoader[Any]:
    x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).tanh()), batch_size=2)


def make(strategy: Any, *callbacks: Callback, **options: Any) -> L.Trainer:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": True,
    }
    given: dict[str, Any] = {"max_epochs": 2, "devices": dist.get_world_size(), **quiet, **options}
    saves = any(isinstance(each, ModelCheckpoint) for each in callbacks)
    return L.Trainer(
        strategy=strategy, accelerator="cpu", callbacks=list(callbacks), enable_checkpointing=saves,
        default_root_dir=tempfile.gettempdir(), **given,
    )  # fmt: skip


def begin(rank: int, ranks: int, store: str) -> None:
    """As a launcher would."""
    warnings.simplefilter("ignore")
    os.environ.update({"LOCAL_RANK": str(rank), "NODE_RANK": "0"})
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def trained(strategy: Any, model: Any = None, *callbacks: Callback, **options: Any) -> Any:
    """(losses, metrics, weights) of a fit."""
    L.seed_everything(3, verbose=False)
    model = Net() if model is None else model()
    trainer = make(strategy, *callbacks, **options)
    trainer.fit(model, data(), data(8))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return model.losses, metrics, weights(model), trainer.global_step


def said_by(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# Lives: each says one word


def equality(say: Say, rank: int, ranks: int, store: str, optimizer: str, options: dict[str, Any]) -> None:
    begin(rank, ranks, store)
    names = ["ddp", *(f"shardengine_stage_{stage}" for stage in range(4))]
    say({name: trained(name, lambda: Net(optimizer), **options) for name in names})


class Losses(Callback):
    """Of a model that keeps none."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.losses.append(outputs["loss"].item())


def boring(say: Say, rank: int, ranks: int, store: str) -> None:
    """Lightning's own BoringModel, with its own data, through every loop of the Trainer."""
    begin(rank, ranks, store)
    found: dict[str, Any] = {}
    for name in ("ddp", *(f"shardengine_stage_{stage}" for stage in range(4))):
        L.seed_everything(3, verbose=False)
        model, losses = BoringModel(), Losses()
        trainer = make(name, losses, max_epochs=1, accumulate_grad_batches=3)
        trainer.fit(model)
        trainer.validate(model)
        trainer.test(model)
        predicted = torch.cat(trainer.predict(model) or [])
        found[name] = (losses.losses, {}, {**weights(model), "predicted": predicted}, trainer.global_step)
    say(found)


def stages(say: Say, rank: int, ranks: int, store: str, kind: str, options: dict[str, Any]) -> None:
    """A model of ``kind`` under DDP and at stages 1 and 3."""
    begin(rank, ranks, store)
    say([trained(name, globals()[kind], **options) for name in ("ddp", "shardengine_stage_1", "shardengine_stage_3")])


class Penalty(Net):
    """The loss reads a weight outside of its module's forward."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        block: Any = self.blocks[0]
        return super().training_step(batch, index) + 0.1 * block.weight.square().sum() * self.gain.sum()


class Normed(Net):
    """Buffers, which rank 0 says; norms of gradients where Lightning's users look at them."""

    def __init__(self) -> None:
        super().__init__("SGD", 0.001)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))

    def on_before_optimizer_step(self, _optimizer: Any) -> None:
        self.losses.append(float(grad_norm(self, 2)["grad_2.0_norm_total"]))


class Own(Net):
    """Overrides what is often overridden."""

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def optimizer_step(self, _epoch: int, index: int, optimizer: Any, closure: Any) -> None:
        optimizer.step(closure=closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + index)


class Shows(Net):
    """Where gradients are seen."""

    def on_after_backward(self) -> None:
        self.losses[-1] = sum(parameter.grad is not None for parameter in self.parameters())


class Skips(Net):
    """Returns nothing for the last micro-batch of some windows."""

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        return None if index % 4 == 3 else super().training_step(batch, index)


class NoLoss(Net):
    """Returns nothing for some whole windows."""

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        return None if index % 4 >= 2 else super().training_step(batch, index)


class OnMeta(Net):
    """Rank 0 alone makes the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()

    def configure_model(self) -> None:
        if not self.blocks:
            torch.manual_seed(5)
            with torch.device("meta" if self.global_rank else "cpu"):
                self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])


def traffic(say: Say, rank: int, ranks: int, store: str) -> None:
    """Per stage, (bytes that the last step sent, the formula's)."""
    begin(rank, ranks, store)
    found: list[tuple[int, int]] = []

    class Counts(Net):
        def on_train_end(self) -> None:
            told = self.trainer.strategy.engine.traffic()
            found.append((told["measured_bytes_last_step"], told["formula_bytes_per_step"]))

    for stage in range(4):
        trained(f"shardengine_stage_{stage}", Counts, accumulate_grad_batches=3, limit_train_batches=9)
    say(found)


def meta(say: Say, rank: int, ranks: int, store: str) -> None:
    begin(rank, ranks, store)
    say([trained(f"shardengine_stage_{stage}", OnMeta)[0] for stage in (2, 3)])


def ways(say: Say, rank: int, ranks: int, store: str) -> None:
    """Everything around a fit, under DDP and at stage 3."""
    begin(rank, ranks, store)
    told = []
    for strategy in ("ddp", "shardengine_stage_3"):
        L.seed_everything(3, verbose=False)
        model, trainer = Net(), make(strategy, max_epochs=1)
        first = trainer.validate(model, data(8), verbose=False)
        trainer.fit(model, data(), data(8))
        trainer.fit_loop.epoch_progress.reset()
        trainer.fit(model, data())
        found = [first, trainer.test(model, data(8), verbose=False)]
        outputs = torch.cat(trainer.predict(model, data(8)))
        told.append((found, outputs, model(torch.ones(1, 6)).item(), len(model.losses)))
    say(told)


def precisions(say: Say, rank: int, ranks: int, store: str) -> None:
    begin(rank, ranks, store)
    found = {}
    for name in ("bf16-true", "16-true", "bf16-mixed", "16-mixed"):
        for strategy in ("ddp", "shardengine_stage_2", "shardengine_stage_3"):
            plugin: dict[str, Any] = {"precision": name}
            if name == "16-mixed":
                plugin = {"plugins": MixedPrecision("16-mixed", "cpu")}
            if strategy != "ddp" or "mixed" in name:
                found[name, strategy] = trained(strategy, **plugin)
    say(found)


class Saves(Callback):
    """Saves after a number of micro-batches; 0: at the end of the first epoch."""

    def __init__(self, path: str, after: int) -> None:
        self.path, self.after = path, after

    def on_train_batch_end(self, trainer: Any, module: Net, *_: Any) -> None:
        if len(module.losses) == self.after:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer: Any, _module: Net) -> None:
        if self.after == 0 and trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def save(say: Say, rank: int, ranks: int, store: str, stage: int, path: str, after: int, full: bool) -> None:
    """Train to the end, with a checkpoint on the way."""
    begin(rank, ranks, store)
    strategy = "ddp" if stage < 0 else ShardStrategy(stage=stage, full_weights=full)
    say(trained(strategy, None, Saves(path, after), accumulate_grad_batches=3))


def resume(say: Say, rank: int, ranks: int, store: str, stage: int, path: str) -> None:
    """Train on from a checkpoint; also what it evaluates to."""
    begin(rank, ranks, store)
    L.seed_everything(3, verbose=False)  # by which Lightning shuffles
    torch.manual_seed(9)
    model = Net()
    name = "ddp" if stage < 0 else f"shardengine_stage_{stage}"
    before = make(name).validate(model, data(8), ckpt_path=path, verbose=False)
    model = Net()
    trainer = make(name, accumulate_grad_batches=3)
    trainer.fit(model, data(), data(8), ckpt_path=path)
    say((before, model.losses, weights(model), trainer.global_step))


def files(say: Say, rank: int, ranks: int, store: str, folder: str) -> None:
    """Which files there are, and who can read them."""
    begin(rank, ranks, store)
    there = lambda: sorted(path.name for path in Path(folder).iterdir())  # noqa: E731
    saving = ModelCheckpoint(folder, monitor="error", save_top_k=1, save_last="link", filename="{step}")
    L.seed_everything(3, verbose=False)
    model, trainer = Net(), make("shardengine_stage_3", saving, max_epochs=3)
    trainer.fit(model, data(), data(8))
    dist.barrier()
    found: dict[str, Any] = {
        "kept": there(),
        "loaded": weights(Net.load_from_checkpoint(saving.best_model_path, map_location="cpu")),
    }
    found["trained"] = weights(model)
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    found["more"] = there()
    again = lambda path, name="shardengine_stage_1": make(name, max_epochs=4).fit(Net(), data(), ckpt_path=path)  # noqa: E731
    found["after"] = said_by(lambda: again(f"{folder}/after.ckpt"))
    found["weights"] = said_by(lambda: again(f"{folder}/weights.ckpt"))
    found["last"] = said_by(lambda: again(f"{folder}/last.ckpt"))
    found["folder"] = said_by(lambda: again(f"{saving.best_model_path}.shards"))
    other_kind = lambda: make("shardengine_stage_3").fit(Net("SGD"), data(), ckpt_path=saving.best_model_path)  # noqa: E731
    found["SGD"] = said_by(other_kind)
    if rank == 0:
        os.rename(f"{saving.best_model_path}.shards", f"{folder}/moved")
    dist.barrier()
    found["moved"] = said_by(lambda: again(saving.best_model_path))
    other = make("ddp", max_epochs=1)
    other.fit(Net(), data())
    other.save_checkpoint(f"{folder}/ddp.ckpt")
    found["ddp"] = []
    for name in ("ddp", "shardengine_stage_1", "shardengine_stage_3"):
        L.seed_everything(4, verbose=False)
        model = Net()
        make(name, max_epochs=3).fit(model, data(), ckpt_path=f"{folder}/ddp.ckpt")
        found["ddp"].append((weights(model), model.losses))
    say(found)


def failing(say: Say, rank: int, ranks: int, store: str, everywhere: bool) -> None:
    """A step that raises on the last rank, or on all; then another fit where all have."""
    begin(rank, ranks, store)

    class Fails(Net):
        fails = True

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            if self.fails and index == 2 and (everywhere or rank == ranks - 1):
                raise ValueError("mine")
            return (self(batch[0]) - batch[1]).square().mean()

    model, trainer = Fails(), make("shardengine_stage_3", max_epochs=1)
    say(said_by(lambda: trainer.fit(model, data())))
    if everywhere:
        model.fails = False
        trainer.fit(model, data())
        say(weights(model))


class Alone(Callback):
    """Rank 0 saves without the others."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.is_global_zero:
            raise ValueError("mine")
        trainer.save_checkpoint("x.ckpt")


def alone(say: Say, rank: int, ranks: int, store: str) -> None:
    begin(rank, ranks, store)
    say(said_by(lambda: trained("shardengine_stage_2", None, Alone())))


def waits(say: Say, rank: int, ranks: int, store: str) -> None:
    """How long the engine waits for other ranks."""
    begin(rank, ranks, store)
    found: list[float] = []

    class Asks(Callback):
        def on_train_end(self, trainer: Any, _module: Any) -> None:
            found.append(trainer.strategy.engine.config.timeout_s)

    for config, others in (({}, {}), ({}, {"timeout": timedelta(minutes=2)}), ({"timeout_s": 90}, {"timeout": None})):
        trained(ShardStrategy(config, 2, **others), None, Asks(), max_epochs=1)
    trained(ShardStrategy({"timeout_s": 90}, 2, timeout=timedelta(minutes=2)), None, Asks(), max_epochs=1)
    say(found)


class Thaws(BaseFinetuning):
    """The blocks are trained from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.blocks)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.make_trainable(pl_module.blocks)
            optimizer.add_param_group({"params": list(pl_module.blocks.parameters()), "lr": 0.005})


class Averages(Callback):
    """An average of the weights after each step, as docs/lightning.md has it."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        with trainer.strategy.engine.full_params():
            now = {name: value.detach().clone() for name, value in module.named_parameters()}
        self.average = {name: value.lerp(now[name], 0.5) for name, value in getattr(self, "average", now).items()}


class Half(Net):
    """Its optimizer has what is trained at the start."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], 0.01)


def callbacks(say: Say, rank: int, ranks: int, store: str) -> None:
    """At stages 2 and 3: a fit in which parameters are unfrozen, and averages of weights."""
    begin(rank, ranks, store)
    for stage in (2, 3):
        average = Averages()
        found = trained(f"shardengine_stage_{stage}", Half, Thaws(), average, max_epochs=2)
        say((found, average.average))


class Manual(Net):
    automatic_optimization = False


class Several(Net):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.first.parameters(), 0.1), torch.optim.SGD(self.last.parameters(), 0.1)]


class NoOptimizer(Net):
    def configure_optimizers(self) -> Any:
        return None


class NeedsMatrices(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def misuse(say: Say, rank: int, ranks: int, store: str) -> None:
    """What each of many mistakes is answered."""
    begin(rank, ranks, store)
    two = "shardengine_stage_2"
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.01}}}
    calls: dict[str, Callable[[], Any]] = {
        "no stage": lambda: ShardStrategy(),
        "two stages": lambda: ShardStrategy({"zero_optimization": {"stage": 3}}, stage=2),
        "a typo": lambda: ShardStrategy({"gradient_cliping": 1.0}, stage=2),
        "no file": lambda: ShardStrategy("nowhere.json", stage=2),
        "a list": lambda: ShardStrategy([], stage=2),  # type: ignore[arg-type]
        "of DDP": lambda: ShardStrategy(stage=2, find_unused_parameters=True),
        "closed": lambda: ShardStrategy(stage=2).engine,
        "precision": lambda: make(two, precision="64-true"),
        "two precisions": lambda: trained(ShardStrategy({"bf16": {"enabled": True}}, 2), precision="16-true"),
        "two windows": lambda: trained(ShardStrategy({"gradient_accumulation_steps": 4}, 2)),
        "two norms": lambda: trained(ShardStrategy({"gradient_clipping": 1.0}, 2), gradient_clip_val=1.0),
        "batch norm": lambda: trained(two, sync_batchnorm=True),
        "manual": lambda: trained(two, Manual),
        "several": lambda: trained(two, Several),
        "no optimizer": lambda: trained(two, NoOptimizer),
        "matrices": lambda: trained(two, NeedsMatrices),
        "averages": lambda: trained(two, None, EMAWeightAveraging()),
        "elsewhere": lambda: trained(two, None, Saves("s3://bucket/x.ckpt", 2)),
        "config's optimizer": lambda: trained(ShardStrategy(sgd, 2), NoOptimizer),
        "auto": lambda: trained(ShardStrategy({"train_batch_size": "auto", "gradient_clipping": "auto"}, 2)),
    }
    say({name: said_by(call) for name, call in calls.items()})


_OURS = {"engine", "_load", "_end"}
_OWN_ATTRIBUTES = {"_tree", "_full_weights", "_left_out", "_beside", "_engine", "_fails", "_has_loss", "__init__"}


def missing(say: Say, _rank: int, _ranks: int, _store: str, path: str) -> None:
    """What Lightning lacks of what the strategy overrides, reads or calls; then, what a class lacks that has little."""
    [strategy] = [
        node
        for node in ast.parse(Path(path).read_text("utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == "ShardStrategy"
    ]
    names = {
        node.attr
        for node in ast.walk(strategy)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "super()")
    }
    names -= _OURS | _OWN_ATTRIBUTES
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    fit_loop = ["_should_accumulate"]
    wanted: list[tuple[Any, str, list[str]]] = [
        (DDPStrategy(), "DDPStrategy", sorted(names)),
        (trainer, "Trainer", ["accumulate_grad_batches", "gradient_clip_val", "callbacks", "state", "fit_loop"]),
        (trainer.fit_loop, "Trainer.fit_loop", fit_loop),
        (Net(), "LightningModule", ["strict_loading", "automatic_optimization", "trainer", "backward"]),
        (MixedPrecision("bf16-mixed", "cpu"), "MixedPrecision", ["scaler", "precision", "device", "pre_backward"]),
        (Precision(), "Precision", ["precision", "backward", "post_backward"]),
    ]

    class Lost:
        """With other parameters, and without most names."""

        def load_checkpoint(self, path: str) -> None: ...

    for each in (wanted, [(Lost(), "Lost", fit_loop)]):
        theirs = type(each[0][0])
        accepted = inspect.signature(theirs.__init__).parameters
        lacks = [f"{owner}.{name} is gone" for one, owner, found in each for name in found if name not in dir(one)]
        lacks += [f"{theirs.__name__}({name}=) is gone" for name in _OF_LIGHTNING if name not in accepted]
        say(lacks + gone(ShardStrategy, theirs, _OURS))
