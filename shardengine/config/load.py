"""From a file to a `Config`. Owns: the whole config, its batch sizes for a number of ranks, and the way back to JSON.

Strict: an unknown key is an error that names the nearest valid one, and every problem of a file is reported in one
ConfigError. The keys are fields in `config/schema.py`, read by `config/reader.py`, and compared by
`config/conflicts.py`. It must not know torch, devices, groups or any runtime object; the number of ranks comes in as an
integer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardengine.config.conflicts import EQUATION, MISSING_TRIPLE, check_together
from shardengine.config.kinds import FrozenMapping, describe, frozen, plain
from shardengine.config.reader import Reader, Source, read_json
from shardengine.config.schema import KEYS, SECTION_TYPES, STAGES, TRIPLE, Status, TopLevel
from shardengine.errors import ConfigError, UsageError


@dataclass(frozen=True)
class Config(TopLevel):
    """The whole content of a config file.

    ``sources`` has the origin of each value, by dotted key; ``notices`` are sentences to print once on rank 0. Neither
    takes part in comparisons.
    """

    sources: Mapping[str, Source] = field(default_factory=FrozenMapping, compare=False)
    notices: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", frozen(self.sources))

    def resolve_batch(self, world_size: int) -> Config:
        """Return a copy whose three batch sizes are set and fit ``world_size`` ranks.

        Values that an earlier call derived are derived again. Raises ConfigError, showing the equation, if they
        cannot fit.
        """
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise UsageError(
                f"resolve_batch: expected a world size >= 1, got {describe(world_size)}",
                code="resolve-batch-world-size-invalid",
            )
        given = {name: vars(self)[name] for name in TRIPLE if self.sources.get(name) != "derived"}
        total, micro, steps = (given.get(name) for name in TRIPLE)
        if total is None and micro is None:
            raise ConfigError(MISSING_TRIPLE)
        if steps is None and (total is None or micro is None):
            steps = 1
        known = math.prod(factor for factor in (micro, steps, world_size) if factor is not None)
        if total is None:
            total = known
        shown = " * ".join("?" if factor is None else str(factor) for factor in (micro, steps, world_size))
        if total % known or (micro is not None and steps is not None and total != known):
            result = f"{known}" if "?" not in shown else f"{known} * ?, and {total} / {known} is not an integer"
            fitting = [] if steps is not None or micro is None else fitting_ranks(total, micro)
            more = f". Numbers of ranks that fit: {', '.join(map(str, fitting))}" if fitting else ""
            raise ConfigError(
                f"{EQUATION}, but {total} != {shown} = {result}; change one of them or leave one out{more}"
            )
        micro = total // known if micro is None else micro
        steps = total // known if steps is None else steps
        sizes: dict[str, int] = dict(zip(TRIPLE, (total, micro, steps), strict=True))
        derived = {name: "derived" for name in TRIPLE if given.get(name) is None}
        return dataclasses.replace(
            self,
            train_batch_size=total,
            train_micro_batch_size_per_gpu=micro,
            gradient_accumulation_steps=steps,
            sources=FrozenMapping({**dict.fromkeys(sizes, "file"), **self.sources, **derived}),
        )

    def with_batch(self, world_size: int, *, total: int | None = None, micro: int | None = None) -> Config:
        """Return a copy for other batch sizes. Raises ConfigError as ``resolve_batch`` does.

        total: samples per step; the size of micro-batches stays · micro: samples per micro-batch; their number stays.
        """
        each = self.train_micro_batch_size_per_gpu if micro is None else micro
        steps = self.gradient_accumulation_steps if total is None else None
        sizes: dict[str, Any] = dict(zip(TRIPLE, (total, each, steps), strict=True))
        sources = {**self.sources, **{name: "derived" if size is None else "file" for name, size in sizes.items()}}
        return dataclasses.replace(self, **sizes, sources=FrozenMapping(sources)).resolve_batch(world_size)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values that ``load_config`` turns into an equal Config."""
        tree: dict[str, Any] = plain(dataclasses.asdict(self))
        del tree["sources"], tree["notices"]
        if self.optimizer is not None and self.optimizer.type == "Adam":
            tree["optimizer"]["params"]["adam_w_mode"] = False
        return tree

    def resolved(self) -> list[tuple[str, Any, str]]:
        """Return (dotted key, value, source) for every value, in the order of ``to_dict``."""

        def rows(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any, str]]:
            for name, value in tree.items():
                if isinstance(value, dict) and value:
                    yield from rows(value, f"{prefix}{name}.")
                else:
                    yield prefix + name, value, self.sources.get(prefix + name, "default")

        return list(rows(self.to_dict(), ""))


