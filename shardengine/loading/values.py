"""Values of tensors that a recording has made: computed as a whole, or an interval alone, from steps and files.

Owns: the steps that a value needs, the random states that they begin with, the mapping from an interval of a result to
intervals of its inputs. Must not know: modules, ranks, the use of the values.

[Note: Intervals] Elements of a tensor in its order in memory are an interval of its storage. If a single step wrote
that storage, and it only copies, casts, joins or stacks, the interval is made of intervals of the step's inputs, down
to the files; views are strides. So fused and renamed weights are read like others, each element once. A tensor that was
computed in another way is computed as a whole, one at a time, and kept until the next one is requested.

[Note: Replayed draws] Torch's generator is a stream. So all draws up to the end of the recording are made once, in
order, each into memory that is freed at once, and the state before every draw that some value needs is kept: the draw
is repeated from there when its value is requested. If no value needs a draw, nothing is drawn.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from shardengine.errors import UsageError
from shardengine.loading.recording import Recording, Step, View

_AT_ONCE = 1 << 20
"""The number of elements that are cast at once."""
_SHORT = 512
"""Elements: if contiguous runs are shorter, a tensor of a file is read as a whole."""
_COPIES = {"aten::_to_copy", "aten::clone"}
_JOINS = {"aten::cat": False, "aten::stack": True}


class Described(Protocol):
    """The facts about a tensor that are known before it is read."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its elements."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""


class Reader(Protocol):
    """A place that weights are read from: a folder of safetensors files, or an object of the user's."""

    @property
    def tensors(self) -> Any:
        """Name → ``Described``."""

    def read(self, name: str, first: int, target: Tensor) -> None:
        """Fill ``target`` (1-D, on the CPU, of the tensor's dtype) with elements from ``first`` on.

        Elements are counted in the order of the tensor's dimensions.
        """

    def close(self) -> None:
        """End reading: ``read`` is not called any more."""


@runtime_checkable
class ReadsAhead(Protocol):
    """A reader that can have several reads in flight."""

    def begin_read(self, name: str, first: int, target: Tensor) -> None:
        """Begin a ``read``: ``target`` is filled when ``finish`` returns."""

    def finish(self) -> None:
        """Wait for all reads of ``begin_read``."""


