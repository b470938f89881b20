"""The App: a set of handlers and the way to send tasks to them. An instance, never module state."""

import inspect
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar, get_type_hints, overload

import msgspec

from millstream.client import Client, Handle
from millstream.context import Context
from millstream.errors import CallerError, InvalidName, UnknownHandler
from millstream.policy.durations import Duration, seconds
from millstream.policy.limits import Limit, compiled
from millstream_schemas.names import DEFAULT_QUEUE, is_token

MAX_LIMITS = 16
MAX_LIMIT_CHARS = 128

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Signature:
    """What a handler takes: whether a Context, whether a payload, and of which type."""

    takes_context: bool
    takes_payload: bool
    payload_type: Any


@dataclass(frozen=True)
class Task(Generic[P, R]):
    """A handler with its task type and queue. Calling it calls the plain function; `send` submits a task."""

    app: "App"
    function: Callable[P, R]
    task_type: str
    queue: str
    limits: tuple[str, ...]
    timeout_s: float | None
    signature: Signature

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    async def send(self, payload: Any = None, /, **options: Any) -> Handle:
        """Submit a task to this handler through the app's open client; options as in `Client.send`."""
        options.setdefault("queue", self.queue)
        return await self.app.client.send(self.task_type, payload, **options)

    async def send_many(self, payloads: Sequence[Any], /, **options: Any) -> list[Handle]:
        """Submit many tasks, pipelined; options apply to each of them."""
        options.setdefault("queue", self.queue)
        return await self.app.client.send_many(self.task_type, payloads, **options)


class App:
    """Handlers under one name. `@app.task` registers a function; `connect()` opens a client to send with."""

    def __init__(self, name: str) -> None:
        if not name or len(name) > 64:
            raise CallerError("an App needs a name of 1 to 64 characters")
        self.name = name
        self._tasks: dict[str, Task[Any, Any]] = {}
        self._client: Client | None = None

    def __repr__(self) -> str:
        return f"App({self.name!r}, tasks={sorted(self._tasks)})"

    @property
    def tasks(self) -> dict[str, Task[Any, Any]]:
        """The handlers by task type."""
        return dict(self._tasks)

    @property
    def queues(self) -> list[str]:
        """The queues that the handlers are on, sorted."""
        return sorted({task.queue for task in self._tasks.values()})

    @overload
    def task(self, name: Callable[P, R], /) -> Task[P, R]: ...

    @overload
    def task(
        self,
        name: str | None = None,
        /,
        *,
        queue: str = DEFAULT_QUEUE,
        limits: Sequence[str] = (),
        timeout: Duration | None = None,
    ) -> Callable[[Callable[P, R]], Task[P, R]]: ...

    def task(
        self,
        name: str | Callable[P, R] | None = None,
        /,
        *,
        queue: str = DEFAULT_QUEUE,
        limits: Sequence[str] = (),
        timeout: Duration | None = None,
    ) -> Task[P, R] | Callable[[Callable[P, R]], Task[P, R]]:
        """Register a handler, async or sync, that takes `(ctx, payload)`, one of the two, or nothing.

        `limits` are keys, or templates over the task: `tenant/{tenant_id}`, `anthropic/{pins.model}`.
        `timeout` bounds one execution. A sync handler runs in a thread, which no time limit can end: its attempt
        is counted as timed out and its late result is dropped, but the thread goes on.
        Raises CallerError for a name that is taken, limits that are no list of keys, or a signature that does not fit, and
        InvalidName for a bad queue.
        """
        if callable(name):
            return self.task()(name)
        if not is_token(queue):
            raise InvalidName("queue", queue)
        _check_limits(limits)

        def register(function: Callable[P, R]) -> Task[P, R]:
            task_type = name or f"{self.name}.{function.__name__}"
            if task_type in self._tasks:
                raise CallerError(f"task type {task_type!r} has a handler already")
            task = Task(
                app=self,
                function=function,
                task_type=task_type,
                queue=queue,
                limits=tuple(limits),
                timeout_s=None if timeout is None else seconds(timeout),
                signature=_signature(function),
            )
            self._tasks[task_type] = task
            return task

        return register

    def handler(self, task_type: str) -> Task[Any, Any]:
        """The handler of a task type; raises UnknownHandler."""
        try:
            return self._tasks[task_type]
        except KeyError:
            raise UnknownHandler(f"no handler for {task_type!r}; this app has {sorted(self._tasks)}") from None

    @property
    def client(self) -> Client:
        """The client that `connect` opened; raises CallerError outside of it."""
        if self._client is None:
            raise CallerError("not connected: send within `async with app.connect():`")
        return self._client

    @asynccontextmanager
    async def connect(self, url: str | None = None) -> AsyncGenerator[Client]:
        """Open a client to the server at `url`, MILLSTREAM_NATS_URL or nats://127.0.0.1:4222."""
        async with Client.open(url, name=self.name) as client:
            previous, self._client = self._client, client
            try:
                yield client
            finally:
                self._client = previous


def _signature(function: Callable[..., Any]) -> Signature:
    """What a handler takes, read from its parameters once; raises CallerError where that is neither of the forms."""
    try:
        hints = get_type_hints(function)
    except NameError as error:
        raise CallerError(f"the annotations of {function.__qualname__} cannot be resolved: {error}") from None
    names = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    takes_context = bool(names) and (hints.get(names[0]) is Context or (names[0] == "ctx" and "ctx" not in hints))
    rest = names[1:] if takes_context else names
    if len(rest) > 1:
        raise CallerError(f"{function.__qualname__} must take (ctx: Context, payload), one of them, or nothing")
    payload_type = hints.get(rest[0], Any) if rest else None
    if rest:
        _check_type(function, payload_type)
    return Signature(takes_context, bool(rest), payload_type)


def _check_limits(limits: Sequence[str]) -> None:
    listed = not isinstance(limits, str) and len(limits) <= MAX_LIMITS
    if not listed or not all(isinstance(key, str) and 0 < len(key) <= MAX_LIMIT_CHARS for key in limits):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise CallerError(f"`limits` takes a list of at most {MAX_LIMITS} keys, got {limits!r:.200}")
    for key in limits:
        try:
            compiled(Limit(key=key))
        except ValueError as error:
            raise CallerError(f"`limits`: {error}") from None


def _check_type(function: Callable[..., Any], payload_type: Any) -> None:
    try:
        msgspec.json.Decoder(payload_type)
    except TypeError as error:
        raise CallerError(f"the payload type of {function.__qualname__} cannot be decoded: {error}") from None


AnyTask = Task[Any, Any]
__all__ = ["AnyTask", "App", "Signature", "Task"]
