"""Requests to whoever leads as governor: no answer is no permit, and what an earlier leader says late does not count."""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from millstream.errors import BrokerClosed, BrokerError
from millstream.ports import Broker, Clock
from millstream_schemas.names import Names
from millstream_schemas.permits import TOLD, Granted, PermitReply, PermitRequest, Renew, Return, Said

LOWER_FOR_S = 3.0
"""After so long of replies of one lower epoch, and of none that counts, whoever gives them leads."""
LOOK_EVERY_S = 1.0
"""How often at most a word of a later epoch has the governor asked whether it is true."""
GAP_S = 10.0
"""After so long without a request, that the last one was not answered says nothing of now."""

_decode = msgspec.json.Decoder(PermitReply).decode
_decode_said = msgspec.json.Decoder(Said).decode
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
_encode = msgspec.json.Encoder().encode


class GovernorLink:
    """Asks and tells. Who leads is learned from replies alone: what is told to everybody, anybody could have said.

    `on_epoch` is called when another governor leads, or may lead: the renewal that follows finds out. `on_began` is
    called when one says that it begins now, `on_closed` with the keys of which it says that nothing may begin there now.
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
        self._began: tuple[int, float] | None = None
        self._lower: tuple[int, float, float] | None = None
        """A lower epoch that replies carry, since when they do, and when the last of them was asked for."""
        self._looked_at = float("-inf")
        self.epoch = 0
        self.silent_since: float | None = None
        """Since when, in monotonic seconds, nothing was answered; None while the last request was."""

    async def ask(self, verb: str, request: PermitRequest, timeout_s: float) -> PermitReply | None:
        """The governor's reply; None where there is none, or none that counts.

        Raises BrokerClosed, and ValueError for a request that cannot be written as JSON.
        """
        subject = self._subjects.get(verb)
        if subject is None:
            subject = self._subjects[verb] = self._names.governor(verb)
        body = _encode(request)
        asked_at = self._clock.monotonic()
        try:
            reply = _decode(await self._broker.request(subject, body, timeout_s))
        except BrokerClosed:
            raise
        except (BrokerError, *_UNREADABLE):
            if self.silent_since is None or asked_at - self._failed_at > GAP_S:
                self.silent_since = asked_at
            self._failed_at = self._clock.monotonic()
            return None
        if reply.epoch < self.epoch and not self._leads_now(reply.epoch, isinstance(request, Renew), asked_at):
            if isinstance(reply, Granted):
                self.tell(Return(permits=tuple(lease.permit for lease in reply.leases)))
            return None
        self.silent_since = None
        self._lower = None
        if isinstance(request, Renew) and self._began is not None and asked_at >= self._began[1]:
            self._began = None  # its renewal is answered: who leads is decided
        if reply.epoch != self.epoch:
            known, self.epoch = self.epoch, reply.epoch
            if known:
                self._on_epoch()
        return reply

    def _leads_now(self, epoch: int, renewed: bool, asked_at: float) -> bool:
        """Whether a reply of a lower epoch comes from a leader: a server that was set up anew counts from one again."""
        if renewed and self._began is not None and epoch == self._began[0] and asked_at >= self._began[1]:
            return True
        now = self._clock.monotonic()
        known = self._lower
        if known is None or known[0] != epoch or asked_at - known[2] > GAP_S:
            self._lower = (epoch, now, now)
            self._on_epoch()  # renew until somebody answers whose word counts, or this one has lasted
            return False
        self._lower = (epoch, known[1], now)
        return now - known[1] >= LOWER_FOR_S

    def tell(self, request: PermitRequest) -> None:
        """Say what needs no answer; it may be lost."""
        self._broker.tell(self._names.governor(TOLD), _encode(request))

    def heard(self, _subject: str, body: bytes) -> None:
        """Take what the governor tells everybody."""
        try:
            said = _decode_said(body)
        except _UNREADABLE:
            return
        now = self._clock.monotonic()
        if said.began:
            self._began = (said.epoch, now)
            self._on_epoch()
            self._on_began()
            return
        if said.epoch > self.epoch and now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = now
            self._on_epoch()
        if said.closed and said.epoch >= self.epoch:
            self._on_closed(said.closed)
