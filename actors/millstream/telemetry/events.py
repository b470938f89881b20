"""Named events of the actors. The table in docs/events.md lists them; a test compares."""

import json
import logging
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Final, Protocol

# name: what it says
EVENTS: Final[dict[str, str]] = {
    "actor.started": "an actor runs",
    "actor.stopped": "an actor has stopped",
    "actor.draining": "a worker takes no more tasks and lets running ones end",
    "submit.invalid": "a submit did not fit the contract and was dead-lettered",
    "submit.unanswered": "the broker did not answer while a submit was admitted; it will be redelivered",
    "decision.unanswered": "the broker did not answer while a decision was written; it will be redelivered",
    "command.done": "a command changed a task",
    "command.ignored": "a command came too late or named nothing",
    "advisory.handled": "a message at its delivery limit was taken care of",
    "message.unknown": "a message of a kind or version that this program does not know was left alone",
    "message.faulty": "a message could not be handled because of an error in this program",
    "task.claimed": "a worker began an execution",
    "task.silenced": "a worker found another execution in possession and went silent",
    "task.superseded": "a worker found the task moved on and dropped its delivery",
    "task.committed": "an outcome was committed",
    "task.stale_outcome": "an outcome came too late and was dropped",
    "task.parked": "a worker gave a task back until later",
    "intake.paused": "the store is too full to admit tasks; they wait in INBOX, which refuses new ones once it is full",
    "intake.resumed": "the store has room again, and tasks are admitted",
    "releaser.elected": "a dispatcher was elected to release held tasks",
    "releaser.retired": "a dispatcher releases no more: it is stopping, or may have lost its election",
    "consumer.redeclared": "a consumer that somebody deleted was declared anew",
    "leader.waiting": "another process leads; this one stands by",
    "config.changed": "a new configuration document is in effect",
    "config.refused": "a configuration document has faults and was not taken; what was in effect stays",
    "budget.warning": "spending passed the soft threshold of a budget",
    "broker.trouble": "the broker refused or did not answer; the actor tries again",
}


class Telemetry(Protocol):
    """Where actors tell what happened."""

    def emit(self, name: str, /, **fields: object) -> None:
        """Report one event; must be quick and must not raise."""
        ...


@dataclass
class Recorder:
    """Counts events and writes one JSON line for each to a logger; counts are read by metrics and tests."""

    actor: str
    logger: logging.Logger = field(default_factory=lambda: logging.getLogger("millstream"))
    counts: Counter[str] = field(default_factory=Counter[str])
    quiet: frozenset[str] = frozenset({"task.claimed", "task.committed"})

    def emit(self, name: str, /, **fields: object) -> None:
        self.counts[name] += 1
        level = logging.DEBUG if name in self.quiet else logging.INFO
        if self.logger.isEnabledFor(level):
            line = {"event": name, "actor": self.actor, **fields}
            self.logger.log(level, "%s", json.dumps(line, default=repr, ensure_ascii=True))


def log_to_stderr(level: str = "INFO") -> None:
    """Write the log lines of this process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("millstream")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(level.upper())
