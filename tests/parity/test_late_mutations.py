"""Every wait, event and order in the engine is needed: without it, late streams find a race, or other bits.

``CAUGHT`` is the table: what is taken out of which function, and the run that finds it. ``NOT_AN_ORDER`` are the calls
of the same names that order no stream, each with what it is for. A new call is in neither, which is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import shardengine
from shardengine.comm import Mesh
from shardengine.offload import MemoryStore
from shardengine.runtime.activation_offload import ActivationStore
from tests.parity.late_cases import USER, Case, run_one
from tests.support.comparing import assert_equal_to_truth
from tests.support.late_streams import adversary
from tests.support.mutations import calls, mutated
from tests.support.ranks import RankFailure, RankPool

Pools = Callable[[int], RankPool]
STEPS = 3
ORDERING = frozenset(
    "wait wait_on_host wait_data hold mark come_home is_current exception result await_group await_all await_reader "
    "await_copy await_weights wait_early wait_for_unshard".split()
)
"""Names of methods with which somebody waits, or says where others have to wait."""
PACKAGES = ("ddp", "offload", "sharding", "runtime", "optim", "checkpoint", "engine")


@dataclass(frozen=True)
class Mutation:
    """``old`` in ``function`` of ``file`` is ``new``. case: the run that finds it, on so many ranks; or a scenario."""

    file: str
    function: str
    old: str
    case: Case | str
    new: str = "None"
    ranks: int = 2


RACE, CHANGED = "Race", "other"
LATER = Case("1", 1, "fp16", "a part on the host", "weights later", around=("whole weights",))
HOST = Case("2", 3, "bf16", "states on the host")
WEIGHTS = Case("3", 1, "bf16", "weights on the host")
AGAIN = Case("3", 1, "bf16", "all on the host", "blocks computed again", stream=USER)
DISK = Case("3", 3, "bf16", "weights on disk")
EARLY = Case("2", 1, "bf16", "stepped in backward", around=("saved behind",))
FREED = Case("1", 1, "bf16", "device", "weights later", around=("freed",))
UNLOCKED = Case("3", 1, "bf16", "weights on the host, not page-locked")
CAUGHT = [
    Mutation("comm/collectives.py", "Collectives.broadcast", ".wait()", Case("2"), ""),
    Mutation("comm/collectives.py", "Collectives.exchange_values", ".wait()", Case("2"), ""),
    Mutation("ddp/reducer.py", "Reducer._join", ".wait()", Case("3", 1, "fp32", model="gradients twice"), ""),
    Mutation("ddp/reducer.py", "Reducer._finish", "flight.work.wait()", Case("2")),
    Mutation("ddp/reducer.py", "Reducer._finish", "self._spill.settle(leave)", HOST),
    Mutation("ddp/gradient_bucket.py", "GradientBucket.gradient_to_step", "end.wait_on_host()",
             Case("0", 1, "bf16", "states on the host")),
    Mutation("offload/copy_queue.py", "CopyQueue.settle", "end.wait_on_host()", HOST),
    Mutation("offload/nvme/file_tier.py", "FileTier.take_buffer", "end.wait_on_host()", DISK),
    Mutation("offload/nvme/file_tier.py", "FileStore.check_in", "after.wait_on_host()", DISK),
    Mutation("offload/nvme/file_tier.py", "FileStore.check_in", "self._release(after)", DISK, "self._release()"),
    Mutation("offload/platform.py", "Fetched.get", "self._done.wait_on_host()", Case("2", 1, "fp16")),
    Mutation("offload/shard_store.py", "MemoryStore.tensors", "self.pending.wait_on_host()", WEIGHTS),
    Mutation("offload/shard_store.py", "MemoryStore.check_out", "self.pending.wait_on_host()", "a store is written"),
    Mutation("offload/shard_store.py", "MemoryStore.drop", "self.pending.wait_on_host()", UNLOCKED, ranks=1),
    Mutation("sharding/bucket.py", "Bucket.load_shard", "platform.mark()", WEIGHTS, "Done()"),
    Mutation("sharding/bucket.py", "Bucket.load_shard", "store.pending", WEIGHTS, "Done()"),
    Mutation("sharding/bucket.py", "Bucket.load_shard", "after=end", DISK, "after=Done()"),
    Mutation("sharding/bucket.py", "Bucket.begin_weights", "store.pending.wait()",
             Case("3", 1, "fp32", "weights on the host", model="the first block at times"), ranks=1),
    Mutation("sharding/bucket.py", "FlatBuffer.let_go", "self.platform.come_home(self._home)",
             Case("0", 3, "fp32", stream=USER)),
    Mutation("runtime/activation_offload.py", "_Call.give_up_sources", "stretch.done.wait()", AGAIN),
    Mutation("runtime/activation_offload.py", "_Stretch.__del__", "self.done.wait()", "a graph is dropped", ranks=1),
    Mutation("runtime/activation_offload.py", "_unpack", "stretch.done.wait()", AGAIN),
    Mutation("runtime/deferred_gather.py", "DeferredGather._await", ".wait()", LATER, ""),
    Mutation("runtime/hooks.py", "attach_deferred_gather", "deferred_gather.await_group(number)",
             Case("1", 1, "bf16", "device", "weights later")),
    Mutation("runtime/unit.py", "Unit.unshard", "collectives.mesh.platform.loads.is_current()", WEIGHTS,
             "nullcontext()"),
    Mutation("comm/mesh.py", "Mesh.renew", "platform_of=lambda device: platform",
             Case("3", 1, "bf16", "weights on the host", around=("reset",)), "wire=self.wire"),
    Mutation("runtime/unit.py", "Unit.wait_for_unshard", "loaded.wait()", WEIGHTS, ranks=1),
    Mutation("runtime/unit.py", "Unit.wait_for_unshard", "whole.wait()", WEIGHTS),
    Mutation("runtime/unit.py", "Unit.summon", ".wait()", Case("3", 1, "bf16", around=("whole weights",)), ""),
    Mutation("optim/in_backward.py", "StepsInBackward._step", "after.exception()", EARLY),
    Mutation("optim/optimizer.py", "ShardedOptimizer.step_buckets", "self.await_reader()", EARLY),
    Mutation("optim/optimizer.py", "ShardedOptimizer.await_reader", "self._reading.exception()", EARLY),
    Mutation("optim/update.py", "step_bucket", ".wait()", Case("3", 1, "fp32", "weights on the host"), ""),
    Mutation("optim/update.py", "send", "end.wait()", HOST),
    Mutation("optim/update.py", "send", "ends[-1] if ends else Done()", WEIGHTS, "Done()"),
    Mutation("checkpoint/background.py", "Background.copy", "mesh.platform.mark()",
             Case("2", 1, "bf16", around=("saved behind", "written")), "Done()"),
    Mutation("checkpoint/background.py", "_copy", "end.wait_on_host()", EARLY),
    Mutation("engine/core.py", "Core.publish", "work.wait()", Case("2")),
    Mutation("engine/core.py", "Core.await_weights", "self.deferred_gather.await_all()", LATER),
    Mutation("engine/core.py", "Core.adopting_masters", "work.wait()", Case("2", 1, "bf16", around=("loaded",))),
    Mutation("engine/full_access.py", "full_params", "core.await_weights()", LATER),
    Mutation("engine/gathering.py", "gathered", ".wait()", LATER, ""),
    Mutation("engine/offload_states.py", "offload", "core.await_weights()", FREED),
    Mutation("engine/export.py", "_whole_values", "core.await_weights()", LATER),
    Mutation("engine/closing.py", "_leave_weights", "unit.wait_for_unshard()", WEIGHTS),
]  # fmt: skip


def broken(mutation: Mutation, folder: str) -> dict[str, Any]:
    """On one rank: the case, or scenario, with the mutation."""
    with mutated(mutation.file, mutation.function, mutation.old, mutation.new):
        if isinstance(mutation.case, Case):
            return run_one(mutation.case, STEPS, folder)
        SCENARIOS[mutation.case]()
        return {}


def a_store_is_written() -> None:
    """On the host, while a copy of it to the device may be under way."""
    with adversary(Mesh(0, 1, torch.device("cpu"))) as foe:
        store = MemoryStore(foe.mesh.platform, "cpu", pinned=True)
        store.add({"a": torch.ones(8)})
        there, kept = torch.empty(8), store.check_out(to_copy=True)["a"]
        store.check_in(changed=False, after=foe.mesh.platform.loads.copy(kept, there))
        store.check_out()["a"].fill_(2.0)


def a_graph_is_dropped() -> None:
    """What a block keeps is on its way back when nobody wants it any more: its memory is given out again."""
    with adversary(Mesh(0, 1, torch.device("cpu"))) as foe:
        home = ActivationStore(foe.mesh.platform, lambda storage: False)
        leaf = torch.randn(64, requires_grad=True)
        with home.saving():
            first = torch.sin(leaf * 2)
        with home.saving():
            last = torch.sin(first.detach().requires_grad_())
        last.sum().backward()  # fetches what the first one keeps, too
        del first, last


SCENARIOS: dict[str, Callable[[], None]] = {
    "a store is written": a_store_is_written,
    "a graph is dropped": a_graph_is_dropped,
}


@pytest.mark.parametrize("mutation", CAUGHT, ids=lambda each: f"{each.function}: {each.old}")
def test_without_it_there_is_a_race_or_another_result(pools: Pools, tmp_path: Path, mutation: Mutation) -> None:
    ranks = pools(mutation.ranks)
    try:
        found = ranks.run(broken, mutation, str(tmp_path))
    except RankFailure as failure:
        seen = "\n".join(failure.errors.values())
        assert "Race" in seen or "AssertionError" in seen, seen
        return
    assert isinstance(mutation.case, Case), "the scenario found nothing"
    for result in found:
        del result["issued"], result["counts"]
    with pytest.raises(AssertionError):
        assert_equal_to_truth(found, mutation.case.truth(mutation.ranks, STEPS))


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_scenarios_find_nothing_in_the_engine_as_it_is(name: str) -> None:
    SCENARIOS[name]()


FIFO = "on NCCL the norm's exchange comes behind all gathers in one communicator; on gloo it is needed"
THREAD = "a thread's end, for its error, or because a tier serves one thread; no stream"
PASSES_ON = "passes on to a wait that is in the table"
DISK_ITSELF = "the disk's own, between it and the host"
COPIER = "copies of saves are made in order by one thread, so that the last one's end is everyone's; for its error"
TRACE = "a moment for the trace"
FAILED = "after a failure: nothing is used again that was under way"
NOT_AN_ORDER: dict[tuple[str, str, str], str] = {
    ("ddp/early_use.py", "EarlyUse.wait", "self._consumer.wait_early()"): PASSES_ON,
    ("ddp/reducer.py", "Reducer.release", "self.early_use.wait()"): THREAD,
    ("ddp/gradient_bucket.py", "GradientBucket._give_fetched", "end.wait_on_host()"): FAILED,
    ("offload/copy_queue.py", "CopyQueue.drop", "end.wait_on_host()"): FAILED,
    ("offload/platform.py", "CopyStream.copy", "done.hold(self._stream)"): "told by tests/offload/test_platform.py",
    ("offload/platform.py", "Platform.fetch", "self.mark()"): "told by tests/offload/test_platform.py",
    ("runtime/unit.py", "Unit._abort_unshard", "loaded.wait()"): FAILED,
    ("optim/in_backward.py", "StepsInBackward.deliver", "early.done.result()"): THREAD,
    ("optim/in_backward.py", "StepsInBackward.deliver", "self.wait()"): THREAD,
    ("optim/in_backward.py", "StepsInBackward.deliver", "each.done.exception()"): THREAD,
    ("optim/in_backward.py", "StepsInBackward.wait", "early.done.exception()"): THREAD,
    ("optim/in_backward.py", "StepsInBackward.forget", "self.wait()"): THREAD,
    ("optim/optimizer.py", "ShardedOptimizer.wait_early", "self.stepped_early.wait()"): THREAD,
    ("optim/optimizer.py", "ShardedOptimizer.step_buckets", "self.stepped_early.wait()"): THREAD,
    ("optim/optimizer.py", "ShardedOptimizer.await_reader", "self.stepped_early.wait()"): THREAD,
    ("engine/closing.py", "_leave_weights", "core.await_weights()"): FIFO,
    ("engine/engine.py", "Engine.step", "core.await_weights()"): FIFO,
    ("engine/full_access.py", "full_optimizer_state", "core.await_weights()"): FIFO,
    ("engine/rebuild.py", "_carry_out", "core.await_weights()"): FIFO,
    ("engine/recovery.py", "reset", "core.await_weights()"): FIFO,
    ("checkpoint/loading.py", "load", "core.await_weights()"): FIFO,
    ("engine/recovery.py", "reset", "optimizer.wait_early()"): THREAD,
    ("engine/closing.py", "dissolve", "core.reducer.early_use.wait()"): PASSES_ON,
    ("engine/full_access.py", "full_optimizer_state", "optimizer.await_reader()"): PASSES_ON,
    ("engine/offload_states.py", "offload", "optimizer.await_reader()"): "so that the memory is free when it returns",
    ("engine/assembly.py", "_attach", "core.attachments.mark(model)"): "a mark on the model",
    ("checkpoint/background.py", "Background.await_copy", "self._copying.exception()"): COPIER,
    ("checkpoint/background.py", "Background.copy", "self.await_copy()"): COPIER,
    ("checkpoint/background.py", "Background.copy", "self._running[-2][1].exception()"): COPIER,
    ("checkpoint/background.py", "Background.failures", "future.exception()"): COPIER,
    ("checkpoint/saving.py", "finish", "engine._saves.await_copy()"): COPIER,
    ("checkpoint/loading.py", "load", "engine.optimizer.await_reader()"): PASSES_ON,
    ("checkpoint/reader.py", "Reader._whole", "future.result()"): DISK_ITSELF,
    ("checkpoint/tensor_file.py", "Stream._finish", "self._under_way.pop(0).result()"): DISK_ITSELF,
    ("offload/nvme/extent_file.py", "ExtentFile._mapped", "blocks.request.wait()"): DISK_ITSELF,
    ("offload/nvme/file_tier.py", "FileStore._cleared",
     "self._tier.file.write(part.extent, staging(part.extent.count)).wait()"): DISK_ITSELF,
    ("offload/nvme/file_tier.py", "FileStore._new_part", "self._tier.hold(start + whole_pages(end))"): "a size",
    ("offload/nvme/file_tier.py", "FileStore.add", "self._tier.file.write(part.extent, memory).wait()"): DISK_ITSELF,
    ("offload/nvme/file_tier.py", "FileStore.check_out", "request.wait()"): DISK_ITSELF,
    ("offload/nvme/file_tier.py", "FileStore.land", "request.wait()"): DISK_ITSELF,
    ("offload/nvme/file_tier.py", "FileTier.take_back_lent", "end.wait_on_host()"):
        "at the end of the engine, before its buffers are given back to the system",
    ("offload/nvme/io_request.py", "IORequest.wait_quietly", "self._ended.wait()"): DISK_ITSELF,
    ("runtime/hooks.py", "attach_deferred_gather", "deferred_gather.await_all()"): PASSES_ON,
    ("runtime/hooks.py", "attach_deferred_gather", "deferred_gather.await_group(0)"):
        "for a block that is called by itself and shares a weight with the root; no run here does",
    ("runtime/schedule.py", "Schedule._end_pass", "unit.wait_for_unshard()"): PASSES_ON,
    ("runtime/schedule.py", "Schedule._wait_for_unshard", "unit.wait_for_unshard()"): PASSES_ON,
    ("runtime/schedule.py", "Schedule._hold_for_backward", "self._collectives.trace.mark()"): TRACE,
    ("runtime/schedule.py", "Schedule.pre_forward", "self._collectives.trace.mark()"): TRACE,
    ("sharding/bucket.py", "FlatBuffer.relocate", "self.platform.come_home(home)"): FAILED,
}  # fmt: skip


Call = tuple[str, str, str]


def known(call: Call, found: set[Call]) -> bool:
    """Whether a call is in one of the tables; ".wait()" stands for one call, where a function has only one."""
    if call in NOT_AN_ORDER:
        return True
    file, function, text = call
    alike = [each for each in found if each[:2] == (file, function) and each[2].endswith(".wait()")]
    taken = {mutation.old for mutation in CAUGHT if (mutation.file, mutation.function) == (file, function)}
    return text in taken or (".wait()" in taken and alike == [call])


def test_every_wait_is_in_one_of_the_tables() -> None:
    root = Path(shardengine.__file__).parent
    files = sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))
    found = {(str(p.relative_to(root)), *call) for p in files for call in calls(p, ORDERING)}
    assert len(found) > 60
    missing = sorted(each for each in found if not known(each, found))
    assert not missing, "waits that nobody has taken out yet:\n" + "\n".join(map(str, missing))
    assert not NOT_AN_ORDER.keys() - found, "there is no such call any more"