class Values:
    """Values of one recording."""

    def __init__(self, record: Recording) -> None:
        self._record = record
        self._before: dict[int, Tensor] = {}
        self._last: tuple[int, torch.UntypedStorage] | None = None

    # Which steps

    def origin(self, view: View) -> str:
        """Return the origin of a tensor's values: "files", "an initialiser", or "" if it has none."""
        steps = self._steps_for([view.storage])
        reached = {view.storage}.union(*(step.reads for step in map(self._step, steps)), *map(self._made_by, steps))
        if reached & self._record.lost:
            return ""
        if reached & self._record.sources.keys():
            return "files"
        blank = all(self._step(number).function._schema.name.startswith(_BLANK) for number in steps)
        return "" if not steps or blank else "an initialiser"

    def draws(self, views: Iterable[View]) -> bool:
        """Return whether some of ``views`` need draws."""
        return any(self._step(number).draws for number in self._steps_for([view.storage for view in views]))

    def states(self) -> list[tuple[int, Tensor]]:
        """Return (step, state that its generator was set to) for all such steps; no other state affects draws."""
        return [(number, step.state) for number, step in enumerate(self._record.steps) if step.state is not None]

    def facts(self) -> list[str]:
        """Return lines that must be equal on all ranks; random states are not among them."""
        readers = {id(reader): reader for reader, _ in self._record.sources.values()}
        files = [fact for reader in readers.values() if hasattr(reader, "facts") for fact in reader.facts()]
        return [*files, *(f"{number}: {_described(step)}" for number, step in enumerate(self._record.steps))]

    def _step(self, number: int) -> Step:
        return self._record.steps[number]

    def _made_by(self, number: int) -> set[int]:
        return {view.storage for view in self._step(number).made.values()}

    def _steps_for(self, storages: Iterable[int], before: int | None = None) -> list[int]:
        """Return the steps that give ``storages`` the values they have before step ``before``, ascending."""
        before = len(self._record.steps) if before is None else before
        found: set[int] = set()
        waiting: list[int] = []

        def add(storage: int, end: int) -> None:
            writers = self._record.writers.get(storage, [])
            for number in writers[: bisect_left(writers, end)]:
                if number not in found:
                    found.add(number)
                    heapq.heappush(waiting, -number)

        for storage in storages:
            add(storage, before)
        while waiting:
            number = -heapq.heappop(waiting)
            for storage in self._step(number).reads:
                add(storage, number)
        return sorted(found)

    # Random numbers

    def prepare(self, views: Iterable[View], states: Iterable[tuple[int, Tensor]]) -> None:
        """Find the random states that ``views`` need ([Note: Replayed draws]).

        states: those of the method ``states``, on the rank whose values are wanted. Afterwards torch's generator is in
        the state that making the model would have left.
        """
        drawing = [number for number, step in enumerate(self._record.steps) if step.draws]
        asked = [view.storage for view in views]
        needed = set(self._steps_for(asked))
        if not needed.intersection(drawing):
            return
        for number in drawing:
            if _depends(self._step(number)):
                needed |= set(self._steps_for(self._step(number).reads, number))
        given, own, untouched = dict(states), dict(self.states()), self._untouched()
        same = given.keys() == own.keys() and all(torch.equal(given[number], own[number]) for number in own)
        with _kept_state(restore=not (untouched and same)):
            self._draw_all(drawing, given, needed)
        if untouched and not same:
            with _kept_state(restore=False):
                self._draw_all(drawing, own, set())

    def _draw_all(self, drawing: Iterable[int], states: Mapping[int, Tensor], needed: set[int]) -> None:
        """Make all draws in order. states: set in the generators · needed: steps whose random state is kept."""
        for number in drawing:
            step = self._step(number)
            if number in states and not step.own:
                torch.set_rng_state(states[number])
            if number in needed:
                self._before[number] = states[number] if step.own else torch.get_rng_state()
            if not step.own:
                self._draw_once(number)

    def _untouched(self) -> bool:
        """Return whether nobody has drawn, or set the generator, since the recording."""
        return self._record.state is not None and torch.equal(torch.get_rng_state(), self._record.state)

    def _draw_once(self, number: int) -> None:
        """Repeat the draws of a step, to advance the generator."""
        step = self._step(number)
        if _depends(step):
            state = torch.get_rng_state()
            real = self._run(self._steps_for(step.reads, number), step.reads)
            torch.set_rng_state(state)
        else:
            real = {}
        _carry_out(step, real)

    # Whole tensors

    def whole(self, view: View) -> Tensor:
        """Return a whole tensor."""
        return view.on(self._storage(view.storage))

    def forget(self) -> None:
        """Free the cached tensor and close the readers."""
        self._last = None
        for reader, _ in self._record.sources.values():
            reader.close()

    def equal(self, one: View, other: View) -> bool:
        """Return ``torch.equal``, computed a part at a time if both can be read in parts."""
        if (one.size, one.dtype) != (other.size, other.dtype):
            return False
        if not (self._in_parts(one) and self._in_parts(other)):
            return torch.equal(self.whole(one).clone(), self.whole(other))
        for at in range(0, one.numel, _AT_ONCE):
            parts = [torch.empty(min(_AT_ONCE, one.numel - at), dtype=one.dtype) for _ in range(2)]
            for view, part in zip((one, other), parts, strict=True):
                self.fill(view, at, part)
            if not torch.equal(*parts):
                return False
        return True

    def _in_parts(self, view: View) -> bool:
        writers = self._record.writers.get(view.storage, [])
        copies = len(writers) == 1 and self._step(writers[0]).function._schema.name in (*_COPIES, *_JOINS)
        return view.is_contiguous and (copies or view.storage in self._record.sources)

    def _storage(self, storage: int) -> torch.UntypedStorage:
        if self._last is None or self._last[0] != storage:
            self._last = None
            self._last = storage, self._run(self._steps_for([storage]), [storage])[storage]
        return self._last[1]

    def _run(self, steps: Iterable[int], wanted: Iterable[int]) -> dict[int, torch.UntypedStorage]:
        """Carry out ``steps`` and return the ``wanted`` storages. Those that no step makes are read from files."""
        real: dict[int, torch.UntypedStorage] = {}
        with _kept_state(restore=True), torch.no_grad():
            for number in steps:
                step = self._step(number)
                for storage in step.reads - real.keys():
                    real[storage] = self._source(storage)
                if step.draws and not step.own:
                    torch.set_rng_state(self._before[number])
                for place, result in _carry_out(step, real, self._before.get(number)).items():
                    real[step.made[place].storage] = _laid_out(result, step.made[place])
        for storage in wanted:
            if storage not in real:
                real[storage] = self._source(storage)
        return real

    def _source(self, storage: int) -> torch.UntypedStorage:
        if storage not in self._record.sources:
            raise UsageError(
                "a value is needed that nothing gives: the tensor was left on the meta device",
                code="model-weights-without-values",
            )
        reader, name = self._record.sources[storage]
        facts = reader.tensors[name]
        flat = torch.empty(math.prod(facts.shape), dtype=facts.dtype)
        reader.read(name, 0, flat)
        return flat.untyped_storage()

    # Intervals ([Note: Intervals])

    def finish(self) -> None:
        """Wait until all targets of ``fill(later=True)`` are filled."""
        for reader in {id(reader): reader for reader, _ in self._record.sources.values()}.values():
            if isinstance(reader, ReadsAhead):
                reader.finish()

    def fill_rounded(self, view: View, dtype: torch.dtype, first: int, target: Tensor, *, later: bool = False) -> None:
        """Fill ``target`` as ``fill`` does, with elements of ``view`` rounded to ``dtype``."""
        if dtype in (view.dtype, target.dtype):
            self.fill(view, first, target, later=later)
            return
        for at in range(0, target.numel(), _AT_ONCE):
            part = target[at : at + _AT_ONCE]
            rounded = torch.empty(part.numel(), dtype=dtype)
            self.fill(view, first + at, rounded)
            part.copy_(rounded)

    def fill(self, view: View, first: int, target: Tensor, *, later: bool = False) -> None:
        """Fill ``target`` (1-D) with elements of ``view`` from ``first`` on, in the order of its dimensions.

        They are cast to its dtype. later: ``target`` may be filled as late as ``finish`` returns.
        """
        for begin, count, done in _runs(view, first, target.numel(), self._whole_below(view)):
            if begin < 0:
                flat = self.whole(view).reshape(-1)
                target[done : done + count].copy_(flat[first + done : first + done + count])
            else:
                self._fill_storage(view, begin, target[done : done + count], later=later)

    def _whole_below(self, view: View) -> int:
        return _SHORT if view.numel > _SHORT else 0

    def _fill_storage(self, view: View, begin: int, target: Tensor, *, later: bool) -> None:
        """Fill ``target`` with elements of the storage of ``view`` from ``begin`` on, in the dtype of ``view``."""
        storage = view.storage
        if storage in self._record.sources:
            self._read(storage, view.dtype, begin, target, later=later)
            return
        writers = self._record.writers.get(storage, [])
        step = self._step(writers[0]) if len(writers) == 1 else None
        made = next((each for each in step.made.values() if each.storage == storage), None) if step else None
        if step is None or made is None or made.dtype != view.dtype or made.offset or step.draws:
            self._copy_whole(view, begin, target)
            return
        parts = _parts(step, made, begin, begin + target.numel())
        if parts is None:
            self._copy_whole(view, begin, target)
            return
        for source, first, done, count in parts:
            self.fill_rounded(source, made.dtype, first, target[done : done + count], later=later)

    def _copy_whole(self, view: View, begin: int, target: Tensor) -> None:
        flat = torch.empty(0, dtype=view.dtype).set_(self._storage(view.storage))
        target.copy_(flat[begin : begin + target.numel()])

    def _read(self, storage: int, dtype: torch.dtype, begin: int, target: Tensor, *, later: bool) -> None:
        reader, name = self._record.sources[storage]
        own = reader.tensors[name].dtype
        if own != dtype:
            self._copy_whole(View(storage, dtype, (), (), 0), begin, target)
        elif target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous():
            if later and isinstance(reader, ReadsAhead):
                reader.begin_read(name, begin, target)
            else:
                reader.read(name, begin, target)
        else:
            for at in range(0, target.numel(), 4 * _AT_ONCE):
                part = target[at : at + 4 * _AT_ONCE]
                read = torch.empty(part.numel(), dtype=dtype)
                reader.read(name, begin + at, read)
                part.copy_(read)


