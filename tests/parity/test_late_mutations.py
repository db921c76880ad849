"""Every wait, event and order in the package is needed: without it, late streams find a race, or other bits.

``CAUGHT`` is the table: what is taken out of which function, and the run, or the scenario, that finds it.
``NOT_AN_ORDER`` are the calls of the same names that order no stream, each with what it is for. A new call is in
neither, which is an error. Of the calls of CUDA itself a scenario has a fake of CUDA write down what it is told.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

import shardengine
from shardengine.checkpoint import tensor_file
from shardengine.comm import Collectives, Mesh
from shardengine.offload import BufferPool, MemoryStore, direct_io
from shardengine.runtime.activation_offload import ActivationStore
from tests import oracle
from tests.offload import test_platform
from tests.parity.late_cases import USER, Case, run_one
from tests.parity.test_hierarchical_reduce import reduce_one
from tests.parity.test_hybrid import gather_one
from tests.support import HANG_S, adafactor_cases, cases, muon_cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.damage import small_chunks
from tests.support.late_streams import adversary
from tests.support.mutations import calls, mutated
from tests.support.played_nccl import played_mesh
from tests.support.ranks import RankFailure, RankPool

Pools = Callable[[int], RankPool]
STEPS = 3
ORDERING = frozenset(
    "wait wait_on_host wait_data hold mark come_home is_current exception result await_group await_all await_reader "
    "await_copy await_weights wait_early wait_for_unshard wait_for synchronize wait_event wait_stream record_event "
    "record_stream _await _wait wait_here _wait_for _wait_under_watchdog _held_up".split()
)
"""Names of methods and functions with which somebody waits, or says where others have to wait."""


@dataclass(frozen=True)
class Mutation:
    """``old`` in ``function`` of ``file`` is ``new``. case: the run that finds it, on so many ranks; or the name of a
    scenario, which knows on how many."""

    file: str
    function: str
    old: str
    case: Case | str
    new: str = "None"
    ranks: int = 1


LATER = Case("1", 1, "fp16", "a part on the host", "weights later", around=("whole weights",))
HOST = Case("2", 3, "bf16", "states on the host")
WEIGHTS = Case("3", 1, "bf16", "weights on the host")
AGAIN = Case("3", 1, "bf16", "all on the host", "blocks computed again", stream=USER)
DISK = Case("3", 3, "bf16", "weights on disk")
EARLY = Case("2", 1, "bf16", "stepped in backward", around=("saved behind",))
FREED = Case("1", 1, "bf16", "device", "weights later", around=("freed",))
UNLOCKED = Case("3", 1, "bf16", "weights on the host, not page-locked")
SAVED = Case("2", 1, "bf16", around=("saved",))
TWO_STEPS, WRITTEN, FETCHED = "a reduction in two steps", "a file is written", "what CUDA is told of fetches"
BOTH_AXES = "a gather along both axes"
COPIED, TIMED = "what CUDA is told of copies", "what CUDA is told of times"
APART = Case("1 hybrid", 1, "fp32", options="groups step apart")
HOST_APART = Case("1 hybrid", 1, "fp32", "states on the host", "groups step apart")
TWICE_APART = Case("2 hybrid", 1, "fp32", options="groups gossip", model="gradients twice")
CAUGHT = [
    Mutation("comm/collectives.py", "Collectives.broadcast", ".wait()", Case("2"), "", ranks=2),
    Mutation("comm/collectives.py", "Collectives._exchanged", ".wait()", "ranks exchange", ""),
    Mutation("comm/collectives.py", "Collectives.exchange_values", ".wait()", Case("2"), "", ranks=2),
    Mutation("comm/work.py", "CollectiveLedger._wait", "wait_for(work, record, self.failures, meanwhile)",
             "ranks exchange"),
    Mutation("comm/work.py", "CollectiveLedger._held_up", "wait_for(work, record, self.failures, meanwhile)", Case("2"),
             ranks=2),
    Mutation("comm/work.py", "CollectiveLedger._wait_here", "wait_for(work, record, self.failures)", TWO_STEPS),
    Mutation("comm/transfer.py", "ReduceScatter._start_two_steps", "mesh.platform.mark()", TWO_STEPS, "Done()"),
    Mutation("comm/transfer.py", "ReduceScatter._start_two_steps", "started.wait()", TWO_STEPS),
    Mutation("comm/transfer.py", "ReduceScatter._start_two_steps", "fabric.between_steps.is_current()", TWO_STEPS,
             "nullcontext()"),
    Mutation("comm/transfer.py", "ReduceScatter._start_two_steps", "first.wait_here()", TWO_STEPS),
    Mutation("comm/transfer.py", "AllGather._start_two_steps", "fabric.between_steps.is_current()", BOTH_AXES,
             "nullcontext()"),
    Mutation("comm/transfer.py", "AllGather._start_two_steps", "across.wait_here()", BOTH_AXES),
    Mutation("comm/mesh.py", "Mesh.renew", "self.platform.synchronize()", "what was broken off still writes"),
    Mutation("comm/work.py", "Work.wait", "self.wait_data()", "ranks exchange"),
    Mutation("comm/work.py", "Work._go_on", "self._wait_for(self._works)", "ranks exchange"),
    Mutation("comm/work.py", "wait_for", "work.wait()", Case("2"), ranks=2),
    Mutation("comm/work.py", "wait_for", "_wait_under_watchdog(work, record, failures, meanwhile)", "ranks exchange"),
    Mutation("comm/work.py", "_ended", "work.wait(_SLICE / parts)", "ranks exchange"),
    Mutation("ddp/reducer.py", "Reducer._join", ".wait()", Case("3", 1, "fp32", model="gradients twice"), ""),
    Mutation("ddp/reducer.py", "Reducer._reduce_late", "work.wait()", TWICE_APART, ranks=4),
    Mutation("ddp/reducer.py", "Reducer._complete_flights", "flight.work.wait()", Case("2"), ranks=2),
    Mutation("core/replicas.py", "_take_means", "summing.wait()", APART, ranks=4),
    Mutation("core/replicas.py", "_take_means", "gathering.wait()", APART, ranks=4),
    Mutation("core/replicas.py", "_take_means", "loading.wait()", HOST_APART, ranks=4),
    Mutation("core/replicas.py", "_take_means", "saving.wait_on_host()", HOST_APART, ranks=4),
    Mutation("ddp/reducer.py", "Reducer._complete_flights", "self._spill.settle(leave)", HOST),
    Mutation("ddp/gradient_bucket.py", "GradientBucket.gradient_to_step", "end.wait_on_host()",
             Case("0", 1, "bf16", "states on the host")),
    Mutation("offload/copy_queue.py", "CopyQueue.settle", "end.wait_on_host()", HOST),
    Mutation("offload/nvme/file_tier.py", "FileTier.take_buffer", "end.wait_on_host()", DISK),
    Mutation("offload/nvme/file_tier.py", "FileStore.check_in", "after.wait_on_host()", DISK),
    Mutation("offload/nvme/file_tier.py", "FileStore.check_in", "self._release(after)", DISK, "self._release()"),
    Mutation("offload/platform.py", "Fetched.get", "self._done.wait_on_host()", Case("2", 1, "fp16")),
    Mutation("offload/platform.py", "Done.wait", "stream.wait_event(self._event)", COPIED),
    Mutation("offload/platform.py", "Done.hold", "stream.wait_event(self._event)", COPIED),
    Mutation("offload/platform.py", "Done.wait_on_host", "self._event.synchronize()", COPIED),
    Mutation("offload/platform.py", "CopyStream.copy", "self._stream.wait_stream(issuer)", COPIED),
    Mutation("offload/platform.py", "CopyStream.copy", "done.hold(self._stream)", COPIED),
    Mutation("offload/platform.py", "CopyStream.copy", "self._stream.record_event()", COPIED),
    Mutation("offload/platform.py", "Platform.mark", "stream.record_event()", COPIED),
    Mutation("offload/platform.py", "Platform.fetch", "self.mark()", FETCHED, "Done()"),
    Mutation("offload/platform.py", "Platform.come_home",
             "home.wait_stream(torch.cuda.current_stream(self.device))", FETCHED),
    Mutation("offload/platform.py", "Platform.synchronize", "torch.cuda.synchronize(self.device)", FETCHED),
    Mutation("offload/platform.py", "DeviceMoment.__init__",
             "stream.record_event(torch.cuda.Event(enable_timing=True))", TIMED),
    Mutation("offload/platform.py", "DeviceMoment.wait_on_host", "self._event.synchronize()", TIMED),
    Mutation("offload/shard_store.py", "MemoryStore.tensors", "self.pending.wait_on_host()", WEIGHTS),
    Mutation("offload/shard_store.py", "MemoryStore.check_out", "self.pending.wait_on_host()", "a store is written"),
    Mutation("offload/shard_store.py", "MemoryStore.drop", "self.pending.wait_on_host()", UNLOCKED),
    Mutation("sharding/bucket.py", "Bucket.load_shard", "platform.mark()", WEIGHTS, "Done()"),
    Mutation("sharding/bucket.py", "Bucket.load_shard", "store.pending", WEIGHTS, "Done()"),
    Mutation("sharding/bucket.py", "Bucket.load_shard", "after=end", DISK, "after=Done()"),
    Mutation("sharding/bucket.py", "Bucket.begin_weights", "store.pending.wait()",
             Case("3", 1, "fp32", "weights on the host", model="the first block at times"), ranks=1),
    Mutation("sharding/bucket.py", "FlatBuffer.let_go", "self.platform.come_home(self._home)",
             Case("0", 3, "fp32", stream=USER)),
    Mutation("runtime/activation_offload.py", "_OffloadedCall.give_up_sources", "stretch.done.wait()", AGAIN),
    Mutation("runtime/activation_offload.py", "_Stretch.__del__", "self.done.wait()", "a graph is dropped"),
    Mutation("runtime/activation_offload.py", "_unpack", "stretch.done.wait()", AGAIN),
    Mutation("runtime/deferred_gather.py", "DeferredGather._await", ".wait()", LATER, "", ranks=2),
    Mutation("runtime/deferred_gather.py", "DeferredGather.await_group", "self._await(self._groups[number])",
             Case("1", 1, "bf16", "device", "weights later"), ranks=2),
    Mutation("runtime/deferred_gather.py", "DeferredGather.await_all", "self._await(self._members)", LATER, ranks=2),
    Mutation("runtime/hooks.py", "attach_deferred_gather", "deferred_gather.await_group(number)",
             Case("1", 1, "bf16", "device", "weights later"), ranks=2),
    Mutation("runtime/unit.py", "Unit.unshard", "collectives.mesh.platform.loads.is_current()", WEIGHTS,
             "nullcontext()", ranks=2),
    Mutation("comm/mesh.py", "Mesh.renew", "platform_of=lambda device: platform",
             Case("3", 1, "bf16", "weights on the host", around=("reset",)), "wire=self.wire", ranks=2),
    Mutation("runtime/unit.py", "Unit.wait_for_unshard", "loaded.wait()", WEIGHTS),
    Mutation("runtime/unit.py", "Unit.wait_for_unshard", "whole.wait()", WEIGHTS, ranks=2),
    Mutation("runtime/unit.py", "Unit.summon", ".wait()", Case("3", 1, "bf16", around=("whole weights",)), "", ranks=2),
    Mutation("optim/in_backward.py", "StepsInBackward._step", "after.exception()", EARLY),
    Mutation("optim/optimizer.py", "ShardedOptimizer.step_buckets", "self.await_reader()", EARLY),
    Mutation("optim/optimizer.py", "ShardedOptimizer.await_reader", "self._reading.exception()", EARLY),
    Mutation("optim/matrices.py", "Exchange._answer", "batch.work.wait()", "matrices go to their owners"),
    Mutation("optim/matrices.py", "Exchange._take", "batch.work.wait()", "matrices go to their owners"),
    Mutation("optim/sums.py", "Sums._collect", ".wait()", "sums go to their owners", ""),
    Mutation("optim/sums.py", "Sums.add", ".wait()", "sums go to their owners", ""),
    Mutation("optim/update.py", "rewrite_bucket", ".wait()", Case("3", 1, "fp32", "weights on the host"), ""),
    Mutation("optim/update.py", "send", "end.wait()", HOST),
    Mutation("optim/update.py", "send", "ends[-1] if ends else NOW", WEIGHTS, "Done()"),
    Mutation("checkpoint/background.py", "Background.copy", "mesh.platform.mark()",
             Case("2", 1, "bf16", around=("saved behind", "written")), "Done()"),
    Mutation("checkpoint/background.py", "_copy", "end.wait_on_host()", EARLY),
    Mutation("checkpoint/tensor_file.py", "_await", "end.wait_on_host()", SAVED),
    Mutation("checkpoint/tensor_file.py", "Stream.put", "self._copies.append((end, data))", WRITTEN,
             "self._copies.append((end, place))"),
    Mutation("checkpoint/tensor_file.py", "Stream._conclude", "_await(copies)", WRITTEN),
    Mutation("checkpoint/tensor_file.py", "Stream.__init__", "_BLOCKS + self._ahead", WRITTEN, "_BLOCKS"),
    Mutation("checkpoint/tensor_file.py", "Stream._finish", "self._under_way.pop(0).result()", WRITTEN,
             "self._under_way.pop(0)"),
    Mutation("checkpoint/tensor_file.py", "Stream.__exit__", "_await(copies)", "a save fails"),
    Mutation("core/parts.py", "Core.publish", "work.wait()", Case("2"), ranks=2),
    Mutation("core/parts.py", "Core.await_weights", "self.deferred_gather.await_all()", LATER, ranks=2),
    Mutation("core/parts.py", "Core.adopting_masters", "work.wait()", Case("2", 1, "bf16", around=("loaded",)),
             ranks=2),
    Mutation("core/full_access.py", "full_params", "core.await_weights()", LATER, ranks=2),
    Mutation("core/gathering.py", "gathered", ".wait()", LATER, "", ranks=2),
    Mutation("core/offload_states.py", "offload", "core.await_weights()", FREED, ranks=2),
    Mutation("core/export.py", "_whole_values", "core.await_weights()", LATER, ranks=2),
    Mutation("core/closing.py", "_leave_weights", "unit.wait_for_unshard()", WEIGHTS),
    Mutation("runtime/placing.py", "_gathered", ".wait()", "weights are taken over", ""),
    Mutation("runtime/placing.py", "_BufferFilling.from_source", ".wait()", "slices of values are gathered", ""),
]  # fmt: skip


def broken(mutation: Mutation, folder: str) -> dict[str, Any]:
    """On one rank: the case, or scenario, with the mutation."""
    with mutated(mutation.file, mutation.function, mutation.old, mutation.new):
        if isinstance(mutation.case, Case):
            return run_one(mutation.case, STEPS, folder)
        SCENARIOS[mutation.case].run()
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


def tensors_of_a_file() -> list[tuple[str, torch.Tensor]]:
    """More than the blocks of a writer hold, where chunks are small."""
    values = torch.randn(60_000)
    return [("long", values), ("turned", values[:9000].view(90, 100).t()), ("low", values[:9001].bfloat16())]


@contextmanager
def a_folder_of_files() -> Iterator[Path]:
    """For files with small chunks."""
    back = small_chunks()
    try:
        with TemporaryDirectory() as folder:
            yield Path(folder)
    finally:
        back()


def a_file_is_written() -> None:
    """From a device: copies are ahead of checksums, and those are ahead of the disk."""
    with a_folder_of_files() as folder:
        torch.manual_seed(1)
        tensors = tensors_of_a_file()
        expected = tensor_file.write(folder / "at once", tensors)
        with adversary(Mesh(0, 1, torch.device("cpu"))) as foe:
            assert tensor_file.write(folder / "late", tensors, foe.mesh.platform) == expected
        assert (folder / "late").read_bytes() == (folder / "at once").read_bytes()


def a_save_fails() -> None:
    """The disk is full while copies are under way; training goes on and writes what is copied."""

    def write(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with a_folder_of_files() as folder, adversary(Mesh(0, 1, torch.device("cpu"))) as foe:
        tensors = tensors_of_a_file()
        with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="No space"):
            patch.setattr(direct_io, "write", write)
            tensor_file.write(folder / "file", tensors, foe.mesh.platform)
        tensors[0][1].mul_(2.0)


def ranks_exchange() -> None:
    """What they decide by."""
    with adversary(cases.mesh_of_this_process()) as foe:
        link = Collectives(foe.mesh, BufferPool(foe.mesh.platform))
        assert link.exchange(torch.full((2,), 7 + foe.mesh.rank, dtype=torch.uint8)).tolist() == [[7, 7], [8, 8]]


def weights_are_taken_over() -> None:
    """By another engine, from the shards that the first has left."""
    with adversary(cases.mesh_of_this_process()) as foe:
        model = cases.make_mlp()
        with foe.unseen():
            expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        for _ in range(2):
            engine = shardengine.initialize(model, cases.config_of("3"), mesh=foe.mesh)
            engine.close(restore=False)
        engine = shardengine.initialize(model, cases.config_of("3"), mesh=foe.mesh)
        with engine.full_params(), foe.unseen():
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter, expected[name]), name
        engine.close()


def slices_of_values_are_gathered() -> None:
    """Of a model without memory, where master weights rest replicated, and are made of them."""
    with adversary(cases.mesh_of_this_process()) as foe:
        with foe.unseen():
            expected = {name: parameter.detach().clone() for name, parameter in cases.make_mlp().named_parameters()}
            with shardengine.meta_init():
                model = cases.make_mlp()
        config = cases.config_of("0", bf16={"enabled": True}, zero={"reduce_bucket_size": 300})  # "scale" has values
        engine = shardengine.initialize(model, config, optimizer=cases.make_optimizer(model, "SGD"), mesh=foe.mesh)
        with engine.full_params(), foe.unseen():
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter, expected[name].bfloat16()), name
        with engine.full_optimizer_state() as states, foe.unseen():
            assert all(torch.equal(entry["weight"], expected[name]) for name, entry in states.items() if entry)
        engine.close()
        foe.check()


def matrices_go_to_their_owners() -> None:
    """And come back to those who step them."""
    train_late(lambda: muon_cases.truth("both", 2, 1, "full", 2), muon_cases.make_both)


def sums_go_to_their_owners() -> None:
    """Over rows and columns; and from there to all."""
    train_late(
        lambda: adafactor_cases.truth("torch", 2, 1, "full", 2),
        lambda model: adafactor_cases.make("torch", list(model.parameters())),
    )


def train_late(truth: Callable[[], oracle.Trace], make: Callable[[Any], Any]) -> None:
    """Two steps at stage 2 have the weights of the oracle."""
    with adversary(cases.mesh_of_this_process()) as foe:
        with foe.unseen():
            expected = truth().parameters
        model = cases.make_mlp()
        engine = shardengine.initialize(model, cases.config_of("2"), optimizer=make(model), mesh=foe.mesh)
        for step in range(2):
            cases.run_micro_batch(engine, cases.loss_of, step, 0)
        with engine.full_params(), foe.unseen():
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter, expected[name]), name
        engine.close()
        foe.check()


def a_reduction_in_two_steps() -> None:
    """Between the nodes behind the sums of the nodes; the computation waits for the second step alone, and late."""
    assert reduce_one() == (set(), {"communicator 1", "communicator 2"})


def a_gather_along_both_axes() -> None:
    """Inside of the shard groups behind what comes from the other groups; the computation waits for the end alone."""
    assert gather_one() == (set(), {"communicator 1", "communicator 2"})


def what_was_broken_off_still_writes() -> None:
    """Rank 1 does not come to a gather, both renew their groups, and fill the memory anew."""
    mesh, device = played_mesh(HANG_S)
    out = torch.zeros(8)
    if mesh.rank == 0:
        mesh.wire.all_gather(out, out[:4].clone(), mesh.gather)
    later = mesh.renew()
    out.fill_(1.0)
    device.come_to_its_end()
    assert out.tolist() == [1.0] * 8
    later.kind.end(later._groups())


@dataclass(frozen=True)
class Scenario:
    """Less than a training run, with an assertion. ranks: 1: in this process."""

    run: Callable[[], None]
    ranks: int = 1


def told(test: Callable[[pytest.MonkeyPatch], None]) -> Scenario:
    """A test of what CUDA is told."""

    def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            test(patch)

    return Scenario(run)


SCENARIOS = {
    "a store is written": Scenario(a_store_is_written),
    "a graph is dropped": Scenario(a_graph_is_dropped),
    WRITTEN: Scenario(a_file_is_written),
    "a save fails": Scenario(a_save_fails),
    "ranks exchange": Scenario(ranks_exchange, 2),
    "weights are taken over": Scenario(weights_are_taken_over, 2),
    "slices of values are gathered": Scenario(slices_of_values_are_gathered, 2),
    "matrices go to their owners": Scenario(matrices_go_to_their_owners, 2),
    "sums go to their owners": Scenario(sums_go_to_their_owners, 2),
    TWO_STEPS: Scenario(a_reduction_in_two_steps, 4),
    BOTH_AXES: Scenario(a_gather_along_both_axes, 4),
    "what was broken off still writes": Scenario(what_was_broken_off_still_writes, 2),
    COPIED: told(test_platform.test_on_cuda_streams_wait_for_events_and_the_host_for_nothing),
    FETCHED: told(test_platform.test_on_cuda_the_host_waits_for_what_it_fetches_and_memory_comes_home),
    TIMED: told(test_platform.test_on_cuda_a_moment_is_when_the_current_stream_comes_to_it),
}


@pytest.mark.parametrize("mutation", CAUGHT, ids=lambda each: f"{each.function}: {each.old}")
def test_without_it_there_is_a_race_or_another_result(pools: Pools, tmp_path: Path, mutation: Mutation) -> None:
    scenario = None if isinstance(mutation.case, Case) else SCENARIOS[mutation.case]
    if scenario is not None and scenario.ranks == 1:
        with pytest.raises(AssertionError):
            broken(mutation, str(tmp_path))
        return
    ranks = pools(mutation.ranks if scenario is None else scenario.ranks)
    try:
        found = ranks.run(broken, mutation, str(tmp_path))
    except RankFailure as failure:
        seen = "\n".join(failure.errors.values())
        hidden = "while its stepped weights are on their way" in seen  # a parameter without values refuses itself
        assert hidden or "Race" in seen or "AssertionError" in seen, seen
        return
    assert isinstance(mutation.case, Case), "the scenario found nothing"
    for result in found:
        del result["issued"], result["counts"]
    with pytest.raises(AssertionError):
        assert_equal_to_truth(found, mutation.case.truth(mutation.ranks, STEPS))


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_scenarios_find_nothing_in_the_engine_as_it_is(pools: Pools, name: str) -> None:
    scenario = SCENARIOS[name]
    scenario.run() if scenario.ranks == 1 else pools(scenario.ranks).run(scenario.run)


FIFO = "on NCCL the norm's exchange comes behind all gathers in one communicator; on gloo it is needed"
THREAD = "a thread's end, for its error, or because a tier serves one thread; no stream"
PASSES_ON = "passes on to a wait that is in the table"
DISK_ITSELF = "the disk's own, between it and the host"
COPIER = "copies of saves are made in order by one thread, so that the last one's end is everyone's; for its error"
TRACE = "a moment for the trace"
STORE = "ranks meet over the store; no stream"
PROCESS = "for the end of processes"
NO_WAIT = "a model keeps its engine; no stream"
ERROR = "for the error of what has ended"
FAILED = "after a failure: nothing is used again that was under way"
NOT_AN_ORDER: dict[tuple[str, str, str], str] = {
    ("comm/group_speed.py", "_measure", "begin(full).wait()"): "a measurement: what is timed is never read",
    ("comm/group_speed.py", "_measure", "mesh.platform.synchronize()"): "a measurement: the clock waits for the device",
    (
        "ddp/comm_hooks/whole_gradients.py",
        "FutureWork.wait",
        "self._is_there.wait(None if timeout is None else timeout.total_seconds())",
    ): "the host's wait for what the user's function has begun; the value's own wait is in its result",
    ("ddp/comm_hooks/whole_gradients.py", "WholeGradients._result", "future.wait()"): "the value of the user's future",
    ("ddp/reducer.py", "Reducer._reduce_by", "hook.result(future, full)"): "no wait: the value, which exists by then",
    ("core/replicas.py", "average", "optimizer.await_reader()"): PASSES_ON,
    ("core/rebuild.py", "recut", "optimizer.await_reader()"): "a thread that saves; tests/parity/test_recut.py",
    ("planner/dry_engine.py", "_Imagined.mark", "super().mark()"): "a run without values: nothing is read",
    ("planner/dry_engine.py", "_Imagined.fetch", "self.mark()"): "a run without values: nothing is read",
    ("trace.py", "Trace.begin", "zero.wait_on_host()"): TRACE,
    ("trace.py", "Trace._settle", "end.wait_on_host()"): TRACE,
    ("comm/breaking_off.py", "come_together", "store.wait([f'{ASKS}/go'], timedelta(seconds=TOGETHER_S))"): STORE,
    ("comm/work.py", "CollectiveLedger.issue", "self._held_up(record, works)"):
        "earlier than needed, where nothing may overlap; waited for once more where it is used",
    ("comm/work.py", "CollectiveLedger._wait", "self._held_up(record, works, meanwhile)"): PASSES_ON,
    ("comm/work.py", "CollectiveLedger._trace_end", "self._ends.is_current()"): TRACE,
    ("comm/work.py", "CollectiveLedger._trace_end", "work.wait()"): TRACE,
    ("comm/transfer.py", "Fabric.in_two_steps", "first.wait_data()"):
        "for the time that it took, where nothing may overlap; waited for when it was issued",
    ("comm/launcher.py", "_run_rank",
     "await_all(dist.PrefixStore('shardengine/returned', store), rank, ranks, _END_S)"): STORE,
    ("comm/launcher.py", "_end_with_parent", "wait([parent.sentinel])"): PROCESS,
    ("comm/launcher.py", "_collect",
     "wait(list(pending), None if deadline == math.inf else max(0.0, deadline - time.monotonic()))"): PROCESS,
    ("comm/mesh.py", "_texts", "store.wait(['all have read'])"): STORE,
    ("comm/mesh.py", "await_all", "store.wait([f'all {what}'], timedelta(seconds=timeout_s))"): STORE,
    ("comm/mesh.py", "await_the_others", "await_all(mesh.store(), mesh.rank, mesh.ranks, mesh.timeout_s)"): STORE,
    ("comm/store_board.py", "StoreBoard._ask", "answer.result(OPERATION_S)"): STORE,
    ("comm/nccl_watcher.py", "Watcher._run", "self._over.wait(POLL_S)"): "a pause",
    ("comm/work.py", "_wait_under_watchdog", "work.wait()"): ERROR,
    ("ddp/early_use.py", "EarlyUse.wait", "self._consumer.wait_early()"): PASSES_ON,
    ("ddp/reducer.py", "Reducer.discard", "self.early_use.wait()"): THREAD,
    ("ddp/gradient_bucket.py", "GradientBucket._give_fetched", "end.wait_on_host()"): FAILED,
    ("offload/copy_queue.py", "CopyQueue.drop", "end.wait_on_host()"): FAILED,
    ("runtime/unit.py", "Unit._abort_unshard", "loaded.wait()"): FAILED,
    ("optim/in_backward.py", "StepsInBackward.deliver", "early.done.result()"): THREAD,
    ("optim/in_backward.py", "StepsInBackward.deliver", "self.wait()"): THREAD,
    ("optim/in_backward.py", "StepsInBackward.deliver", "each.done.exception()"): THREAD,
    ("optim/in_backward.py", "StepsInBackward.wait", "early.done.exception()"): THREAD,
    ("optim/in_backward.py", "StepsInBackward.forget", "self.wait()"): THREAD,
    ("optim/optimizer.py", "ShardedOptimizer.wait_early", "self.stepped_early.wait()"): THREAD,
    ("optim/optimizer.py", "ShardedOptimizer.step_buckets", "self.stepped_early.wait()"): THREAD,
    ("optim/optimizer.py", "ShardedOptimizer.await_reader", "self.stepped_early.wait()"): THREAD,
    ("core/closing.py", "_leave_weights", "core.await_weights()"): FIFO,
    ("core/closing.py", "_leave_shards", "core.await_weights()"): FIFO,
    ("engine/engine.py", "Engine.step", "core.await_weights()"): FIFO,
    ("core/full_access.py", "full_optimizer_state", "core.await_weights()"): FIFO,
    ("core/exchanging.py", "exchange", "core.await_weights()"): FIFO,
    ("core/optimizer_dict.py", "load", "core.await_weights()"): FIFO,
    ("core/optimizer_dict.py", "state_dict", "core.await_weights()"): FIFO,
    ("core/optimizer_dict.py", "load", "optimizer.await_reader()"): PASSES_ON,
    ("core/optimizer_dict.py", "state_dict", "optimizer.await_reader()"): PASSES_ON,
    ("optim/optimizer.py", "ShardedOptimizer._rewrite", "self.await_reader()"): PASSES_ON,
    ("engine/monitor_services.py", "MlflowMonitor._wait", "self._sent.wait()"): "for a server's answer, and its error",
    ("engine/monitor_services.py", "MlflowMonitor.close", "self._wait()"): PASSES_ON,
    ("engine/monitor_services.py", "MlflowMonitor.write", "self._wait()"): PASSES_ON,
    ("core/rebuild.py", "_carry_out", "core.await_weights()"): FIFO,
    ("core/recovery.py", "reset", "core.await_weights()"): FIFO,
    ("checkpoint/loading.py", "_come_to_rest", "core.await_weights()"): FIFO,
    ("compat/deepspeed/facade.py", "DeepSpeedEngine.__init__", "holding.hold(self._engine)"): NO_WAIT,
    ("integrations/accelerate.py", "ShardAccelerator._shard", "holding.hold(engine)"): NO_WAIT,
    ("core/closing.py", "_first_error", "sys.exception()"): ERROR,
    ("core/recovery.py", "reset", "optimizer.wait_early()"): THREAD,
    ("core/closing.py", "dissolve", "core.reducer.early_use.wait()"): PASSES_ON,
    ("core/full_access.py", "full_optimizer_state", "optimizer.await_reader()"): PASSES_ON,
    ("core/offload_states.py", "offload", "optimizer.await_reader()"): "so that the memory is free when it returns",
    ("core/assembly.py", "_attach", "core.attachments.mark(model)"): "a mark on the model",
    (
        "compat/deepspeed/facade.py",
        "DeepSpeedEngine.__init__",
        "gathering.mark(self._engine, sharded=foreign.shards(tree, 'weights'))",
    ): "names on parameters",
    ("checkpoint/background.py", "Background.await_copy", "self._copying.exception()"): COPIER,
    ("checkpoint/background.py", "Background.copy", "self.await_copy()"): COPIER,
    ("checkpoint/background.py", "Background.copy", "self._running[-2][1].exception()"): COPIER,
    ("checkpoint/background.py", "Background.failures", "future.exception()"): COPIER,
    ("checkpoint/saving.py", "finish", "engine._saves.await_copy()"): COPIER,
    ("checkpoint/loading.py", "_come_to_rest", "engine.optimizer.await_reader()"): PASSES_ON,
    ("checkpoint/reader.py", "BlockReader._whole", "future.result()"): DISK_ITSELF,
    ("checkpoint/reader.py", "BlockReader.verified", "wait([future for _, _, future in under_way])"): DISK_ITSELF,
    ("interchange/dcp_files.py", "DcpStore._load",
     "self.read_data(planner.finish_plan(self.prepare_global_plan(plans)[0]), planner).wait()"): DISK_ITSELF,
    ("loading/safetensors_files.py", "SafetensorsFiles._end", "block.result()"): DISK_ITSELF,
    ("loading/safetensors_files.py", "SafetensorsFiles._open",
     "wait((block for each in self._under_way for block in each.blocks))"): DISK_ITSELF,
    ("loading/safetensors_files.py", "SafetensorsFiles.finish",
     "wait((block for each in begun for block in each.blocks))"): DISK_ITSELF,
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
    ("runtime/hooks.py", "attach_deferred_gather", "wait(blocks.get(module, 0))"): "makes a hook",
    ("runtime/hooks.py", "attach_deferred_gather", "deferred_gather.await_group(0)"):
        "for a block that is called by itself and shares a weight with the root; no run here does",
    ("runtime/unit.py", "Unit.forget_gathered", "self.wait_for_unshard()"): PASSES_ON,
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
    found = {(str(p.relative_to(root)), *call) for p in root.rglob("*.py") for call in calls(p, ORDERING)}
    assert len(found) > 90
    missing = sorted(each for each in found if not known(each, found))
    assert not missing, "waits that nobody has taken out yet:\n" + "\n".join(map(str, missing))
    assert not NOT_AN_ORDER.keys() - found, "there is no such call any more"
