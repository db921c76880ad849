"""Where ranks wait, and whether that can end. Must not know: how it is reported, which collectives there are.

[Note: In vain] Collectives of a group are matched only by their order. So a rank that waits for number n of a group
waits for every rank that has issued fewer than n in it. The wait is in vain if such a rank has left, or if such ranks
wait for each other in a cycle: a deadlock. A rank that computes or loads data reports nothing, and nothing follows from
that: it may be slow. A rank in a collective of the program is seen (outside).
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Waiting:
    """The wait of one rank. key: equal on the ranks that wait for the same collective.

    group, place: the collective is that number of that group · shape: equal on all ranks for one collective · channel:
    that of the engine over these groups · issued: collectives by group, and other counted places that the rank has
    reached · where: the call · members: the ranks that the collective is between, [] for all
    """

    text: str
    key: str
    group: str = ""
    place: int = 0
    shape: str = ""
    channel: int = 0
    issued: dict[str, int] = field(default_factory=dict)
    where: str = ""
    members: list[int] = field(default_factory=list)

    def is_between(self, rank: int) -> bool:
        """Return whether ``rank`` takes part in the collective."""
        return not self.members or rank in self.members

    def needs(self, rank: int, issued: Mapping[str, int]) -> bool:
        """Return whether ``rank``, which has ``issued`` so many collectives by group, has still to issue this one."""
        return self.is_between(rank) and self.place > issued.get(self.group, 0)

    def never_meets(self, rank: int, other: Waiting) -> bool:
        """Return whether ``other``, the wait of ``rank``, has the same number and group but is another collective."""
        same = self.is_between(rank) and (self.group, self.place) == (other.group, other.place)
        return bool(self.place) and same and self.shape != other.shape


class Presence(enum.StrEnum):
    """Whether a rank still takes part in what runs over one mesh."""

    PRESENT = "present"
    CLOSING = "closing"
    """In ``engine.close()``, which all ranks call to meet."""
    LEFT = "left"
    """It takes part in nothing over this mesh any more."""
    ENDED = "ended"
    """Its process ends, so it takes part with no other engine either."""

    def may_become(self, later: Presence) -> bool:
        """Return whether ``later`` may follow; nothing follows the last two, and a rank does not come back."""
        return later in _FOLLOWING[self]


_FOLLOWING: Mapping[Presence, frozenset[Presence]] = {
    Presence.PRESENT: frozenset({Presence.CLOSING, Presence.LEFT, Presence.ENDED}),
    Presence.CLOSING: frozenset({Presence.CLOSING, Presence.LEFT, Presence.ENDED}),
    Presence.LEFT: frozenset(),
    Presence.ENDED: frozenset(),
}


@dataclass(frozen=True)
class Departure:
    """The last report of a rank. failed: it had an error · issued: its collectives by group."""

    text: str
    presence: Presence
    failed: bool = False
    issued: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_json(cls, text: str) -> Departure:
        """Return it from ``json.dumps`` of its fields."""
        fields = json.loads(text)
        return cls(**{**fields, "presence": Presence(fields["presence"])})


def deadlock(rank: int, waits: Mapping[int, Waiting]) -> dict[int, Waiting]:
    """Return the shortest deadlock: ranks from ``rank`` on that each wait for the next ([Note: In vain]); {}: none.

    waits: of all ranks that wait. Each waits for nothing else meanwhile, so none of them can continue.
    """
    start = waits[rank]
    paths = [[rank]]
    seen: set[int] = set()
    for path in paths:
        last = waits[path[-1]]
        for other, its in waits.items():
            if its.channel != start.channel or other == path[-1]:
                continue
            if not (last.needs(other, its.issued) or last.never_meets(other, its)):
                continue
            if other == rank:
                return {each: waits[each] for each in path}
            if other not in seen:
                seen.add(other)
                paths.append([*path, other])
    return {}
