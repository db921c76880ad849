"""Export a checkpoint to torch.distributed.checkpoint: {"model": …, "optim": …}. Owns: keys, reading tensors late.

Must not know: engines. Torch's own planner and writer write the files, in one process and without a process group.

The keys are those of ``get_model_state_dict`` and ``get_optimizer_state_dict``, the latter in both of its forms: states
have the same keys in either form, groups are there by number and, flattened, by parameter. There are two more kinds of
keys: "step" for every kind of optimizer, and our counters. ``dcp`` reads them; torch's loaders read only the keys that
they ask for.

[Note: Resolved late] The planned state dict holds meta tensors. The planner reads each tensor when the writer asks for
it, and frees the memory of the previous one, because the writer would keep all of them until its file is complete.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from shardengine.interchange.dcp import COUNTERS
from shardengine.interchange.stored import StoredCheckpoint
from shardengine.interchange.weight_files import rounded, weights
from shardengine.optim import Lion

_CLASSES: dict[str, Any] = {
    "AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam, "SGD": torch.optim.SGD, "Lion": Lion,
}  # fmt: skip


def write(stored: StoredCheckpoint, directory: Path, *, dtype: torch.dtype | None, as_trained: bool) -> list[str]:
    """Write weights, buffers and optimizer; return notes for the user.

    dtype: of the parameters. None: the stored one (fp32 for parameters with master weights), or with ``as_trained``
    the dtype that the model was trained in.
    """
    late: dict[str, Callable[[], Tensor]] = {}
    state = {"model": _model(stored, dtype, late, exact=dtype is None and not as_trained)}
    state[COUNTERS] = dict(stored.index["counters"])
    notes = []
    if stored.index["optimizer"] is None:
        notes.append("no optimizer in the checkpoint: the output has a model alone")
    else:
        state["optim"] = _optimizer(stored, late)
    writer = FileSystemWriter(directory, single_file_per_rank=True, thread_count=1, per_thread_copy_ahead=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            save(state, storage_writer=writer, planner=_LatePlanner(late), no_dist=True)
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from None  # one process: one failure
    return notes


def _model(
    stored: StoredCheckpoint, dtype: torch.dtype | None, late: dict[str, Callable[[], Tensor]], *, exact: bool
) -> dict[str, Any]:
    """Return every tensor under each of its names in a module's ``state_dict``. exact: as stored, without rounding."""
    aliases = {row["names"][0]: row["names"] for row in stored.parameters}
    found: dict[str, Any] = {}
    for output in weights(stored, dtype):
        kept = stored.dtype(output.origin, output.state) if exact else output.dtype

        def read(origin: str = output.origin, state: str = output.state, kept: torch.dtype = kept) -> Tensor:
            return rounded(stored.whole(origin, state), kept, origin)

        for name in aliases.get(output.origin, [output.origin]):
            found[name] = torch.empty(output.shape, dtype=kept, device="meta")
            late[f"model.{name}"] = read
    return found


def _optimizer(stored: StoredCheckpoint, late: dict[str, Callable[[], Tensor]]) -> dict[str, Any]:
    """Return both forms of ``get_optimizer_state_dict``: states by name, groups by number and, flattened, by name."""
    saved = stored.index["optimizer"]
    kind = saved["kind"]
    made_by = _CLASSES.get(kind) or getattr(torch.optim, kind.removeprefix("torch.optim."), None)
    defaults: dict[str, Any] = {}  # of a user's class, or Muon with another one, all options are saved
    if isinstance(made_by, type) and issubclass(made_by, torch.optim.Optimizer):
        own: Any = made_by
        defaults = own([torch.nn.Parameter(torch.empty(0, 0))], lr=0.0).defaults
    facts = saved.get("facts", {})
    states: dict[str, Any] = {}
    for group in saved["groups"]:
        for name in group["params"]:
            kept = {key: torch.tensor(value) for key, value in facts.get(name, {}).items() if value is not None}
            states[name] = {"step": torch.tensor(float(saved["steps"].get(name, 0))), **kept}
            for key, dtype in stored.states(name).items():
                if key != "weight":
                    states[name][key] = torch.empty(stored.shape(name, key), dtype=dtype, device="meta")
                    late[f"optim.state.{name}.{key}"] = lambda name=name, key=key: stored.whole(name, key)  # type: ignore[misc]
    groups: list[dict[str, Any]] = []
    flattened: dict[str, Any] = {}
    for group in saved["groups"]:
        options = {
            key: tuple(value) if isinstance(value, list) else float(value) if value in ("inf", "-inf") else value
            for key, value in {**({} if "use_muon" in group["options"] else defaults), **group["options"]}.items()
        }
        groups.append({**options, "params": list(group["params"])})
        for name in group["params"]:
            flattened |= {f"param_groups.{name}.{key}": value for key, value in options.items()}
    numbered = {f"param_groups.{number}.{key}" for number, group in enumerate(groups) for key in group}
    flattened = {key: value for key, value in flattened.items() if key not in numbered}
    return {"state": states, "param_groups": groups, **flattened}


class _LatePlanner(DefaultSavePlanner):
    """Torch's planner for meta tensors ([Note: Resolved late]). late: flattened key → a function that reads it."""

    def __init__(self, late: dict[str, Callable[[], Tensor]]) -> None:
        super().__init__()
        self._late = late
        self._last: Tensor | None = None

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the tensor, or the bytes, of one item."""
        if write_item.type == WriteItemType.BYTE_IO or write_item.index.fqn not in self._late:
            return super().resolve_data(write_item)
        if self._last is not None:
            self._last.untyped_storage().resize_(0)
        self._last = self._late[write_item.index.fqn]()
        return self._last
