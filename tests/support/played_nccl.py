"""Groups of NCCL that are played over gloo, with what makes a fault hard there: a collective whose peer never comes
holds the device, whoever waits for the device hears nothing, and ending one group waits for the other one's kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardengine.comm import mesh as mesh_module
from shardengine.comm.breaking_off import ASKS
from shardengine.comm.group_kind import GroupKind, GroupName, NcclGroupKind
from shardengine.comm.mesh import Mesh
from shardengine.comm.wire import Wire
from shardengine.offload import Platform
from tests.support import HANG_S
from tests.support.late_streams import poison

DATA = (GroupName.GATHER, GroupName.REDUCE)
_kept: list[Any] = []
"""What gloo still writes into, and its groups: who lets go of one waits for what is in flight on it."""


class PlayedDevice:
    """One GPU: what it was given, and who waits for it. events: what happened to its groups, in order."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.in_flight: set[PlayedWork] = set()
        self.events: list[str] = []
        self.came: list[int] = []
        """How many ranks were there when this one began to abort."""
        self.left_behind: list[Callable[[], None]] = []
        """What kernels that were told to end may still write."""

    def synchronize(self) -> None:
        """As ``cudaDeviceSynchronize``: it ends when everything has ended, and nothing else ends it."""
        with self.changed:
            if not self.changed.wait_for(lambda: not self.in_flight, HANG_S):
                raise AssertionError("the device never came to its end")

    def come_to_its_end(self) -> None:
        """What was broken off has written all that it ever will."""
        with self.changed:
            left, self.left_behind = self.left_behind, []
        for write in left:
            write()


class PlayedWork:
    """A collective on a device. ``wait`` is what a stream does, and here the host, which waits for that stream."""

    def __init__(self, group: PlayedGroup, real: Any, show: Callable[[], None], spoil: Callable[[], None]) -> None:
        self._group, self._real, self._show, self.spoil = group, real, show, spoil
        self._was_shown = False
        device = group.device
        with device.changed:
            device.in_flight.add(self)
            group.works.append(self)
        real.get_future().add_done_callback(self._ended)

    def _ended(self, future: Any) -> None:
        try:
            future.value()
        except RuntimeError:
            return  # gloo notices that a peer is gone, NCCL does not
        self.leave()

    def leave(self) -> None:
        """It is over, or was broken off."""
        device = self._group.device
        with device.changed:
            device.in_flight.discard(self)
            device.changed.notify_all()

    def is_completed(self) -> bool:
        return self not in self._group.device.in_flight

    def get_future(self) -> Any:
        return self._real.get_future()

    def wait(self, _timeout: Any = None) -> bool:
        device = self._group.device
        with device.changed:
            if not device.changed.wait_for(self.is_completed, HANG_S):
                raise AssertionError("nobody broke off a collective that could not end")
        if not self._group.aborted and not self._was_shown:
            self._was_shown = True
            self._show()
            device.come_to_its_end()  # as late as that
        return True


class PlayedGroup:
    """A group of NCCL over ``real``, a group of gloo."""

    def __init__(self, name: str, real: Any, device: PlayedDevice, store: Callable[[], Any]) -> None:
        self.name, self.real, self.device, self._store = name, real, device, store
        self.works: list[PlayedWork] = []
        self.aborted = False

    def abort(self) -> None:
        """Its kernels are told to end, then this waits for the whole device."""
        self.device.came.append(int(self._store().add(f"{ASKS}/here", 0)))
        self.device.events.append(f"abort {self.name}")
        self.aborted = True
        for work in self.works:
            if not work.is_completed():
                self.device.left_behind.append(work.spoil)
            work.leave()
        self.device.synchronize()

    def shut_down(self) -> None:
        """As ``destroy_process_group``: waits for its kernels, unless it was aborted."""
        self.device.events.append(f"end {self.name}")
        if not self.aborted:
            with self.device.changed:
                if not self.device.changed.wait_for(lambda: all(work.is_completed() for work in self.works), HANG_S):
                    raise AssertionError("ending a group waited for a collective that could not end")
        _kept.append(self.real)
        dist.destroy_process_group(self.real)


class PlayedKind(NcclGroupKind):
    """Makes and ends played groups; how they are broken off is the product's."""

    def __init__(self, device: PlayedDevice) -> None:
        self.device = device

    def make(self, timeout_s: float, device: torch.device, ranks: Sequence[int] = ()) -> dict[str, Any]:
        groups = GroupKind().make(timeout_s, device)
        del groups[GroupName.EVALUATE.value]
        control = groups[GroupName.CONTROL.value]
        store = Mesh(dist.get_rank(), dist.get_world_size(), device, control=control).store
        for name in DATA:
            groups[name.value] = PlayedGroup(name.value, groups[name.value], self.device, store)
        return groups

    def end(self, groups: Mapping[Any, Any]) -> None:
        for name, group in groups.items():
            if name in DATA:
                group.shut_down()
            else:
                dist.destroy_process_group(group)


class PlayedWire(Wire):
    """Collectives that bring their result when somebody waits for them, and never after they were broken off."""

    def broadcast(self, tensor: Tensor, source: int, group: Any) -> Any:
        if not isinstance(group, PlayedGroup):
            return super().broadcast(tensor, source, group)
        return self._play(super().broadcast, tensor, tensor, source, group)

    def all_gather(self, out: Tensor, own: Tensor, group: Any) -> Any:
        if not isinstance(group, PlayedGroup):
            return super().all_gather(out, own, group)
        return self._play(super().all_gather, out, own, group)

    def reduce_scatter(self, out: Tensor, full: Tensor, group: Any) -> Any:
        return self._play(super().reduce_scatter, out, full, group)

    def all_to_all(self, out: Tensor, full: Tensor, group: Any) -> Any:
        return self._play(super().all_to_all, out, full, group)

    def _play(self, begin: Callable[..., Any], out: Tensor, sent: Tensor, *rest: Any) -> Any:
        """Begin the real one with copies. rest: ends with the group; begins with the source of a broadcast."""
        *options, group = rest
        if group.aborted:
            raise RuntimeError("NCCL communicator was aborted")
        with torch.no_grad():
            received = out.detach().clone()
            given = received if options else sent.detach().clone()
            real = begin(given, *options, group.real) if options else begin(received, given, group.real)
        _kept.append((received, given, real))

        def show() -> None:
            with torch.no_grad():
                out.copy_(received)

        def spoil() -> None:
            if out.untyped_storage().nbytes() and sent.untyped_storage().nbytes():
                own = sent.detach().clone()  # which may lie in what is received, and is not written there
                poison(out)
                with torch.no_grad():
                    sent.copy_(own)

        return PlayedWork(group, real, show, spoil)


class PlayedPlatform(Platform):
    """The CPU, which waits for a played device."""

    played: PlayedDevice

    def synchronize(self) -> None:
        self.played.synchronize()
        self.played.come_to_its_end()


def played_mesh(timeout_s: float) -> tuple[Mesh, PlayedDevice]:
    """A mesh of the ranks of this process group that an engine owns, and the device that it uses."""
    device = PlayedDevice()
    base = mesh_module.build(torch.device("cpu"), timeout_s, owned=True)
    kind = PlayedKind(device)
    GroupKind().end(base._groups())

    def platform_of(place: torch.device) -> Platform:
        platform = PlayedPlatform(place)
        platform.played = device
        return platform

    mesh = replace(
        base, backend="nccl", kind=kind, wire=PlayedWire(), platform_of=platform_of, evaluate=None,
        **kind.make(timeout_s, torch.device("cpu")),
    )  # fmt: skip
    return mesh, device
