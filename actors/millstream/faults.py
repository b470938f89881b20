"""Fault points: a decorator around the broker port that ends the process, loses or delays the n-th operation of a kind.

A plan is text, faults separated by `;`, each `operation:when:n:what`:

    publish_all[.queued]:after:1:exit      the first publish_all with a subject that contains `.queued`, then kill -9
    ack:before:2:lose                      the second ack is swallowed
    publish:after:1:lose                   the first publish is stored, and reported Unanswered
    mailbox.take:after:3:delay=0.5         the third take returns half a second later

`when` is `before` or `after`; `n` counts from 1, `*` means every time; `what` is `exit`, `lose` or `delay=SECONDS`.
Pulls and takes count only where they bring something, and match by what they bring. Of a `publish_all` only the
messages that match are lost. What is lost: publishes report Unanswered, deliveries are not returned, other answers raise NoAnswer; lost `before` it
was not done, lost `after` it was. Operations that have no answer (ack, nak, tell, inform) are only lost, not done.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from millstream.errors import NoAnswer, SettingsError
from millstream.ports import Broker, Delivery, Outgoing, Published, Unanswered

VARIABLE = "MILLSTREAM_FAULTS"
EXIT_STATUS = 137  # what a shell reports of a process that was ended by SIGKILL
_EVERY = 0
_LENDS = frozenset({"pull", "mailbox.take", "feed.take"})
_MADE = frozenset({"mailbox", "feed"})

When = Literal["before", "after"]
What = Literal["exit", "lose", "delay"]
_WHEN: dict[str, When] = {"before": "before", "after": "after"}
_WHAT: dict[str, What] = {"exit": "exit", "lose": "lose", "delay": "delay"}


@dataclass(frozen=True, slots=True)
class Fault:
    """One line of a plan."""

    operation: str
    subject: str
    when: When
    nth: int
    what: What
    seconds: float = 0.0


def faulty(broker: Broker, plan: str | None = None, *, leave: Callable[[int], object] = os._exit) -> Broker:
    """Wrap `broker` by `plan`, or by the environment's; without either it is returned as it is.

    Raises SettingsError for a plan that cannot be read: a fault that never strikes would prove nothing.
    """
    faults = parse_plan(os.environ.get(VARIABLE, "") if plan is None else plan)
    if not faults:
        return broker
    known = {name for name in dir(Broker) if not name.startswith("_")} | _LENDS
    unknown = sorted({fault.operation for fault in faults} - known)
    if unknown:
        raise SettingsError([f"Expected an operation of the broker, got `{unknown[0]}`"], VARIABLE)
    return cast("Broker", _Faulty(broker, "", _Strikes(faults, leave)))


def parse_plan(text: str) -> tuple[Fault, ...]:
    """Read a plan; raises SettingsError."""
    return tuple(_parse_fault(part.strip()) for part in text.split(";") if part.strip())


def _parse_fault(text: str) -> Fault:
    parts = text.split(":")
    what, _, seconds = parts[-1].partition("=")
    operation, bracket, subject = parts[0].partition("[")
    nth = parts[2] if len(parts) == 4 else ""
    if (
        len(parts) != 4
        or parts[1] not in _WHEN
        or not (nth == "*" or (nth.isdigit() and int(nth) > 0))
        or what not in _WHAT
        or (what == "delay") != bool(seconds)
        or (bracket and not subject.endswith("]"))
    ):
        raise SettingsError([f"Expected `operation[subject]:before|after:n:exit|lose|delay=s`, got `{text}`"], VARIABLE)
    try:
        pause_s = float(seconds or "0")
    except ValueError:
        raise SettingsError([f"Expected seconds, got `{seconds}`"], VARIABLE) from None
    return Fault(
        operation,
        subject.removesuffix("]"),
        _WHEN[parts[1]],
        _EVERY if nth == "*" else int(nth),
        _WHAT[what],
        pause_s,
    )


class _Strikes:
    """Counts calls and says which fault strikes."""

    def __init__(self, faults: Sequence[Fault], leave: Callable[[int], object]) -> None:
        self._faults = faults
        self._counts = [0] * len(faults)
        self._leave = leave

    def concerns(self, operation: str) -> bool:
        return any(fault.operation == operation for fault in self._faults)

    def of_call(self, operation: str, subjects: Sequence[str]) -> list[Fault]:
        """The faults that strike this call."""
        found: list[Fault] = []
        for index, fault in enumerate(self._faults):
            if fault.operation != operation or not any(fault.subject in subject for subject in subjects):
                continue
            self._counts[index] += 1
            if fault.nth in (_EVERY, self._counts[index]):
                found.append(fault)
        return found

    def exit(self) -> None:
        self._leave(EXIT_STATUS)


class _Faulty:
    """Passes everything on to `target`, except for what the plan names."""

    def __init__(self, target: Any, path: str, strikes: _Strikes) -> None:
        self._target = target
        self._path = path
        self._strikes = strikes

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        operation = self._path + name
        if name in _MADE and not self._path:
            return functools.partial(self._made, found, operation)
        if not self._strikes.concerns(operation):
            return found
        return functools.partial(
            self._awaited if inspect.iscoroutinefunction(found) else self._called, found, operation
        )

    async def _made(self, found: Any, operation: str, *args: Any, **named: Any) -> Any:
        made = await self._awaited(found, operation, *args, **named)
        return _Faulty(made, f"{operation}.", self._strikes)

    def _called(self, found: Any, operation: str, *args: Any, **named: Any) -> Any:
        faults = self._strikes.of_call(operation, _subjects(args, named))
        self._strike(faults, "before")
        result = None if any(fault.what == "lose" for fault in faults) else found(*args, **named)
        self._strike(faults, "after")
        return result

    def _strike(self, faults: Sequence[Fault], when: When) -> None:
        for fault in faults:
            if fault.when == when and fault.what == "exit":
                if when == "before":
                    self._strikes.exit()
                else:  # what was sent goes out at the end of this turn of the loop
                    asyncio.get_running_loop().call_soon(self._strikes.exit)
            if fault.when == when and fault.what == "delay":
                time.sleep(fault.seconds)  # an operation that cannot be awaited: the whole loop is late

    async def _awaited(self, found: Any, operation: str, *args: Any, **named: Any) -> Any:
        # Takes have no subject of their own: they are matched by what they return.
        faults = [] if operation in _LENDS else self._strikes.of_call(operation, _subjects(args, named))
        await self._strike_awaited(faults, "before")
        if operation == "publish_all":
            result = await _publish_rest(found, _lost_subjects(faults, "before"), *args, **named)
        elif _lost_subjects(faults, "before"):
            return _nothing(operation)
        else:
            result = await found(*args, **named)
        if operation in _LENDS:
            faults = self._strikes.of_call(operation, _subjects((result,), {})) if result else []
            await self._strike_awaited(faults, "before")
        await self._strike_awaited(faults, "after")
        if operation == "publish_all":
            return _unanswered(result, _lost_subjects(faults, "after"), *args, **named)
        return _nothing(operation) if _lost_subjects(faults, "after") or _lost_subjects(faults, "before") else result

    async def _strike_awaited(self, faults: Sequence[Fault], when: When) -> None:
        for fault in faults:
            if fault.when == when and fault.what == "exit":
                self._strikes.exit()
            if fault.when == when and fault.what == "delay":
                await asyncio.sleep(fault.seconds)


def _lost_subjects(faults: Sequence[Fault], when: When) -> list[str]:
    return [fault.subject for fault in faults if fault.what == "lose" and fault.when == when]


async def _publish_rest(found: Any, lost: Sequence[str], outgoing: Sequence[Outgoing]) -> list[Published]:
    """Publish what is not lost."""
    if not lost:
        return cast("list[Published]", await found(outgoing))
    rest = [one for one in outgoing if not _any_in(lost, one.subject)]
    results = iter(await found(rest))
    return [Unanswered() if _any_in(lost, one.subject) else next(results) for one in outgoing]


def _unanswered(results: Sequence[Published], lost: Sequence[str], outgoing: Sequence[Outgoing]) -> list[Published]:
    """The results without those that were lost on the way back."""
    pairs = zip(outgoing, results, strict=True)
    return [Unanswered() if _any_in(lost, one.subject) else result for one, result in pairs]


def _any_in(parts: Sequence[str], subject: str) -> bool:
    return any(part in subject for part in parts)


def _nothing(operation: str) -> Any:
    if operation in _LENDS:
        return []
    if operation == "publish":
        return Unanswered()
    raise NoAnswer(f"{operation} was lost on purpose")


def _subjects(args: Sequence[Any], named: dict[str, Any]) -> list[str]:
    """Everything in the arguments that may stand for a subject."""
    found: list[str] = [""]  # so that a fault without a subject strikes calls without one
    for value in (*args, *named.values()):
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, Outgoing | Delivery):
            found.append(value.subject)
        elif isinstance(value, list | tuple):
            found += _subjects(cast("Sequence[Any]", value), {})
        elif hasattr(value, "subject"):
            found.append(value.subject)
    return found
