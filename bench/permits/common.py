"""What all rows of the governor's bench share: sizes, lines of the table, a stage with real processes."""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from millstream.server import LocalServer
from tests.support.calling import Provider
from tests.support.fleet import Fleet
from tests.support.leaders import finished, gate, start_load
from tests.support.permit_load import Counts, Slots
from tests.support.processes import ActorProcess, Processes
from tests.support.provider import Call, KeyConfig

PROCESSES = 4
SLOTS = 10
SETTLING_S = 2.0
"""At the beginning of a run: until the load is up and the first bookings have been taken."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How long and how large: `quick` for CI, else as the table of the targets asks."""

    quick: bool = False

    def pick(self, quick: float, full: float) -> float:
        """One of two sizes."""
        return quick if self.quick else full

    @property
    def window_s(self) -> float:
        """The window of most limits."""
        return self.pick(10.0, 60.0)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table; `met` is None where it is only told."""

    row: str
    measure: str
    value: str
    must: str = ""
    met: bool | None = None


@dataclass
class Outcome:
    """What a row found: lines for people, and figures by the keys of the last line."""

    lines: list[Line] = field(default_factory=list[Line])
    figures: dict[str, float] = field(default_factory=dict[str, float])


def at_most(row: str, measure: str, value: float, bound: float, unit: str = "") -> Line:
    """A line whose value must not pass a bound."""
    return Line(row, measure, f"{value:.4g}{unit}", f"≤ {bound:.4g}{unit}", value <= bound)


def at_least(row: str, measure: str, value: float, bound: float, unit: str = "") -> Line:
    """A line whose value must reach a bound."""
    return Line(row, measure, f"{value:.4g}{unit}", f"≥ {bound:.4g}{unit}", value >= bound)


def told(row: str, measure: str, value: float | str, unit: str = "") -> Line:
    """A line that is only told."""
    return Line(row, measure, value if isinstance(value, str) else f"{value:.5g}{unit}")


@dataclass
class Stage:
    """A server, a fleet on it, and the stub provider; the actors are started by the row."""

    fleet: Fleet
    provider: Provider
    processes: Processes

    def loads(
        self, slots: Sequence[Slots], seconds: float, count: int = PROCESSES, urls: Mapping[int, str] | None = None
    ) -> Loads:
        """`count` processes of load that begin together; `urls` lets some of them go another way to the server."""
        began = gate()
        started = [
            start_load(
                self.fleet, self.provider, slots, seconds, gate=began, number=number, url=(urls or {}).get(number)
            )
            for number in range(count)
        ]
        return Loads(started, began, seconds)

    def worker(self, concurrency: int, app: str = "tests.support.calls:app") -> ActorProcess:
        """A real worker for the handlers that call the provider."""
        return self.fleet.worker(concurrency, env={"MILLSTREAM_PROVIDER": str(self.provider.port)}, app=app)


@dataclass(frozen=True, slots=True)
class Loads:
    """Processes of load at work: they begin at `began` (monotonic) and end `seconds` later."""

    processes: list[ActorProcess]
    began: float
    seconds: float

    @property
    def ends(self) -> float:
        return self.began + self.seconds

    async def finished(self) -> list[Counts]:
        """Wait for all of them."""
        return await finished(self.processes, self.seconds)


@contextmanager
def stage(config: str, keys: Mapping[str, KeyConfig] | None = None, lease_s: float = 30.0) -> Generator[Stage]:
    """Everything in a folder of its own; all processes end with the block, and a fault prints their logs."""
    with tempfile.TemporaryDirectory() as name, LocalServer(Path(name) / "nats") as server:
        folder = Path(name)
        processes = Processes(folder / "logs", {"MILLSTREAM_NATS_URL": server.url, "PYTHONWARNINGS": "ignore"})
        logs = io.StringIO()
        try:
            fleet = Fleet(server, processes, folder, config=config, lease_s=lease_s)
            yield Stage(fleet, Provider.start(processes, keys), processes)
        except BaseException:
            logs.write("the logs of this stage:\n")
            raise
        finally:
            failed = bool(logs.getvalue())
            with contextlib.redirect_stdout(logs):
                processes.close()
            if failed:
                sys.stderr.write(logs.getvalue())


def served(calls: Sequence[Call], key: str | None = None) -> list[float]:
    """When calls arrived, refused ones too."""
    return [call.at for call in calls if key is None or call.key == key]


def total(counts: Sequence[Counts]) -> str:
    """One text of what all processes of load counted."""
    waits: dict[str, int] = {}
    for one in counts:
        for reason, times in {**one.waits, **{f"denied {k}": v for k, v in one.denials.items()}}.items():
            waits[reason] = waits.get(reason, 0) + times
    calls, late = sum(one.calls for one in counts), sum(one.late for one in counts)
    return f"{calls} calls, {sum(one.refused for one in counts)} refused, {late} permits too late; waits {waits}"
