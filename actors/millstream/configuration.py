"""What an operator may change while everything runs: a document in a bucket, laid over the settings of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import msgspec

from millstream.errors import BrokerClosed, BrokerError, SettingsError
from millstream.ports import Broker
from millstream.settings import Settings, build
from millstream.telemetry.events import Telemetry

LOOK_EVERY_S = 1.0
SECTIONS = ("limits", "queues", "task_types", "tenants", "prices")
"""What the document may hold, each as millstream.toml has it; the rest belongs to a process, not to the fleet."""

Layer = dict[str, Any]


class Configuration:
    """The settings in effect: those of this process with the newest document that is valid as a whole laid over them.

    `on_change` is called with the new settings after each revision that is taken; an invalid one changes nothing and is
    explained in `fault`, which is empty otherwise. When the document is removed, the process's own settings are left.
    """

    def __init__(
        self,
        broker: Broker,
        settings: Settings,
        telemetry: Telemetry,
        on_change: Callable[[Settings], None] | None = None,
    ) -> None:
        self._broker = broker
        self._own = settings
        self._telemetry = telemetry
        self._seen = 0
        self.on_change = on_change
        self.settings = settings
        self.revision = 0
        """That of the document in effect, 0 without one."""
        self.fault = ""

    async def run(self, stop: asyncio.Event) -> None:
        """Look for a new document every second until `stop` is set. Raises BrokerClosed."""
        while not stop.is_set():
            await self.look()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await stop.wait()

    async def look(self) -> bool:
        """Take the newest document; False where the broker did not answer. Raises BrokerClosed."""
        names = self._own.names
        try:
            found = await self._broker.kv_get(names.config_bucket, names.config_key)
        except BrokerClosed:
            raise
        except BrokerError as error:
            self._telemetry.emit("broker.trouble", error=str(error))
            return False
        revision = 0 if found is None else found.revision
        if revision != self._seen:
            self._seen = revision
            self._take(b"{}" if found is None else found.value, revision)
        return True

    def _take(self, document: bytes, revision: int) -> None:
        try:
            settings = overlaid(self._own, document)
        except SettingsError as error:
            self.fault = f"revision {revision} was not taken: {error}"
            self._telemetry.emit("config.refused", revision=revision, error=str(error))
            return
        self.settings, self.revision, self.fault = settings, revision, ""
        self._telemetry.emit("config.changed", revision=revision)
        if self.on_change is not None:
            self.on_change(settings)


def overlaid(settings: Settings, document: bytes) -> Settings:
    """The settings with a document laid over them, entry by entry and field by field; raises SettingsError.

    What a document does not name stays as it is.
    """
    source = "the configuration document"
    try:
        found = msgspec.json.decode(document, type=Layer)
        unknown = [
            f"Expected {', '.join(SECTIONS)}, got `{name[:80]}` - at `$`" for name in found if name not in SECTIONS
        ]
        sections = msgspec.convert({} if unknown else found, dict[str, dict[str, Layer]])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise SettingsError([str(error)], source) from None
    if unknown:
        raise SettingsError(unknown, source)
    return build(_over(cast(Layer, msgspec.to_builtins(settings)), sections), source)


def _over(under: Layer, over: Layer) -> Layer:
    """One layer on another; what both hold as tables is laid over each other in turn."""
    merged = dict(under)
    for name, value in over.items():
        below = merged.get(name)
        both = isinstance(below, dict) and isinstance(value, dict)
        merged[name] = _over(cast(Layer, below), cast(Layer, value)) if both else value
    return merged
