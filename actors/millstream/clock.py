"""The clock and the source of ids that a real process uses; tests pass their own."""

import os
import secrets
import time


class SystemClock:
    """The machine's clocks."""

    def now(self) -> float:
        """Unix seconds; steps when the machine's clock is set."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds that never step back."""
        return time.monotonic()


class SystemIds:
    """Ids and randomness from the operating system; good after a fork and in threads."""

    def __init__(self) -> None:
        self._random = secrets.SystemRandom()

    def new(self) -> str:
        """32 hexadecimal digits, unique without any agreement."""
        return os.urandom(16).hex()

    def uniform(self) -> float:
        """A random number in [0, 1)."""
        return self._random.random()
