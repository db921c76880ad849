"""The competitors of ``checkpoint.py`` by name: how each saves and loads, and in which state it starts to load.

Owns: the calls into each library. Each is used as its manual says. Knows nothing of timing and reports; what trains is
``variants.py``'s. Every save returns when what it wrote is on the disk on all ranks (an asynchronous one's wait does):

- ours and DCP (``sync_files``, its default) fsync by themselves;
- ``torch.save`` writes into a file that we fsync, with its directory;
- DeepSpeed does not fsync: every rank fsyncs its share of the files afterwards, in parallel.

A load fills a competitor that was just built and has not stepped, so that it also makes the optimizer's state.
``torch.load`` without ``mmap``: with it the optimizer's state would stay in the file, and be read later.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from benchmarks.disk import make_durable, sync
from benchmarks.peers import DeepSpeed, TorchDDP, TorchFSDP2
from benchmarks.variants import Ours
from benchmarks.workload import Setting, Variant
from shardengine.comm.mesh import Mesh

Wait = Callable[[], None]


def save_ours(variant: Ours, place: Path) -> None:
    """Ours."""
    variant.engine.save_checkpoint(place)


def start_ours(variant: Ours, place: Path) -> Wait:
    """Ours with ``async_save``."""
    variant.engine.save_checkpoint(place)
    wait: Wait = variant.engine.wait_for_checkpoint
    return wait


def load_ours(variant: Ours, place: Path) -> None:
    """Ours, the one checkpoint in ``place``."""
    variant.engine.load_checkpoint(place)


def save_whole(variant: TorchDDP, place: Path) -> None:
    """``torch.save`` of model and optimizer by rank 0, which holds everything; the others wait."""
    if dist.get_rank() == 0:
        place.mkdir(parents=True)
        state = {"model": variant.model.module.state_dict(), "optimizer": variant.optimizer.state_dict()}  # type: ignore[union-attr]
        with (place / "state.pt").open("wb") as file:
            torch.save(state, file)
        sync(place / "state.pt")
        sync(place)
    dist.barrier()


def load_whole(variant: TorchDDP, place: Path) -> None:
    """Every rank reads all of it."""
    state = torch.load(place / "state.pt", map_location="cpu", weights_only=True)
    variant.model.module.load_state_dict(state["model"])  # type: ignore[union-attr]
    variant.optimizer.load_state_dict(state["optimizer"])


class TorchDCP(TorchFSDP2):
    """FSDP2 with the host buffers of its asynchronous saves, which are kept from one save to the next."""

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        super().__init__(model, setting)
        self.stager = DefaultStager(StagingOptions(False, False, False, False))  # the last three are for CUDA

    def state(self) -> dict[str, Any]:
        """What DCP saves and loads: this rank's shards by name."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def close(self) -> None:
        """Drop the host buffers."""
        self.stager.close()


def save_dcp(variant: TorchDCP, place: Path) -> None:
    """``dcp.save``: one file per rank."""
    save(variant.state(), checkpoint_id=place)


def start_dcp(variant: TorchDCP, place: Path) -> Wait:
    """``dcp.async_save`` in a thread."""
    future: Any = async_save(variant.state(), checkpoint_id=place, async_stager=variant.stager)
    wait: Wait = future.result
    return wait


def load_dcp(variant: TorchDCP, place: Path) -> None:
    """``dcp.load`` into the state that the new optimizer is given, then into model and optimizer."""
    state = variant.state()
    load(state, checkpoint_id=place)
    set_state_dict(
        variant.model, variant.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def save_deepspeed(variant: DeepSpeed, place: Path) -> None:
    """DeepSpeed, made durable."""
    variant.engine.save_checkpoint(str(place), tag="step")
    dist.barrier()
    make_durable(place, dist.get_rank(), dist.get_world_size())
    dist.barrier()


def load_deepspeed(variant: DeepSpeed, place: Path) -> None:
    """DeepSpeed at the stage that saved."""
    loaded, _ = variant.engine.load_checkpoint(str(place), tag="step")
    if loaded is None:
        raise RuntimeError(f"DeepSpeed loaded nothing from {place}")


@dataclass(frozen=True)
class Reader:
    """A way to load, into a competitor of its own. alone: rank 0 loads everything, as the only rank."""

    build: Callable[[nn.Module, Setting], Variant]
    load: Callable[[Any, Path], None]
    alone: bool = False


@dataclass(frozen=True)
class Saver:
    """A way to save. It returns a wait if it is asynchronous.

    loads: the readers of what it saved · family: those of one family share processes · package: what must be installed.
    """

    build: Callable[[nn.Module, Setting], Variant]
    save: Callable[[Any, Path], Wait | None]
    loads: tuple[str, ...]
    family: str
    package: str | None = None
    asynchronous: bool = False


_ASYNC = {"checkpoint": {"async_save": True}}
_OURS = {stage: partial(Ours, zero={"stage": stage}) for stage in (2, 3)}
_BEHIND = {stage: partial(Ours, zero={"stage": stage}, more=_ASYNC) for stage in (2, 3)}
_DEEPSPEED = {stage: partial(DeepSpeed, stage=stage) for stage in (2, 3)}


def _alone(model: nn.Module, setting: Setting) -> Variant:
    whole = replace(setting, batch=setting.batch * setting.ranks)  # the same global batch
    return Ours(model, whole, zero={"stage": 2}, mesh=Mesh(0, 1, torch.device("cpu")))


READERS: dict[str, Reader] = {
    "ours-2": Reader(_OURS[2], load_ours),
    "ours-3": Reader(_OURS[3], load_ours),
    "ours-2 to stage 3": Reader(_OURS[3], load_ours),
    "ours-2 to 1 rank": Reader(_alone, load_ours, alone=True),
    "torch.save": Reader(TorchDDP, load_whole),
    "dcp": Reader(TorchDCP, load_dcp),
    "deepspeed-2": Reader(_DEEPSPEED[2], load_deepspeed),
    "deepspeed-3": Reader(_DEEPSPEED[3], load_deepspeed),
}
SAVERS: dict[str, Saver] = {
    "ours-2": Saver(_OURS[2], save_ours, ("ours-2", "ours-2 to stage 3", "ours-2 to 1 rank"), "shardengine"),
    "ours-3": Saver(_OURS[3], save_ours, ("ours-3",), "shardengine"),
    "ours-2 async": Saver(_BEHIND[2], start_ours, ("ours-2",), "shardengine", asynchronous=True),
    "ours-3 async": Saver(_BEHIND[3], start_ours, ("ours-3",), "shardengine", asynchronous=True),
    "torch.save": Saver(TorchDDP, save_whole, ("torch.save",), "torch"),
    "dcp": Saver(TorchDCP, save_dcp, ("dcp",), "torch"),
    "dcp async": Saver(TorchDCP, start_dcp, ("dcp",), "torch", asynchronous=True),
    "deepspeed-2": Saver(_DEEPSPEED[2], save_deepspeed, ("deepspeed-2",), "deepspeed", "deepspeed"),
    "deepspeed-3": Saver(_DEEPSPEED[3], save_deepspeed, ("deepspeed-3",), "deepspeed", "deepspeed"),
}


def missing(names: list[str]) -> dict[str, str]:
    """Those of ``names`` whose package is not installed, with the package."""
    packages = {name: SAVERS[name].package for name in names}
    return {name: package for name, package in packages.items() if package and not importlib.util.find_spec(package)}
