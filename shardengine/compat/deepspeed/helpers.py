"""Small functions and classes of DeepSpeed's utils and checkpoint.utils. Must not know: engines."""

from __future__ import annotations

import argparse
import functools
import logging
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from shardengine.compat.deepspeed import processes
from shardengine.errors import ConfigError, UsageError


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config`` to a script's own parser and return it."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", default=False, action="store_true", help="train with an engine")
    group.add_argument("--deepspeed_config", default=None, help="the engine's JSON config")
    return parser


# Data


def data_loader(
    data: Any,
    *,
    rank: int,
    ranks: int,
    rows: int,
    collate_fn: Callable[[list[Any]], Any] | None,
    drop_last: bool,
) -> DataLoader[Any]:
    """Return a loader of shuffled micro-batches of ``rows`` samples from this rank's part of the map-style ``data``.

    Its ``sampler.set_epoch(n)`` shuffles again. UsageError for data without a length or without items by index.
    """
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise UsageError(
            "deepspeed.initialize: training_data: expected a data set with a length and items by index, got "
            f"{type(data).__name__}; make a DataLoader over it yourself, of this rank's part",
            code="deepspeed-data-without-length",
        )
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=ranks, rank=rank)
    return DataLoader(
        data,
        batch_size=rows,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=drop_last,
        pin_memory=torch.cuda.is_available(),
    )


class RepeatingLoader:
    """An endless iterator over batches of ``loader``: after the last batch it starts again."""

    def __init__(self, loader: Iterable[Any]) -> None:
        """loader: an iterable that can be iterated more than once."""
        self._loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self._loader)
        return next(self._batches)


# Logging


def _printing_logger() -> logging.Logger:
    """Return a logger that prints by itself, because scripts expect output even without logging set up."""
    made = logging.getLogger("shardengine.compat.deepspeed.scripts")
    if not made.handlers:
        made.addHandler(_Printing())
        made.setLevel(logging.INFO)
        made.propagate = False
    return made


class _Printing(logging.Handler):
    """A handler that writes to the current ``sys.stdout``."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stdout.write(f"[{record.levelname}] {self.format(record)}\n")


logger = _printing_logger()


def set_log_level(level: Any) -> None:
    """Set the level of this logger and the engine's to a config's ``log_level``. ConfigError for an unknown level."""
    if level is not None:
        if str(level).upper() not in _LEVELS:
            raise ConfigError(f"log_level: expected one of {', '.join(_LEVELS)}, got {level!r}")
        for each in (logger, logging.getLogger("shardengine")):
            each.setLevel(str(level).upper())


_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def log_dist(message: str, ranks: list[int] | None = None, level: int = logging.INFO) -> None:
    """Log ``message`` on ``ranks``; on all if it is None or contains -1."""
    rank = processes.get_rank()
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[rank %d] %s", rank, message)


def see_memory_usage(message: str, force: bool = False, ranks: list[int] | None = None) -> None:
    """Log this process's host memory and torch's GPU memory. force: if False, log nothing, as in DeepSpeed."""
    if force:
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        said = f"{message}: at most {kib / 2**20:.2f} GiB of host memory so far"
        if torch.cuda.is_available():
            now, peak = torch.cuda.memory_allocated() / 2**30, torch.cuda.max_memory_allocated() / 2**30
            said += f", {now:.2f} GiB of the GPU allocated now, {peak:.2f} GiB at most"
        log_dist(said, ranks)


# Modules and tensors


def constructor_as_it_is(function: Callable[..., Any], *_: Any) -> Callable[..., Any]:
    """Return ``function`` unchanged: no constructor of tensors is replaced."""
    return function


def recursive_getattr(model: Any, module_name: str) -> Any:
    """Return the attribute at the dotted path ``module_name`` of ``model``."""
    return functools.reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Set the attribute at the dotted path ``module_name`` of ``model`` to ``module``."""
    holder, _, leaf = module_name.rpartition(".")
    setattr(recursive_getattr(model, holder) if holder else model, leaf, module)


class NoTimer:
    """A throughput timer that measures nothing; ``engine.trace(path)`` records timings."""

    def update_epoch_count(self) -> None:
        """Do nothing."""


def clone_tensors_for_torch_save(item: Any, device: Any = "cpu") -> Any:
    """Return ``item`` with a copy of every tensor in it, on ``device``; no copy is a view of a larger buffer.

    Tied weights stay tied: tensors over the same elements get one copy, which frameworks that detect shared memory save
    once.
    """
    return _clone(item, device, {})


def _clone(item: Any, device: Any, made: dict[Any, torch.Tensor]) -> Any:
    if isinstance(item, torch.Tensor):
        place = (item.data_ptr(), item.device, item.dtype, item.shape, item.stride())
        if not item.data_ptr() or place not in made:  # an empty tensor has no address
            copy = item.detach().clone()
            made[place] = copy if device is None else copy.to(device)
        return made[place]
    if isinstance(item, dict):
        return type(item)((name, _clone(each, device, made)) for name, each in item.items())
    if isinstance(item, list | tuple):
        return type(item)(_clone(each, device, made) for each in item)
    return item
