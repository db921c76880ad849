"""update.py: what was stepped on one device goes to where the weights rest, in parts."""

from __future__ import annotations

from typing import Any

import torch

from shardengine.kernels import Spans
from shardengine.offload import BufferPool, CopyQueue, Platform
from shardengine.optim.update import send, written
from tests.support.parts import CPU


def test_what_was_stepped_is_sent_to_its_place_and_the_rest_stays() -> None:
    way, target = CopyQueue(Platform(CPU), BufferPool(Platform(CPU))), torch.zeros(8)
    low = way.buffer(8, torch.float32, on_host=True)
    low.copy_(torch.arange(8.0))
    parts: Any = [(None, Spans([(1, 3)])), (None, Spans([(5, 7)]))]
    send(written(low, target, parts), low, way, from_host=True)
    way.settle(0)
    assert target.tolist() == [0, 1, 2, 0, 0, 5, 6, 0]
