"""What has closed a limit, in words: as the provider put it, or who forced it."""

import msgspec

from millstream.policy.durations import duration
from millstream.policy.texts import clean
from millstream_schemas.permits import OutcomeClass

WHO_BYTES = 128
_REFUSED = {"ramp": "use grew too fast for the provider", "overloaded": "too much for an overloaded provider"}


class Causes(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Why a key is closed, for each thing that can close it; empty where nothing of that kind has."""

    pause: str = ""
    quota: str = ""
    forced: str = ""


def refused(outcome: OutcomeClass, retry_after_s: float | None, in_a_row: int) -> str:
    """The cause of a pause after a refusal, which is the `in_a_row`-th without a hint where there is none."""
    said = _REFUSED.get(outcome, "")
    if retry_after_s is not None:
        return (
            f"{said}, which asked for {brief(retry_after_s)}"
            if said
            else f"the provider asked for {brief(retry_after_s)}"
        )
    hintless = (
        "refused without a hint" if in_a_row <= 1 else f"refused without a hint, {ordinal(in_a_row)} time in a row"
    )
    return f"{said}; {hintless}" if said else hintless


def used_up(retry_after_s: float | None, assumed_s: float) -> str:
    """The cause of a closure because an allowance of the provider's is used up."""
    if retry_after_s is None:
        return f"its quota is used up; the provider does not say until when, {brief(assumed_s)} are assumed"
    return f"its quota is used up; the provider asked for {brief(retry_after_s)}"


def forced(by: str) -> str:
    """The cause of a closure by an operator, who may not have said who it is."""
    who = clean(by, WHO_BYTES).strip()
    return f"forced open by operator {who}" if who else "forced open by an operator"


def broken(is_open: bool) -> str:
    """The cause of a closure by a breaker that opened by itself."""
    return "faults of the provider" if is_open else "after faults of the provider, single calls try it"


def spent(usd: float, period: str) -> str:
    """The cause of a closure by a budget of `usd`."""
    when = "for the life of the key" if period == "total" else f"of {period}"
    return f"all of the {usd:.2f} USD {when} are spent"


def brief(seconds: float) -> str:
    """A length of time as short as it can be: `9 s`, `0.25 s`, `2 h 3 min`."""
    return f"{seconds:.3g} s" if seconds < 59.95 else duration(seconds)


def ordinal(number: int) -> str:
    """`1st`, `2nd`, `3rd`, `4th`, `11th`, `21st`."""
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"
