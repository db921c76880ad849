"""The initial values of a model's parameters and buffers that have no memory yet.

Owns: the choice between files and initialisers for each of them, the errors. Must not know: ranks, the use of the
values.

The interface: ``runtime/placing.py`` requests elements [first, end) of a parameter, in its order in memory, and only
those that this rank keeps. A model whose values lie in memory has no source: rank 0 sends its values. ``recording.py``
knows how a model was made. ``values.py`` computes from that and from a ``Reader``, which reads elements of a tensor by
name; so a folder, a user's own storage and a framework's conversions are handled alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardengine.config import nearest
from shardengine.errors import UsageError
from shardengine.loading import pretrained_files
from shardengine.loading.recording import Recording, View, recording, recording_of, view_of
from shardengine.loading.safetensors_files import SafetensorsFiles
from shardengine.loading.values import Reader, Values, carry_out_now

Weights = str | Path | Reader | None
"""The possible values of ``weights=``: a folder, a file, a reader of the user's own, or None."""
_PATTERNS = (0xA5, 0x5A)
"""Bytes that mark elements which were not read yet."""


@contextmanager
def meta_init() -> Iterator[None]:
    """Models made inside have no memory for parameters: ``initialize`` gives each rank only its own part of the values.

    The operations that would have made the values are recorded, whatever the model's code does: drawing, computing,
    copying, tying. Without ``weights=`` the values are, to the bit, those of the same code without ``meta_init`` from
    the same random state. ``meta_init`` does not change torch's own random state; if values have to be drawn,
    ``initialize`` leaves it as making the model would have. Inside, transformers' ``from_pretrained`` reads only the
    heads of the files: its conversions, renames and ties are recorded as well, and each rank reads its own slices
    later. Later changes of the model (a cast, ``reset_parameters``) are not recorded.
    """
    with recording(carry_out_now) as record, pretrained_files.found_by_transformers(record):
        yield


def is_in_slices(model: nn.Module) -> bool:
    """Return whether ``model`` was made in ``meta_init``, so that each rank reads or draws only its own part."""
    return any(recording_of(parameter) is not None for parameter in model.parameters())


class _Watched:
    """A user's reader, checked for targets that it leaves unfilled. where: text for messages.

    The target is filled with one pattern of bytes before a read. If an end of it has that pattern afterwards, the read
    is repeated with another pattern: so no value is mistaken for the pattern, and a correct reader is called once.
    """

    def __init__(self, reader: Reader, where: str) -> None:
        self._reader = reader
        self._where = where

    @property
    def tensors(self) -> Any:
        """See ``Reader``."""
        return self._reader.tensors

    def close(self) -> None:
        """See ``Reader``."""
        self._reader.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def read(self, name: str, first: int, target: Tensor) -> None:
        """See ``Reader``. Raises UsageError if it filled nothing, or not all."""
        ends = [target[:1], target[-1:]]
        for pattern in _PATTERNS:
            target.view(torch.uint8).fill_(pattern)
            self._reader.read(name, first, target)
            ends = [end for end in ends if end.numel() and bool((end.view(torch.uint8) == pattern).all())]
            if not ends:
                return
        raise UsageError(
            f"weights=: read({name!r}, {first}, target) did not fill the whole target{self._where}: expected all "
            f"{target.numel()} elements ({target.dtype}) to be written, in place, from "
            f"number {first} of {name!r} on",
            code="weights-reader-incomplete",
        )


