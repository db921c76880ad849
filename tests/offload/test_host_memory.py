"""Memory between disk and tensors: aligned, zero, and there on systems without huge pages; a fork leaves it behind."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import mmap
import os
import signal
from typing import Any

import pytest
import torch

from shardengine.offload import Platform, host_memory
from shardengine.offload.host_memory import HUGE_PAGE


@pytest.mark.parametrize("count", [0, 1, 4096, (2 << 20) + 1])
def test_it_begins_at_a_page_and_is_zero(count: int) -> None:
    memory = host_memory.staging(count)
    assert memory.shape == (count,) and memory.dtype is torch.uint8
    assert count == 0 or memory.data_ptr() % mmap.PAGESIZE == 0
    assert not memory.any()
    memory.fill_(3)
    assert bool((memory == 3).all())


def test_a_kernel_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old(mmap.mmap):
        def madvise(self, *_: Any) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Old)
    assert host_memory.staging(5000).fill_(1).sum() == 5000


def test_a_system_without_such_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        monkeypatch.delattr(mmap, name, raising=False)
    assert host_memory.staging(5000).fill_(1).sum() == 5000


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTFORK"), reason="Linux")
def test_a_child_does_not_share_it() -> None:
    memory = host_memory.staging(4096)
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        memory[0].item()  # no such address in here
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV
    assert memory[0].item() == 0


def test_memory_for_a_gpu_is_page_locked_until_it_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA must be told before the system has the memory back."""
    locked: dict[int, int] = {}

    class Runtime:
        refuses = last_error = 0

        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            locked.update({} if self.refuses else {address: size})
            self.last_error = self.refuses
            return self.refuses

        def launch(self, *_: Any, device: str) -> None:
            """A kernel of torch, after which it looks for errors: there is one at most once."""
            error, self.last_error = self.last_error, 0
            if error:
                raise RuntimeError(f"CUDA error {error}")

        def cudaHostUnregister(self, address: int) -> None:
            assert address in locked
            ctypes.string_at(address, 1)  # it is there still
            del locked[address]

    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch, "ones", runtime.launch)
    platform = Platform(torch.device("cuda", 0))
    memory = platform.host_buffer(5000, pinned=True)
    part, address = memory[10:20], memory.data_ptr()
    del memory
    assert locked == {address: HUGE_PAGE}, "a view keeps it"
    del part
    gc.collect()
    assert not locked
    runtime.refuses = 2
    assert platform.host_buffer(5000, pinned=True).sum() == 0 and not locked, "without it copies are slower, and right"
    assert not runtime.last_error, "what the user launches next does not fail for it"
