"""How much the server may store: the account says it, or it is found out by asking for too much."""

from __future__ import annotations

import msgspec

from millstream.jetstream.protocol import NO_STORAGE_LEFT, SUBJECTS_OVERLAP, ApiError
from millstream.jetstream.requests import Requests
from millstream_schemas.names import Names

_LARGEST = 1 << 50
_PRECISION = 1 << 20


class _Limits(msgspec.Struct, frozen=True):
    max_storage: int = -1


class _Account(msgspec.Struct, frozen=True):
    storage: int = 0
    reserved_storage: int = 0
    limits: _Limits = _Limits()


class Capacity:
    """Found out once for each connection, since a server may come back with other limits. `configured` spares the search."""

    def __init__(self, requests: Requests, names: Names, configured: int | None) -> None:
        self._requests = requests
        self._names = names
        self._configured = configured
        self._found = configured

    def forget(self) -> None:
        """Another server may answer from now on."""
        self._found = self._configured

    async def store_bytes(self) -> int:
        """Bytes that all streams together may fill, within 1 MiB; 0 where it cannot be found out yet."""
        if self._found is not None:
            return self._found
        account = await self._account()
        if account.limits.max_storage > 0:
            self._found = account.limits.max_storage
            return self._found
        room = await self._room()
        if room is None:
            return 0
        self._found = room + account.reserved_storage
        return self._found

    async def used_bytes(self) -> int:
        """Bytes that the streams of this account fill."""
        return (await self._account()).storage

    async def _account(self) -> _Account:
        return msgspec.json.decode(await self._requests.command("INFO"), type=_Account)

    async def _room(self) -> int | None:
        """What is left to reserve, by halving: the server checks the size first, then refuses the subject as taken.

        So nothing is ever created. A client has no other way to learn `max_file_store`.
        """
        low, high = 0, _LARGEST
        while high - low > _PRECISION:
            middle = (low + high) // 2
            fits = await self._fits(middle)
            if fits is None:
                return None
            low, high = (middle, high) if fits else (low, middle)
        return low  # a limit that is a whole number of MiB comes out exactly

    async def _fits(self, size: int) -> bool | None:
        taken = self._names.event_filter
        name = self._names.events_stream + "-room"
        answer = await self._requests.api(
            f"STREAM.CREATE.{name}", {"name": name, "subjects": [taken], "max_bytes": size, "storage": "file"}
        )
        if not isinstance(answer, ApiError):  # no stream holds the subject yet: take back what was just made
            await self._requests.api(f"STREAM.DELETE.{name}")
            return True
        if answer.err_code == NO_STORAGE_LEFT:
            return False
        return True if answer.err_code == SUBJECTS_OVERLAP else None
