"""Renews ack deadlines from a thread with its own loop and connection, whatever the handlers do to theirs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable

from millstream.errors import BrokerUnreachable
from millstream.jetstream.link import Endpoint, open_wire
from millstream.jetstream.protocol import PROGRESS
from millstream.jetstream.wire import Wire
from millstream.ports import Delivery

_log = logging.getLogger("millstream.jetstream")
_CONNECT_TIMEOUT_S = 10.0
_LONGEST_SLEEP_S = 0.25
_BEATS_PER_LEASE = 3


class _Beat:
    """One delivery that is kept alive."""

    __slots__ = ("frame", "last", "lease_s")

    def __init__(self, token: str, lease_s: float, now: float) -> None:
        self.frame = f"PUB {token} {len(PROGRESS)}\r\n".encode() + PROGRESS + b"\r\n"
        self.lease_s = lease_s
        self.last = now


class JetStreamHeart:
    """A daemon thread, started by the first `start`. Its methods may be called from any thread."""

    def __init__(self, endpoint: Endpoint, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._endpoint = endpoint
        self._monotonic = monotonic
        self._beats: dict[str, _Beat] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def start(self, delivery: Delivery, lease_s: float) -> None:
        """Renew until `stop`, or until the lease was lost for lack of time: a zombie must not keep it."""
        with self._lock:
            self._beats[delivery.token] = _Beat(delivery.token, lease_s, self._monotonic())
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(target=self._run, name="millstream-heart", daemon=True)
                self._thread.start()

    def stop(self, delivery: Delivery) -> None:
        """Renew no longer; unknown deliveries are fine."""
        with self._lock:
            self._beats.pop(delivery.token, None)

    def alive(self, delivery: Delivery) -> bool:
        """False once more time than the lease has passed since the last renewal went out."""
        beat = self._beats.get(delivery.token)
        return beat is not None and self._monotonic() - beat.last <= beat.lease_s

    def close(self) -> None:
        """End the thread and its connection; waits for up to two seconds."""
        self._stop.set()
        thread = self._thread
        if thread is not None:
            thread.join(2.0)

    def _run(self) -> None:
        try:
            asyncio.run(self._beat_until_stopped())
        except Exception:  # noqa: BLE001 - a thread's end would go unheard
            _log.exception("the heartbeat thread failed; deliveries under way lose their leases")

    async def _beat_until_stopped(self) -> None:
        wire: Wire | None = None
        try:
            while not self._stop.is_set():
                if wire is None or wire.closed:
                    wire = await self._connect()
                    continue
                self._beat_all(wire)
                await asyncio.sleep(self._pause_s())
        finally:
            if wire is not None:
                with contextlib.suppress(Exception):
                    await wire.client.close()

    async def _connect(self) -> Wire | None:
        try:
            return await open_wire(self._endpoint, _CONNECT_TIMEOUT_S, lambda: None)
        except BrokerUnreachable as error:
            _log.warning("heartbeats cannot go out: %s", error)
            return None

    def _pause_s(self) -> float:
        with self._lock:
            shortest = min((beat.lease_s for beat in self._beats.values()), default=_LONGEST_SLEEP_S * 12)
        return max(0.01, min(_LONGEST_SLEEP_S, shortest / (4 * _BEATS_PER_LEASE)))

    def _beat_all(self, wire: Wire) -> None:
        if not wire.connected:
            return
        now = self._monotonic()
        frames: list[bytes] = []
        with self._lock:
            for beat in self._beats.values():
                since = now - beat.last
                if since <= beat.lease_s and since * _BEATS_PER_LEASE >= beat.lease_s:
                    beat.last = now
                    frames.append(beat.frame)
        if frames:
            wire.send(b"".join(frames))