def carry_out_now(record: Recording, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry out an operation during the recording, as ``recording.Evaluate``; the random state is left as it was."""
    values, views = Values(record), [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, View)]
    with _kept_state(restore=True):
        values.prepare(views, values.states())
    if function._schema.name == "aten::equal" and len(views) == 2:
        return values.equal(*views)
    args, kwargs = tree_map_only(View, lambda view: values.whole(view).clone(), (args, kwargs))
    return function(*args, **kwargs)


_BLANK = ("aten::empty", "aten::new_empty")


def _depends(step: Step) -> bool:
    """Return whether the draws of a step may depend on values that it reads, and not only on their number."""
    return bool(step.reads - step.writes) or step.function._schema.name in _OF_OWN_VALUES


_OF_OWN_VALUES = {"aten::bernoulli_", "aten::native_dropout"}


def _carry_out(step: Step, real: dict[int, torch.UntypedStorage], state: Tensor | None = None) -> dict[int, Tensor]:
    """Carry out one step and return its new results by place. Storages that are not in ``real`` are blank."""

    def tensor(view: View) -> Tensor:
        if view.storage in real:
            return view.on(real[view.storage])
        return torch.empty_strided(view.size, view.stride, dtype=view.dtype)

    args, kwargs = tree_map_only(View, tensor, (step.args, step.kwargs))
    if step.own:
        generator = torch.Generator()
        generator.set_state(state)  # type: ignore[arg-type]
        kwargs["generator"] = generator
    with torch.no_grad():
        results = tree_flatten(step.function(*args, **kwargs))[0]
    return {place: results[place] for place in step.made}


def _laid_out(result: Tensor, view: View) -> torch.UntypedStorage:
    """Return a storage with the values of ``result`` laid out as ``view``."""
    if (tuple(result.stride()), result.storage_offset()) != (view.stride, view.offset) or result.dtype != view.dtype:
        storage = torch.empty_strided(view.size, view.stride, dtype=view.dtype)
        result = storage.copy_(result)
    return result.untyped_storage()


def _runs(view: View, first: int, count: int, shortest: int) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of elements [first, first + count): (start in the storage, length, elements before it).

    If the runs are shorter than ``shortest``, yields one run that begins at -1.
    """
    if not count:
        return
    inner, dimension, expected = 1, len(view.size), 1
    while dimension and (view.size[dimension - 1] == 1 or view.stride[dimension - 1] == expected):
        dimension -= 1
        inner *= view.size[dimension]
        expected *= view.size[dimension]
    if dimension == 0:
        yield view.offset + first, count, 0
        return
    if inner < shortest:
        yield -1, count, 0
        return
    done = 0
    while done < count:
        row, column = divmod(first + done, inner)
        at = view.offset + column
        for size, stride in zip(reversed(view.size[:dimension]), reversed(view.stride[:dimension]), strict=True):
            row, index = divmod(row, size)
            at += index * stride
        length = min(inner - column, count - done)
        yield at, length, done
        done += length


def _parts(step: Step, made: View, begin: int, end: int) -> list[tuple[View, int, int, int]] | None:
    """Return elements [begin, end) of a step's result as (input, its first element, elements before it, count).

    Returns None if the step is not a mere copy.
    """
    name = step.function._schema.name
    order = made.order
    if not made.permuted(order).is_contiguous:
        return None
    if name in _COPIES and isinstance(step.args[0], View):
        return [(step.args[0].permuted(order), begin, 0, end - begin)]
    if name not in _JOINS or not made.is_contiguous:
        return None
    inputs = step.args[0]
    if not all(isinstance(each, View) and each.dtype == made.dtype for each in inputs):
        return None
    dim = (step.args[1] if len(step.args) > 1 else step.kwargs.get("dim", 0)) % len(made.size)
    if _JOINS[name]:
        widths, inner = [1] * len(inputs), math.prod(made.size[dim + 1 :])
    else:
        if any(len(each.size) != len(made.size) for each in inputs):
            return None
        widths, inner = [each.size[dim] for each in inputs], math.prod(made.size[dim + 1 :])
    row = sum(widths) * inner
    found, at = [], begin
    while at < end:
        outer, column = divmod(at, row)
        for each, width in zip(inputs, widths, strict=True):
            if column < width * inner:
                count = min(width * inner - column, end - at)
                found.append((each, outer * width * inner + column, at - begin, count))
                at += count
                break
            column -= width * inner
    return found


def _described(step: Step) -> str:
    rows = []
    for each in tree_flatten((step.args, step.kwargs))[0]:
        if isinstance(each, View):
            rows.append(f"{each.size}")
        elif isinstance(each, Tensor):
            rows.append(f"data {tuple(each.shape)} {_digest(each)}")
        elif isinstance(each, (int, float, bool, str, torch.dtype)):
            rows.append(str(each))
    return f"{step.function} {' '.join(rows)}"


def _digest(tensor: Tensor) -> str:
    """Return a digest of an argument's values: equal for equal values."""
    if tensor.is_meta:
        return "meta"
    data = tensor.detach().cpu().contiguous().reshape(-1)
    return sha256(data.view(torch.uint8).numpy().tobytes()).hexdigest()[:12] if data.numel() else "nothing"


@contextmanager
def _kept_state(*, restore: bool) -> Iterator[None]:
    """Restore torch's random state at the end, if ``restore``; otherwise leave it."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        if restore:
            torch.set_rng_state(state)
