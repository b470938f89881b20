"""Requests to whoever leads as governor: no answer is no permit, and what an earlier leader says late does not count."""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from millstream.errors import BrokerClosed, BrokerError
from millstream.ports import Broker, Clock
from millstream_schemas.names import Names
from millstream_schemas.permits import TOLD, Granted, PermitReply, PermitRequest, Return, Said

GAP_S = 10.0
"""After so long without a request, that the last one was not answered says nothing of now."""

_decode = msgspec.json.Decoder(PermitReply).decode
_decode_said = msgspec.json.Decoder(Said).decode
_encode = msgspec.json.Encoder().encode


class GovernorLink:
    """Asks and tells.

    `on_epoch` is called when another governor leads, `on_began` when it says that it begins now, `on_closed` with the
    keys of which it says that nothing may begin there now.
    """

    def __init__(
        self,
        broker: Broker,
        names: Names,
        clock: Clock,
        *,
        on_epoch: Callable[[], None],
        on_began: Callable[[], None],
        on_closed: Callable[[Collection[str]], None],
    ) -> None:
        self._broker = broker
        self._names = names
        self._clock = clock
        self._on_epoch = on_epoch
        self._on_began = on_began
        self._on_closed = on_closed
        self._subjects: dict[str, str] = {}
        self._failed_at = 0.0
        self.epoch = 0
        self.silent_since: float | None = None
        """Since when, in monotonic seconds, nothing was answered; None while the last request was."""

    async def ask(self, verb: str, request: PermitRequest, timeout_s: float) -> PermitReply | None:
        """The governor's reply; None where there is none, or none that counts. Raises BrokerClosed."""
        subject = self._subjects.get(verb)
        if subject is None:
            subject = self._subjects[verb] = self._names.governor(verb)
        asked_at = self._clock.monotonic()
        try:
            reply = _decode(await self._broker.request(subject, _encode(request), timeout_s))
        except BrokerClosed:
            raise
        except (BrokerError, msgspec.MsgspecError):
            if self.silent_since is None or asked_at - self._failed_at > GAP_S:
                self.silent_since = asked_at
            self._failed_at = self._clock.monotonic()
            return None
        if reply.epoch < self.epoch:
            if isinstance(reply, Granted):
                self.tell(Return(permits=tuple(lease.permit for lease in reply.leases)))
            return None
        self.silent_since = None
        self._follow(reply.epoch)
        return reply

    def tell(self, request: PermitRequest) -> None:
        """Say what needs no answer; it may be lost."""
        self._broker.tell(self._names.governor(TOLD), _encode(request))

    def heard(self, _subject: str, body: bytes) -> None:
        """Take what the governor tells everybody."""
        try:
            said = _decode_said(body)
        except msgspec.MsgspecError:
            return
        if said.began:
            self.epoch = said.epoch  # be it lower: a server that was set up anew counts from one again
            self._on_epoch()
            self._on_began()
        else:
            self._follow(said.epoch)
            if said.closed and said.epoch >= self.epoch:
                self._on_closed(said.closed)

    def _follow(self, epoch: int) -> None:
        if epoch > self.epoch:
            known, self.epoch = self.epoch, epoch
            if known:
                self._on_epoch()
