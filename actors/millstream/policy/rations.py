"""A ration of repeated attempts: a bounded share of a key's grants, so that failures do not feed on themselves."""

LEAST_PER_S = 1.0
"""What may be repeated in any case, else a fleet that has only repeated attempts left would stand still."""
SAVED = 10.0
"""At most so much of an unused ration is kept."""


class RetryRation:
    """Earns a share of one for each first attempt that is granted, and one a second; a repeated attempt costs one.

    `ratio`, below 1, is the part of all grants that repeated attempts may take.
    """

    __slots__ = ("_at", "_saved", "ratio")

    def __init__(self, ratio: float, before: "RetryRation | None", now: float) -> None:
        self.ratio = ratio
        self._saved = 1.0 if before is None else before.left(now)
        self._at = now

    def left(self, now: float) -> float:
        """How many repeated attempts may be granted now."""
        if now > self._at:
            self._saved = min(SAVED, self._saved + (now - self._at) * LEAST_PER_S)
            self._at = now
        return self._saved

    def wait_s(self, now: float) -> float:
        """Seconds until the next one, if nobody else earns it before."""
        return max(0.0, (1.0 - self.left(now)) / LEAST_PER_S)

    def earn(self, granted: int) -> None:
        """First attempts were granted."""
        self._saved = min(SAVED, self._saved + granted * self.ratio / (1 - self.ratio))

    def take(self, count: int) -> None:
        """Repeated attempts were let in; below zero means given back."""
        self._saved = min(SAVED, self._saved - count)
