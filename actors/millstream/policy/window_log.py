"""What was admitted over the last window: the exact bound for amounts larger than one, which spacing cannot give."""

from __future__ import annotations

from bisect import insort
from collections import deque
from math import inf

GRAINS = 20_000
"""A log keeps so many different times per window at the most, whatever the rate."""
SAVED_GRAINS = 300
"""Most entries per window in a snapshot; merging delays a successor under full load by one of them at the most."""


class Cell:
    """What was admitted within one grain of time: it leaves the window as a whole, when its last admission does."""

    __slots__ = ("amount", "at", "counted", "since")

    def __init__(self, at: float, amount: int) -> None:
        self.since = at
        self.at = at
        self.amount = amount
        self.counted = True

    def __lt__(self, other: Cell) -> bool:
        return self.at < other.at


class Charge:
    """What one admission put into a log."""

    __slots__ = ("amount", "cell")

    def __init__(self, cell: Cell, amount: int) -> None:
        self.cell = cell
        self.amount = amount


class WindowLog:
    """The amount admitted over the last `span_s` seconds: never too small, and exact to one grain of time."""

    __slots__ = ("_cells", "_forgotten", "_grain_s", "span_s", "total")

    def __init__(self, span_s: float) -> None:
        self.span_s = span_s
        self.total = 0
        self._grain_s = span_s / GRAINS
        self._forgotten = -inf  # the time of the last that left
        self._cells: deque[Cell] = deque()

    def expire(self, now: float) -> None:
        """Forget what lies `span_s` or more in the past."""
        while self._cells and self._cells[0].at + self.span_s <= now:
            cell = self._cells.popleft()
            cell.counted = False
            self._forgotten = cell.at
            self.total -= cell.amount

    def delay(self, amount: int, limit: int, now: float) -> float:
        """Seconds until `amount` more fits under `limit`; infinite where it never does."""
        self.expire(now)
        excess = self.total + amount - limit
        if excess <= 0:
            return 0.0
        for cell in self._cells:
            excess -= cell.amount
            if excess <= 0:
                return max(0.0, cell.at + self.span_s - now)
        return inf

    def add(self, at: float, amount: int) -> Charge:
        """Count `amount` as admitted at `at`, which may lie in the future."""
        self.total += amount
        if self._cells:
            last = self._cells[-1]
            if 0 <= at - last.since < self._grain_s:
                last.amount += amount
                last.at = max(last.at, at)
                return Charge(last, amount)
            if at < last.at:
                cell = Cell(at, amount)
                insort(self._cells, cell)
                return Charge(cell, amount)
        cell = Cell(at, amount)
        self._cells.append(cell)
        return Charge(cell, amount)

    def change(self, charge: Charge, amount: int) -> None:
        """Let `charge` weigh `amount` from now on; without effect once it left the log."""
        if charge.cell.counted:
            charge.cell.amount += amount - charge.amount
            self.total += amount - charge.amount
        charge.amount = amount

    def within(self, now: float, seconds: float) -> int:
        """What was admitted in the `seconds` up to now, booked starts left out."""
        amount = 0
        for cell in reversed(self._cells):
            if cell.at <= now - seconds:
                break
            if cell.at <= now:
                amount += cell.amount
        return amount

    def until(self, at: float, seconds: float, now: float) -> tuple[int, float]:
        """What was admitted in the `seconds` up to `at`, and over how many of them that is still known."""
        self.expire(now)
        amount = self.total
        for cell in reversed(self._cells):
            if cell.at <= at:
                break
            amount -= cell.amount
        for cell in self._cells:
            if cell.at > at - seconds:
                break
            amount -= cell.amount
        return amount, max(0.0, min(seconds, at - self._forgotten))

    def ages(self, now: float) -> list[tuple[float, int]]:
        """Age in seconds (negative: in the future) and amount of all that counts, at most one entry per saved grain."""
        self.expire(now)
        grain_s = self.span_s / SAVED_GRAINS
        merged: list[tuple[float, int]] = []
        for cell in reversed(self._cells):  # youngest first: merging makes the rest younger, never older
            age = now - cell.at
            if merged and age - merged[-1][0] < grain_s:
                merged[-1] = (merged[-1][0], merged[-1][1] + cell.amount)
            else:
                merged.append((age, cell.amount))
        merged.reverse()
        return merged
