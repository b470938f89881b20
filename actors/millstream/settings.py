"""Settings: frozen structs, layered from millstream.toml, the environment and flags; defaults are applied once, last."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta

from millstream.errors import SettingsError
from millstream.policy.admit import QueueDefaults
from millstream.policy.durations import seconds
from millstream.policy.limits import Limit, Price, faults, named
from millstream.policy.metering import Metered
from millstream_schemas.envelope import MAX_ATTEMPTS_CAP, MAX_COST_USD, MAX_COUNT, MAX_WAIT_S, RetryPolicy
from millstream_schemas.names import DEFAULT_PREFIX, Names, is_token
from millstream_schemas.topology import DAY_S, Lifetimes

DEFAULT_NATS_URL = "nats://127.0.0.1:4222"
DEFAULT_HTTP_PORT = 8420

LONGEST_S = 100 * 365 * DAY_S
"""The server counts nanoseconds in 64 bits; two of these together still fit."""

Positive = Annotated[float, Meta(gt=0, le=LONGEST_S)]


class NatsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to reach the server. CONTROL may have a connection of its own, in an account that workers cannot reach."""

    url: str = DEFAULT_NATS_URL
    user: str | None = None
    password: str | None = None
    creds_file: str | None = None
    control_url: str | None = None
    control_user: str | None = None
    control_password: str | None = None
    control_creds_file: str | None = None
    prefix: Annotated[str, Meta(pattern="^[a-z][a-z0-9]{0,15}$")] = DEFAULT_PREFIX
    connect_timeout_s: Positive = 30.0


LimitList = Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=128)], ...], Meta(max_length=16)]


class TaskTypeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all tasks of one type share, whoever sends them."""

    limits: LimitList = ()


class TenantSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tenant: its weight in fair order, and limits of its own."""

    weight: Annotated[float, Meta(ge=1e-6, le=1e6)] = 1.0
    limits: LimitList = ()


class QueueSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One queue: what it fills in for its tasks, and how many of them may run at once over the whole fleet.

    What is filled in has the bounds of the envelope, else no worker could read it.
    """

    max_attempts: Annotated[int, Meta(ge=1, le=MAX_ATTEMPTS_CAP)] = 3
    max_runtime_seconds: Annotated[float, Meta(gt=0, le=MAX_WAIT_S)] | None = None
    max_cost_usd: Annotated[float, Meta(ge=0, le=MAX_COST_USD)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_COUNT)] | None = None
    max_running: Annotated[int, Meta(ge=1)] = 1000
    retry_policy: RetryPolicy = RetryPolicy()
    limits: LimitList = ()
    """Limit keys (or templates) of all its tasks."""
    fair: bool = False
    """Its tasks are released in fair order between tenants even where no limit asks for it."""

    @property
    def metered(self) -> Metered:
        return Metered(limits=self.limits, fair=self.fair)

    @property
    def defaults(self) -> QueueDefaults:
        """What an envelope of this queue takes where it says nothing."""
        return QueueDefaults(
            max_attempts=self.max_attempts,
            max_runtime_seconds=self.max_runtime_seconds,
            max_cost_usd=self.max_cost_usd,
            max_tokens=self.max_tokens,
            retry_policy=self.retry_policy,
        )


class TrackerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The read model and its HTTP surface."""

    database: str | None = None
    """Path of the SQLite file; default: `tracker.sqlite3` in the data directory."""
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = DEFAULT_HTTP_PORT
    batch_ends_after_s: Positive = 5.0
    """The active batch starts anew so long after its last task ended."""


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker process."""

    concurrency: Annotated[int, Meta(ge=1, le=10_000)] = 10
    grace_s: Annotated[float, Meta(ge=0, le=LONGEST_S)] = 25.0
    """How long running handlers may go on after SIGTERM."""
    max_result_bytes: Annotated[int, Meta(ge=1)] = 256 * 1024


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of an installation. Times in seconds; in millstream.toml also as "30s", "5m", "7d"."""

    nats: NatsSettings = NatsSettings()
    lease_s: Positive = 30.0
    history_s: Positive = 7 * DAY_S
    max_wait_s: Positive = 90 * DAY_S
    max_throttle_s: Positive = DAY_S
    unserved_s: Positive = 600.0
    """How long a task whose type no live worker serves waits before it is dead-lettered."""
    dlq_s: Positive = 30 * DAY_S
    dedupe_s: Positive = 120.0
    data_dir: str = ".millstream"
    queues: dict[str, QueueSettings] = {}
    limits: dict[str, Limit] = {}
    task_types: dict[str, TaskTypeSettings] = {}
    tenants: dict[str, TenantSettings] = {}
    """`default` stands for those that are not named."""
    prices: dict[str, Price] = {}
    """By model, as `pins.model` or a handler names it."""
    tracker: TrackerSettings = TrackerSettings()
    worker: WorkerSettings = WorkerSettings()

    @property
    def names(self) -> Names:
        return Names(self.nats.prefix)

    @property
    def lifetimes(self) -> Lifetimes:
        return Lifetimes(
            lease_s=self.lease_s,
            history_s=self.history_s,
            max_wait_s=self.max_wait_s,
            dlq_s=self.dlq_s,
            dedupe_s=self.dedupe_s,
        )

    def metered(self, queue: str, task_type: str, tenant: str) -> tuple[Metered, ...]:
        """What configuration adds to the limits of a task."""
        typed = self.task_types.get(task_type, TaskTypeSettings())
        return (
            self.queue(queue).metered,
            Metered(limits=typed.limits),
            Metered(limits=self.tenant(tenant).limits),
        )

    def tenant(self, name: str) -> TenantSettings:
        """The settings of a tenant; those of `default` for one that is not named."""
        return self.tenants.get(name) or self.tenants.get("default") or TenantSettings()

    def queue(self, name: str) -> QueueSettings:
        """The settings of a queue; the defaults for one that is not configured."""
        return self.queues.get(name, QueueSettings())


