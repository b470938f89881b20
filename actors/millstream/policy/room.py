"""Whether there is room for new tasks: INBOX refuses first, so that the outcomes of what was taken in always fit."""

FULL = 0.6
"""The share of the store, INBOX left out, from which on no new tasks are taken in."""

ROOM_AGAIN = 0.57
"""A little less, so that the intake does not open and close with every task."""


def may_take_in(used_bytes: int, inbox_bytes: int, store_bytes: int, taking: bool) -> bool:
    """True while submits may be admitted; `taking` says whether they are now. A store of unknown size (0) has room."""
    if store_bytes <= 0:
        return True
    others = max(0, used_bytes - inbox_bytes)
    return others < (FULL if taking else ROOM_AGAIN) * store_bytes
