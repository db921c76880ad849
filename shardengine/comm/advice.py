"""Advice for the user if ranks do not make the same calls; several errors end with it.

Must not know: how that was found.
"""

from __future__ import annotations

BLOCKS = (
    "At stage 3 ranks also run the same blocks in the same order, forward and backward: what differs between ranks "
    "must lie inside of one unit (list the class of the module around it in zero_optimization.units). Frozen "
    "parameters that some batches do not use, such as a tower for images, can stay whole on every rank: "
    '"ignored_parameters": ["vision.*"], with their names'
)
EVALUATE = (
    "At stage 3 a forward gathers weights from every rank: evaluate the same number of batches on every rank, or "
    "inside of `with engine.full_params():` that every rank opens"
)
_GATHERING = "gathering"
_WITHOUT = "gathering without grad"


def gathering(unit: str, *, grad: bool) -> str:
    """Return the name of an exchange between ranks about whether all of them gather ``unit`` next."""
    return f"{_GATHERING if grad else _WITHOUT} of unit {unit!r}"


def asks(text: str, *, grad: bool = True) -> bool:
    """Return whether ``text`` describes such an exchange.

    grad: True: of a forward or backward of training; False: of a forward without grad.
    """
    return (_GATHERING in text and _WITHOUT not in text) if grad else _WITHOUT in text


def after(*texts: str) -> str:
    """Return the end of an error that quotes these texts of ranks: the advice, after a full stop, or ""."""
    if any(asks(text, grad=False) for text in texts):
        return f". {EVALUATE}"
    return f". {BLOCKS}" if any(asks(text) for text in texts) else ""
