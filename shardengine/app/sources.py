"""The source of a run's config: a file, or the name of a shipped recipe, and the command line's changes.

Owns: names of recipes, --set, --lr and --log, the default optimizer, the folder of a run's monitors. Must not know:
torch, the meaning of other keys. It is imported before torch, so a wrong key is reported at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import shardengine
from shardengine.config import (
    ALIASES,
    Config,
    ConfigTree,
    MonitorConfig,
    OptimizerConfig,
    SinkConfig,
    nearest,
    plain,
    read_tree,
)
from shardengine.errors import UsageError

DEFAULT_OPTIMIZER = OptimizerConfig("AdamW", {"lr": 2e-5, "betas": (0.9, 0.95), "weight_decay": 0.1})
"""Its rate suits pretrained weights."""
LR = "optimizer.params.lr"
_RATES_OF_SCHEDULERS = ("warmup_max_lr", "cycle_max_lr", "max_lr")
_FORM = "expected KEY=VALUE, as in --set zero_optimization.stage=3 or --set bf16.enabled=true"

Source = Path | ConfigTree


def recipes() -> dict[str, Path]:
    """Return name → file of each shipped config: in the package, or at the top of a checkout."""
    package = Path(shardengine.__file__).parent
    folders = (package / "configs", package.parent / "configs")
    folder = next((each for each in folders if (each / "demo.json").is_file()), folders[0])
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def find(text: str) -> Path:
    """Return the file that ``--config text`` names: a path, or a recipe without ``.json``.

    UsageError lists the recipes.
    """
    path = Path(text)
    if path.is_file() or path.suffix or len(path.parts) != 1:
        return path  # the reader reports a missing file
    known = recipes()
    if text not in known:
        raise UsageError(
            f"--config {text}: expected a file, or one of {', '.join(known)}; nearest is {nearest(text, known)}",
            code="config-not-found",
        )
    return known[text]


def changes_of(given: Sequence[str] | None, lr: float | None) -> tuple[str, ...]:
    """Return the changes of ``--set`` and ``--lr``, each as KEY=VALUE."""
    return (*(given or ()), *(() if lr is None else (f"{LR}={lr!r}",)))


MONITOR = "monitor."
"""Keys with this prefix change nothing in a training."""


def monitors(given: Sequence[str] | None) -> tuple[str, ...]:
    """Return the changes of ``--log``, each as KEY=VALUE.

    given: names of monitors, or several with commas between them.

    UsageError for an unknown name.
    """
    names = [name.strip() for text in given or () for name in text.split(",")]
    known = [each.name for each in fields(MonitorConfig)]
    for name in names:
        if name not in known:
            raise UsageError(
                f"--log {name}: expected one of {', '.join(known)}; nearest is {nearest(name, known)}",
                code="train-log-unknown",
            )
    return tuple(f"{MONITOR}{name}.enabled=true" for name in dict.fromkeys(names))


def in_folder(config: Config, folder: Path) -> Config:
    """Return the config of a run: monitors that write files use the run's folder unless they name another."""
    return _with_places(config, lambda place: place or str(folder))


def out_of_folder(config: Config, folder: Path) -> Config:
    """Undo ``in_folder``, because the folder of a run may be moved."""
    return _with_places(config, lambda place: None if place == str(folder) else place)


def _with_places(config: Config, changed: Callable[[str | None], str | None]) -> Config:
    monitor = config.monitor
    sinks = {name: sink for name, sink in vars(monitor).items() if isinstance(sink, SinkConfig) and sink.enabled}
    placed: dict[str, Any] = {
        name: replace(sink, output_path=changed(sink.output_path)) for name, sink in sinks.items()
    }
    return replace(config, monitor=replace(monitor, **placed))


def changed(path: Path, changes: Sequence[str]) -> Source:
    """Return the config of the file with ``changes`` applied; the path itself if there are none.

    A value is JSON, otherwise a text. ConfigError for the file, UsageError for a change that cannot be made.
    """
    if not changes:
        return path
    tree = read_tree(path)
    for change in changes:
        key, equals, value = change.partition("=")
        names = key.strip().split(".")
        if not equals or not all(names):
            raise UsageError(f"--set {change}: {_FORM}", code="config-set-unreadable")
        names = _as_written(tree, names)
        if key.strip() == LR:
            _check_rate(tree, value)
        if names[0] == "optimizer" and len(names) > 1 and names[1] != "type":
            tree = with_optimizer(tree)
        _put(tree, names, _read(value), change)
    return ConfigTree(tree, f"{path} with {' '.join(f'--set {change}' for change in changes)}")


def with_optimizer(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``tree``, with a run's default optimizer if it names none."""
    own = {} if tree.get("optimizer") else {"optimizer": plain(asdict(DEFAULT_OPTIMIZER))}
    return {**tree, **own}


def _read(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value.strip()


def _put(tree: dict[str, Any], names: Sequence[str], value: Any, change: str) -> None:
    node = tree
    for place, name in enumerate(names[:-1], 1):
        if node.get(name) is None:
            node[name] = {}
        node = node[name]
        if not isinstance(node, dict):
            where = ".".join(names[:place])
            raise UsageError(
                f"--set {change}: expected {where} to be an object in the config, it is {node!r:.80}",
                code="config-set-not-an-object",
            )
    node[names[-1]] = value


def _as_written(tree: Mapping[str, Any], names: list[str]) -> list[str]:
    """Return the key ``names`` under the name that the tree uses for its section: the section's own, or an alias."""
    for other, current in ALIASES.items():
        section = current.split(".")
        if names[: len(section)] == section and isinstance(tree.get(other), Mapping):
            return [other, *names[len(section) :]]
    return names


def _check_rate(tree: Mapping[str, Any], value: str) -> None:
    """UsageError if a scheduler replaces the optimizer's rate with its own."""
    scheduler = tree.get("scheduler")
    params = scheduler.get("params") if isinstance(scheduler, Mapping) else None
    if not isinstance(params, Mapping):
        return
    for name in _RATES_OF_SCHEDULERS:
        if params.get(name) is not None:
            key = f"scheduler.params.{name}"
            raise UsageError(
                f"{LR} {value}: the scheduler of the config sets the rate, by {key}; expected --set {key}={value}",
                code="config-lr-set-by-scheduler",
            )
