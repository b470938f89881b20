"""Executions that run now, and one of them: the handler as a task of its own, in a span, with its reports."""

import asyncio
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from millstream.app import AnyTask
from millstream.calls import Calls
from millstream.context import Context
from millstream.policy.claim import Hold
from millstream.telemetry.otel import process_span
from millstream.worker.context import Bench
from millstream.worker.executor import Ending, execute
from millstream_schemas.events import Usage
from millstream_schemas.infos import Progress

PROGRESS_EVERY_S = 0.2


@dataclass
class Running:
    """The executions of one worker by their id; the hard stop ends them, and lets none begin after it."""

    executions: dict[str, tuple[Hold, "Execution"]] = field(default_factory=dict[str, tuple[Hold, "Execution"]])
    over: bool = False
    """True after the hard stop: what was claimed but had not begun by then must not begin."""

    @contextmanager
    def listed(self, hold: Hold, execution: "Execution") -> Generator[None]:
        """List an execution while it runs."""
        self.executions[hold.execution_id] = (hold, execution)
        try:
            yield
        finally:
            del self.executions[hold.execution_id]

    def task_ids(self) -> list[str]:
        """The tasks that run, for the registry."""
        return [hold.item.card.task_id for hold, _ in self.executions.values()]

    def stop_all(self) -> None:
        """End every execution, and let none begin any more; each is handed back as interrupted."""
        self.over = True
        for _, execution in list(self.executions.values()):
            execution.stop()


class Execution:
    """One execution of a handler; `keys` are the limits of the task's own permit, empty where it has none."""

    def __init__(self, bench: Bench, hold: Hold, task: AnyTask, keys: tuple[str, ...]) -> None:
        self._bench = bench
        self._hold = hold
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._reported_at = 0.0
        self._began = 0.0
        self._runtime_s = 0.0
        self._calls = Calls(hold.item, bench.permits, bench.clock.monotonic, bench.configured().prices, keys)
        self._context = Context(
            hold.item, hold.execution_id, self._report, bench.send, used=self._calls.used, calls=self._calls
        )
        self._runner: asyncio.Task[Any] | None = None

    async def run(self) -> Ending:
        """Run the handler to its ending; `stop` ends it early."""
        limit = self._bench.settings.worker.max_result_bytes
        self._runner = asyncio.current_task()
        self._began = time.monotonic()
        try:
            with process_span(self._hold.item, self._bench.names, self._bench.spans):
                return await execute(self._task, self._context, limit)
        finally:
            self._runner = None
            await self._calls.close()
            self._runtime_s = time.monotonic() - self._began

    def stop(self) -> None:
        """Cancel the handler while it runs; `execute` turns that into `Stopped`, and the commit goes on."""
        if self._runner is not None:
            self._runner.cancel()

    def usage(self) -> Usage:
        """What this execution used."""
        return self._calls.used.with_runtime(self._runtime_s)

    def _report(self, fraction: float, message: str) -> None:
        """May be called from a handler's thread; too frequent reports are dropped, that of the end (1.0) never."""
        now = time.monotonic()
        if fraction < 1.0 and now - self._reported_at < PROGRESS_EVERY_S:
            return
        self._reported_at = now
        self._loop.call_soon_threadsafe(self._tell, fraction, message)

    def _tell(self, fraction: float, message: str) -> None:
        card = self._hold.item.card
        info = Progress(key=card.key, fraction=fraction, message=message, attempt=card.attempt)
        self._bench.journal.inform(info, card.tenant_id, card.queue)