NOT_CLIPPED = "gradients are not clipped, because gradient_clipping is not in the config"


def load_config(source: Mapping[str, Any] | str | Path | Config, auto: Mapping[str, Any] | None = None) -> Config:
    """Read and check a config: a path to JSON, a mapping (not changed) or a Config (returned as it is).

    auto: dotted name → the value to use if the config says "auto"; values that the config sets itself stay. For example
    ``{"train_micro_batch_size_per_gpu": 4, "optimizer.params.lr": 1e-4}``. Raises ConfigError with every problem found.
    """
    if isinstance(source, Config):
        return source
    if isinstance(source, (str, Path)):
        return _build(read_json(Path(source)), str(source), auto)
    if isinstance(source, Mapping):
        return _build(plain(source), getattr(source, "where", "config"), auto)
    raise ConfigError(f"expected a path to a JSON file, a mapping or a Config, got {describe(source)}")


def fitting_ranks(total: int, each: int) -> list[int]:
    """Return the numbers of ranks that divide a global batch of ``total`` samples into portions of ``each``."""
    if total % each:
        return []
    portions = total // each
    small = [number for number in range(1, math.isqrt(portions) + 1) if portions % number == 0]
    return sorted({*small, *(portions // number for number in small)})


STAGE, MICRO = "zero_optimization.stage", "train_micro_batch_size_per_gpu"


def whole_number(value: Any) -> int | None:
    """Return ``value`` as a size, also from 4.0; None for anything else."""
    is_whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
    return int(value) if is_whole else None


def undecided(source: Mapping[str, Any] | str | Path | Config) -> frozenset[str]:
    """Return those of ``STAGE`` and ``MICRO`` that ``source`` leaves to a plan; none if it cannot be read.

    Such a key is "auto", and the micro-batch does not follow from the two other sizes.
    """
    if isinstance(source, Config) or not isinstance(source, (str, Path, Mapping)):
        return frozenset()
    try:
        tree = read_json(Path(source)) if isinstance(source, (str, Path)) else plain(source)
    except ConfigError:
        return frozenset()
    follows = all(whole_number(tree.get(size)) for size in TRIPLE if size != MICRO)
    reader = Reader()
    reader.read(tree)
    return frozenset(reader.automatic & ({STAGE} if follows else {STAGE, MICRO}))


def provisional(
    source: Mapping[str, Any] | str | Path | Config, auto: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return ``auto`` with values to read ``source`` with before a plan has decided.

    These are the first stage that goes with the other keys, and micro-batches of one sample.
    """
    auto, names = dict(auto or {}), undecided(source)
    sizes = {MICRO: 1} if MICRO in names else {}
    for stage in STAGES if STAGE in names else ():
        found = {**auto, STAGE: stage, **sizes}
        with suppress(ConfigError):
            load_config(source, found)
            return found
    return {**auto, **sizes, **({STAGE: STAGES[-1]} if STAGE in names else {})}  # another key is wrong


def load_or_default(config: Any, auto: Mapping[str, Any] | None = None) -> Config:
    """Return the config before a plan has decided values that are "auto"; the default Config if the config is wrong.

    Every rank reports the errors of a wrong config a moment later.
    """
    try:
        return load_config(config, provisional(config, auto))
    except ConfigError:
        return Config()


def _build(tree: dict[str, Any], source: str, auto: Mapping[str, Any] | None = None) -> Config:
    reader = Reader(auto)
    reader.read(tree)
    clipped = {"gradient_clipping", "gradient_clipping_value"}
    if not clipped & {*reader.values, *reader.automatic}:
        reader.notices.append(NOT_CLIPPED)
    named = ("optimizer.", "scheduler.")
    kept = [key.name for key in KEYS.values() if key.status is Status.ACTIVE and not key.name.startswith(named)]
    sources: dict[str, Source] = {**dict.fromkeys(kept, "default"), **reader.sources}
    config = Config(**_nested(reader.values), sources=sources, notices=tuple(reader.notices))
    check_together(config, reader)
    if reader.problems:
        raise ConfigError(reader.problems, source)
    return config


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted name as the fields of the top level, each section as an object of its class.

    A section without values is left out.
    """
    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTION_TYPES}
    for name, value in values.items():
        section, _, leaf = name.rpartition(".")
        sections[section][leaf] = value
    for name, section_type in reversed(SECTION_TYPES.items()):
        if name and sections[name]:
            outer, _, leaf = name.rpartition(".")
            sections[outer][leaf] = section_type(**sections[name])
    return sections[""]
