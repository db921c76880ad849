"""Control messages in frames of one length, so ranks that send each other different messages find out.

Must not know: groups, how frames travel.

[Note: Frames] Control data travels over gloo, which ends the process if a message meets one of another length. So every
rank's first frame has ``FRAME`` bytes: the length of the message, its kind, a text for errors, and as much of the
message as fits. The rest follows in a second exchange, when all ranks know that they exchange the same kind. The kind
is the first word of the text. It ends before anything that may differ between ranks, such as a path or an argument.
"""

from __future__ import annotations

import re
import zlib

import torch
from torch import Tensor

from shardengine.comm.advice import after
from shardengine.errors import MismatchError

FRAME = 4096
_HEAD = 64
"""A multiple of 8: the data after it is read as numbers."""
_TEXT = _HEAD - 8
ROOM = FRAME - _HEAD
"""Bytes of a message in its first frame: enough for the message of a step with about 490 parameters."""
_WORD = re.compile(r"[\w.]+")


def first_frame(message: Tensor, text: str, *, varies: bool) -> Tensor:
    """Return the first frame of ``message`` (uint8, flat). varies: ranks' messages may be of different lengths."""
    said = -1 - message.numel() if varies else message.numel()
    word = _WORD.match(text)
    kind = zlib.crc32(word[0].encode() if word is not None else b"")
    head = said.to_bytes(4, "little", signed=True) + kind.to_bytes(4, "little") + text.encode()[:_TEXT]
    frame = torch.frombuffer(bytearray(head.ljust(FRAME, b"\0")), dtype=torch.uint8)
    frame[_HEAD : _HEAD + message.numel()] = message[:ROOM]
    return frame


def lengths(frames: Tensor, rank: int) -> Tensor:
    """Return the length of each rank's message, int32 [ranks]. frames: [ranks, FRAME], from ``first_frame``.

    ``MismatchError``, on every rank, if ranks sent each other different messages. rank: this one.
    """
    heads = frames[:, :8].contiguous().view(torch.int32)
    said = heads[:, 0]
    kinds = torch.stack([said.clamp(min=-1), heads[:, 1]], dim=1)
    differ = (kinds != kinds[0]).any(dim=1)
    if bool(differ.any()):
        other = int(differ.nonzero()[0])
        texts = _text(frames[0]), _text(frames[other])
        raise MismatchError(
            f"rank 0 is in {texts[0]} where rank {other} is in {texts[1]}: expected every rank to make the same calls "
            f"of the engine, in the same order (this is rank {rank}){after(*texts)}",
            code="ranks-make-different-calls",
        )
    return torch.where(said < 0, -1 - said, said)


def table(frames: Tensor, rests: Tensor | None, length: int) -> Tensor:
    """Return every rank's message, as long as the longest one: [ranks, length].

    rests: [ranks, n], the second exchange.
    """
    if rests is None:
        return frames[:, _HEAD : _HEAD + length]
    return torch.cat([frames[:, _HEAD:], rests], dim=1)


def _text(frame: Tensor) -> str:
    shown = frame[8:_HEAD].numpy().tobytes().rstrip(b"\0").decode(errors="ignore")
    return f"[{shown}]"