class Source:
    """Values of the tensors of ``model`` without memory.

    given: id(tensor) → its place in the recording, for those that do not begin as they were made.
    """

    def __init__(self, model: nn.Module, record: Recording, given: Mapping[int, View]) -> None:
        self.begins: list[str] = []
        """The names of tensors that the weights lack."""
        self._values = Values(record)
        self._views: dict[int, View] = {}
        self._names: dict[int, str] = {}
        for name, tensor in _named(model):
            if tensor.is_meta and id(tensor) not in self._views:
                self._views[id(tensor)] = given.get(id(tensor), view_of(tensor))
                self._names[id(tensor)] = name
        self._origins = {key: self._values.origin(view) for key, view in self._views.items()}
        if none := [self._names[key] for key, origin in self._origins.items() if not origin]:
            more = f" and {len(none) - 1} more" if len(none) > 1 else ""
            raise UsageError(
                f"{none[0]!r}{more} is on the meta device and has no values: expected it in the weights, or a model "
                "made inside of `with shardengine.meta_init():`, where an initialiser gives it some; what was made on "
                "torch.device('meta'), or moved or cast after that, has none",
                code="model-weights-without-values",
            )

    @classmethod
    def of(cls, model: nn.Module, weights: Weights, where: str = "") -> Source | None:
        """Return the source of ``model``, from ``weights`` and its recording, or None if its values are in memory.

        where: this rank, for messages.
        """
        tensors = dict(_named(model))
        records = {id(r): r for t in tensors.values() if t.is_meta and (r := recording_of(t)) is not None}
        if len(records) > 1:
            raise UsageError(
                f"the model's tensors come from {len(records)} meta_init blocks: expected all of it to be made in one",
                code="meta-init-several-blocks",
            )
        record = next(iter(records.values()), None)
        if weights is None:
            return None if record is None else cls(model, record, {})
        if record is not None and record.sources:
            raise UsageError(
                "weights=: expected None, from_pretrained has said where this model's weights are",
                code="weights-given-twice",
            )
        real = next((name for name, parameter in model.named_parameters() if not parameter.is_meta), None)
        if real is not None and record is None:
            raise UsageError(
                f"weights=: expected a model without values, but {real!r} has some: make the model inside of "
                "`with shardengine.meta_init():`, or load its state dict and leave weights= out",
                code="weights-for-model-with-values",
            )
        reader: Reader = (
            SafetensorsFiles.of(Path(weights)) if isinstance(weights, str | Path) else _Watched(weights, where)
        )
        record = Recording() if record is None else record
        matched = _match(model, record, reader)
        source = cls(model, record, matched)
        source.begins = [name for name, each in _stored(model) if each.is_meta and id(each) not in matched]
        return source

    def gives(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` gets its values here."""
        return id(tensor) in self._views

    def facts(self) -> list[str]:
        """Return lines that must be equal on all ranks."""
        origins = [f"{self._names[key]} from {origin}" for key, origin in self._origins.items()]
        return [*origins, *self._values.facts()]

    def states(self) -> list[tuple[int, Tensor]]:
        """Return the random states of this rank that values depend on."""
        return self._values.states()

    def begin(self, states: Sequence[tuple[int, Tensor]]) -> None:
        """Make values depend on ``states``, which are rank 0's. To be called before the first ``fill``."""
        self._values.prepare(self._views.values(), states)

    def fill(self, parameter: Tensor, order: Sequence[int], first: int, target: Tensor, *, later: bool = False) -> None:
        """Fill ``target`` (1-D, any device) with elements of ``parameter`` from ``first`` on, rounded to its dtype.

        Elements are counted with the dimensions in ``order`` (() is their own). later: ``target`` may be filled as late
        as ``finish`` returns.
        """
        view = self._views[id(parameter)].permuted(order)
        self._values.fill_rounded(view, parameter.dtype, first, target, later=later)

    def finish(self) -> None:
        """Wait until all targets of ``fill(later=True)`` are filled."""
        self._values.finish()

    def close(self) -> None:
        """Close the files and free cached values."""
        self._values.forget()


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and buffer, tied ones under each name."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _stored(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the entries of a state dict, in its order."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        left_out = module._non_persistent_buffers_set
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and name not in left_out:
                yield f"{prefix}.{name}" if prefix else name, tensor


def _match(model: nn.Module, record: Recording, reader: Reader) -> dict[int, View]:
    """Return id(tensor) → its place in the weights.

    For a tied tensor that is there twice the last counts, as in ``load_state_dict``.
    """
    tensors: Mapping[str, Any] = reader.tensors
    found: dict[int, View] = {}
    known = dict(_stored(model))
    for name, tensor in known.items():
        if name not in tensors:
            continue
        facts = tensors[name]
        if tuple(facts.shape) != tuple(tensor.shape):
            raise UsageError(
                f"{name!r} has shape {tuple(facts.shape)} in the weights and {tuple(tensor.shape)} in the model: "
                "expected weights of this model; make the model as the one that was saved, or rename what differs",
                code="weights-shape-differs",
            )
        if tensor.is_meta:
            found[id(tensor)] = view_of(record.add_source(reader, name))
        elif (count := tensor.numel()) > 0:  # it was made from data
            flat = torch.empty(count, dtype=facts.dtype)
            reader.read(name, 0, flat)
            with torch.no_grad():
                tensor.copy_(flat.view(tensor.shape))
    _refuse_unknown(model, tensors.keys() - known.keys(), known)
    return found


def _refuse_unknown(model: nn.Module, unknown: Iterable[str], known: Mapping[str, Tensor]) -> None:
    if names := sorted(unknown):
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        cure = (
            "; shardengine.load_pretrained renames and converts as from_pretrained does"
            if hasattr(model, "from_pretrained")
            else f"; the nearest one that it has is {nearest(names[0], known)}"
        )
        raise UsageError(
            f"the weights have {names[0]!r}{more}, which the model does not have{cure}", code="weights-not-in-model"
        )