_ENVIRONMENT: Mapping[str, tuple[str, ...]] = {
    "MILLSTREAM_NATS_URL": ("nats", "url"),
    "MILLSTREAM_NATS_USER": ("nats", "user"),
    "MILLSTREAM_NATS_PASSWORD": ("nats", "password"),
    "MILLSTREAM_NATS_CREDS": ("nats", "creds_file"),
    "MILLSTREAM_CONTROL_URL": ("nats", "control_url"),
    "MILLSTREAM_CONTROL_USER": ("nats", "control_user"),
    "MILLSTREAM_CONTROL_PASSWORD": ("nats", "control_password"),
    "MILLSTREAM_CONTROL_CREDS": ("nats", "control_creds_file"),
    "MILLSTREAM_PREFIX": ("nats", "prefix"),
    "MILLSTREAM_CONNECT_TIMEOUT": ("nats", "connect_timeout_s"),
    "MILLSTREAM_LEASE": ("lease_s",),
    "MILLSTREAM_HISTORY": ("history_s",),
    "MILLSTREAM_MAX_WAIT": ("max_wait_s",),
    "MILLSTREAM_DEDUPE": ("dedupe_s",),
    "MILLSTREAM_DATA_DIR": ("data_dir",),
    "MILLSTREAM_HTTP_HOST": ("tracker", "host"),
    "MILLSTREAM_HTTP_PORT": ("tracker", "port"),
    "MILLSTREAM_DATABASE": ("tracker", "database"),
    "MILLSTREAM_CONCURRENCY": ("worker", "concurrency"),
    "MILLSTREAM_GRACE": ("worker", "grace_s"),
}

Layer = dict[str, Any]


def load(path: Path | None, environ: Mapping[str, str], flags: Layer | None = None) -> Settings:
    """The settings from a file (or ./millstream.toml where it exists), then the environment, then flags.

    Raises SettingsError with the path of every fault that was found.
    """
    return build(layers(path, environ, flags), str(path) if path else "settings")


