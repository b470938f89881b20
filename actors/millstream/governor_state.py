"""What a governor leaves to its successor: a snapshot in a bucket, which a former leader cannot overwrite."""

from __future__ import annotations

import zlib

import msgspec

from millstream.errors import BrokerClosed, BrokerError
from millstream.policy.budgets import Spend
from millstream.policy.snapshots import Snapshot
from millstream.ports import Broker
from millstream.telemetry.events import Telemetry
from millstream_schemas.names import Names

SQUEEZE_BYTES = 64 * 1024
"""A longer snapshot is compressed."""

_encode = msgspec.json.Encoder().encode


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot, when it was taken (Unix seconds), and what was spent by then and not stored yet."""

    at: float
    snapshot: Snapshot
    unstored: tuple[Spend, ...] = ()


class StateKeeper:
    """Reads what the predecessor left, and replaces it by compare-and-set on the revision read or written last.

    So a late write of a former leader, after its successor has written, is refused.
    """

    def __init__(self, broker: Broker, names: Names, telemetry: Telemetry) -> None:
        self._broker = broker
        self._bucket = names.governor_bucket
        self._key = names.governor_lock
        self._telemetry = telemetry
        self._revision = 0
        self.found_unreadable = False

    async def read(self) -> Saved | None:
        """What the predecessor left, None where there is nothing that can be read. Raises BrokerError."""
        found = await self._broker.kv_get(self._bucket, self._key)
        self._revision = 0 if found is None else found.revision
        self.found_unreadable = False
        if found is None:
            return None
        try:
            return _decode(found.value)
        except (msgspec.MsgspecError, zlib.error) as error:
            self.found_unreadable = True
            self._telemetry.emit("message.unknown", error=f"the governor's state: {error}")
            return None

    async def write(self, saved: Saved) -> bool:
        """Replace it; False where that did not succeed, and must be tried again. Raises BrokerClosed."""
        body = _encode(saved)
        if len(body) > SQUEEZE_BYTES:
            body = zlib.compress(body, 1)
        try:
            if self._revision:
                revision = await self._broker.kv_update(self._bucket, self._key, body, self._revision)
            else:
                revision = await self._broker.kv_create(self._bucket, self._key, body)
            if revision is None:
                return await self._look_again(saved.snapshot.epoch)
        except BrokerClosed:
            raise
        except BrokerError as error:
            self._telemetry.emit("broker.trouble", error=str(error))
            return False
        self._revision = revision
        return True

    async def _look_again(self, epoch: int) -> bool:
        """Find out whether a write of ours, whose answer was lost, or a successor's has moved the revision."""
        found = await self._broker.kv_get(self._bucket, self._key)
        if found is None:
            self._revision = 0  # it has expired
            return False
        try:
            ours = _decode(found.value).snapshot.epoch <= epoch
        except (msgspec.MsgspecError, zlib.error):
            ours = False
        if ours:
            self._revision = found.revision
        return False


def _decode(body: bytes) -> Saved:
    return msgspec.json.decode(body if body.startswith(b"{") else zlib.decompress(body), type=Saved)
