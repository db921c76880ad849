"""What to do where ranks do not do the same: what several errors say. Must not know: how that was found."""

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
    """What an exchange is called in which ranks ask each other whether all gather ``unit`` next."""
    return f"{_GATHERING if grad else _WITHOUT} of unit {unit!r}"


def asks(text: str, *, grad: bool = True) -> bool:
    """Whether ``text`` is of such an exchange. grad: in a forward or backward of training, else in one without grad."""
    return (_GATHERING in text and _WITHOUT not in text) if grad else _WITHOUT in text


def after(*texts: str) -> str:
    """What an error ends with that says ``texts`` of ranks: "" or the advice, behind a full stop."""
    if any(asks(text, grad=False) for text in texts):
        return f". {EVALUATE}"
    return f". {BLOCKS}" if any(asks(text) for text in texts) else ""