def layers(path: Path | None, environ: Mapping[str, str], flags: Layer | None = None) -> Layer:
    """What was set by anybody, laid over each other as `load` does, without defaults and not checked yet."""
    chosen = path or Path("millstream.toml")
    layer: Layer = {}
    if path is not None or chosen.exists():
        layer = _read(chosen)
    for variable, where in _ENVIRONMENT.items():
        if variable in environ:
            _put(layer, where, environ[variable])
    for name, value in (flags or {}).items():
        if value is not None:
            _put(layer, tuple(name.split(".")), value)
    return layer


def from_environment() -> Settings:
    """The settings of this process without flags."""
    return load(None, os.environ)


def build(layer: Layer, source: str = "settings") -> Settings:
    """Settings from plain data, with cross-field checks; raises SettingsError."""
    try:
        settings = msgspec.convert(_with_seconds(_by_own_names(layer)), Settings, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        raise SettingsError([str(error)], source) from None
    problems = _unknown_members(layer) + _problems(settings)
    if problems:
        raise SettingsError(problems, source)
    return settings


def _read(path: Path) -> Layer:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise SettingsError(["the file does not exist"], str(path)) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError([str(error)], str(path)) from None


def _put(layer: Layer, where: tuple[str, ...], value: object) -> None:
    for part in where[:-1]:
        inner: Any = layer.setdefault(part, {})
        if not isinstance(inner, dict):
            return  # `build` says what is wrong with it
        layer = cast(Layer, inner)
    layer[where[-1]] = value


_ALIASES: Mapping[str, str] = {"max_throttle_seconds": "max_throttle_s"}
"""Other names of members, by which people know them elsewhere."""


def _by_own_names(layer: Layer) -> Layer:
    """The layer with each alias replaced by the member that it stands for; raises ValueError where both are set."""
    both = next((alias for alias, name in _ALIASES.items() if alias in layer and name in layer), None)
    if both is not None:
        raise ValueError(f"`{both}` is another name of `{_ALIASES[both]}`, set one of them - at `{both}`")
    return {_ALIASES.get(name, name): value for name, value in layer.items()}


def _with_seconds(data: object, name: str = "") -> Any:
    """Durations like "30s" as seconds, in every member whose name ends in `_s` or `_seconds`."""
    if isinstance(data, dict):
        return {key: _with_seconds(value, key) for key, value in cast(dict[str, object], data).items()}
    if isinstance(data, str) and name.endswith(("_s", "_seconds")):
        try:
            return seconds(data)
        except ValueError as error:
            raise ValueError(f"{error} - at `{name}`") from None
    return data


def _unknown_members(layer: Layer) -> list[str]:
    """What the contract's own structs would skip over, since they may come from a newer producer."""
    known = RetryPolicy.__struct_fields__
    return [
        f"Object contains unknown field `{member}` - at `$.queues.{name}.retry_policy`"
        for name, queue in layer.get("queues", {}).items()
        for member in queue.get("retry_policy", {})
        if member not in known
    ]


def _problems(settings: Settings) -> list[str]:
    found = [
        f"A queue's name must match [A-Za-z0-9_-]{{1,64}} - at `queues.{name}`"
        for name in settings.queues
        if not is_token(name)
    ]
    found += faults(named(settings.limits))
    if settings.lease_s < 1:
        found.append("Expected at least 1 second - at `lease_s`")
    if settings.max_throttle_s > settings.max_wait_s:
        found.append("`max_throttle_s` must not exceed `max_wait_s`")
    if settings.dedupe_s < 0.1:
        found.append("Expected at least 0.1 seconds - at `dedupe_s`")
    return found


def warnings(settings: Settings) -> list[str]:
    """What is allowed but probably not meant."""
    found: list[str] = []
    if settings.worker.grace_s > settings.lease_s * 10:
        found.append("`worker.grace_s` is more than ten leases: a supervisor may kill the worker before it has drained")
    if settings.lifetimes.event_ttl_s < settings.dlq_s:
        found.append("`history_s` + `max_wait_s` is shorter than `dlq_s`: dead letters outlive their timelines")
    return found
