"""Learning after a takeover from a governor that was killed: which places are in use is for the workers to say."""

from collections.abc import Iterable
from math import inf

from millstream.policy.limit_state import Rules


class Learning:
    """Lasts until every worker that the snapshot names has renewed: at least `relearn_least_s`, at most `relearn_s`.

    Where nobody knows which workers there are, it lasts for `relearn_s`.
    """

    __slots__ = ("_heard", "_least_until", "_rules", "_until", "_workers", "active")

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._workers: set[str] = set()
        self._heard: set[str] = set()
        self._least_until = self._until = -inf
        self.active = False

    def begin(self, workers: Iterable[str] | None, now: float) -> None:
        """A predecessor may have granted places that nobody knows of; these workers may have them, or any (None)."""
        self._workers = set(workers or ())
        self._heard.clear()
        self._until = now + self._rules.relearn_s
        self._least_until = self._until if workers is None else now + self._rules.relearn_least_s
        self.active = True

    def heard(self, worker: str) -> bool:
        """A worker has said what it uses; True for the first time in this learning."""
        if not self.active or worker in self._heard:
            return False
        self._heard.add(worker)
        self._workers.discard(worker)
        return True

    @property
    def awaited(self) -> frozenset[str]:
        """Those who have not said yet what they use."""
        return frozenset(self._workers)

    def ends_at(self) -> float:
        """When it ends if no other worker is heard of; infinite once it has ended."""
        if not self.active:
            return inf
        return self._until if self._workers else self._least_until

    def end(self) -> None:
        """Wait for no worker any more."""
        self.active = False
        self._workers.clear()
        self._heard.clear()
