"""The facts of a step that must be the same on every rank, and the message about those that are not.

Must not know: how ranks exchange them, the buckets, the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_METRIC = ". A scheduler that is stepped with a metric (ReduceLROnPlateau) needs the metric's mean over the ranks"

Facts = Mapping[str, Any]
"""options: "lr of optimizer group 0" → its value as text · frozen: names · changes: a digest of the changes to
parameter.grad, 0 for none · divisors: of losses · scale: of the loss, as text. All of it is JSON."""


def facts_of(
    options: Mapping[str, str], frozen: Sequence[str], *, changes: int, divisors: Sequence[float], scale: str
) -> Facts:
    """Return one rank's facts as JSON data."""
    return {
        "options": dict(options),
        "frozen": list(frozen),
        "changes": changes,
        "divisors": list(divisors),
        "scale": scale,
    }


def difference(facts: Sequence[Facts]) -> str:
    """Return one clause for each fact in which some rank differs from rank 0; "" if all are equal. facts: by rank."""
    return "; ".join(_clauses(facts))


def advice(facts: Sequence[Facts]) -> str:
    """Return a remark about schedulers, if a learning rate differs; else ""."""
    return _METRIC if any(name.startswith("lr ") for name, _ in _options(facts)) else ""


def _options(facts: Sequence[Facts]) -> Iterator[tuple[str, int]]:
    """Yield each option that differs from rank 0's, with the first rank on which it does."""
    ours = facts[0]["options"]
    for name in dict.fromkeys(name for each in facts for name in each["options"]):
        for rank, each in enumerate(facts):
            if each["options"].get(name) != ours.get(name):
                yield name, rank
                break


def _clauses(facts: Sequence[Facts]) -> Iterator[str]:
    first = facts[0]
    for name, rank in _options(facts):
        here, there = (each["options"].get(name, "missing") for each in (first, facts[rank]))
        yield f"{name} is {here} on rank 0 and {there} on rank {rank}"
    for rank, each in enumerate(facts):
        for names, on, off in (
            (sorted({*each["frozen"]} - {*first["frozen"]}), rank, 0),
            (sorted({*first["frozen"]} - {*each["frozen"]}), 0, rank),
        ):
            if names:
                more = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
                yield f"{names[0]!r}{more} frozen on rank {on} and not on rank {off}"
        if each["changes"] != first["changes"]:
            one = {each["changes"]: rank, first["changes"]: 0}
            alone = one.pop(0, None)
            yield (
                f"parameter.grad was changed on ranks 0 and {rank}, but not in the same way (also by clip_grad_norm_)"
                if alone is None
                else f"parameter.grad was changed on rank {next(iter(one.values()))} and not on rank {alone} (also by "
                "clip_grad_norm_)"
            )
        if each["divisors"] != first["divisors"]:
            yield (
                f"losses were divided by {first['divisors']} on rank 0 and by {each['divisors']} on rank {rank} "
                "(backward(loss, divide=False) divides by 1)"
            )
        if each["scale"] != first["scale"]:
            yield f"the loss scale is {first['scale']} on rank 0 and {each['scale']} on rank {rank}"
