"""What of a config is told: one message. Owns: what concerns who writes a config for DeepSpeed, and in which order.

Must not know: engines; why a key has no effect.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardengine.config import NO_EFFECT_BECAUSE, READ_AS

_INSIDE = ("zero_optimization.", "activation_checkpointing.", "aio.", "optimizer.")
"""Sections whose keys without effect say how DeepSpeed does something, which is done in another way here."""


def message(own: Iterable[str], notices: Iterable[str]) -> str:
    """One text of ``own`` sentences and the ``notices`` of our config; "" where there is nothing to say.

    Left out: under which name of ours a key is read. Keys without effect are told by what they have in common.
    """
    inside, others, said = list[str](), dict[str, list[str]](), list(own)
    for notice in notices:
        key, mark, reason = notice.partition(NO_EFFECT_BECAUSE)
        if mark and key.startswith(_INSIDE):
            inside.append(key)
        elif mark:
            others.setdefault(reason, []).append(key)
        elif READ_AS not in notice:
            said.append(notice)
    said += [
        f"{', '.join(keys)} {'has' if len(keys) == 1 else 'have'} no effect: {why}" for why, keys in others.items()
    ]
    if inside:
        said.append(f"without effect, because it is done in another way (docs/config.md): {', '.join(inside)}")
    return "".join(f"\n- {sentence}" for sentence in said)
