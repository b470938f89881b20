"""Requests over one inbox of our own: single answers, answers in many parts, and the JetStream API."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from millstream.errors import BrokerClosed, BrokerError, NoAnswer
from millstream.jetstream.frames import core_frame
from millstream.jetstream.protocol import API, NO_RESPONDERS, NOT_AVAILABLE, ApiError, status_of
from millstream.jetstream.wire import Wire

API_TIMEOUT_S = 5.0
_TRY_S = 2.5
_BACKOFF_S = (0.05, 0.1, 0.2, 0.4)


@dataclass(frozen=True, slots=True)
class Answer:
    """One message that came back. `header` is the raw block, None without one."""

    header: bytes | None
    body: bytes


@dataclass(slots=True)
class _Waiting:
    answers: list[Answer]
    last: Callable[[Answer], bool]
    done: asyncio.Future[None]


class _Errors(msgspec.Struct, frozen=True):
    error: ApiError | None = None


_decode_errors = msgspec.json.Decoder(_Errors).decode


class Requests:
    """Asks and waits. Nothing is left behind by a request that timed out or was cancelled."""

    def __init__(self, wire: Wire, inbox_prefix: str) -> None:
        self._wire = wire
        self._loop = asyncio.get_running_loop()
        self._inbox = f"{inbox_prefix}.{secrets.token_hex(8)}."
        self._token_at = len(self._inbox)
        self._count = 0
        self._single: dict[bytes, asyncio.Future[Answer]] = {}
        self._waiting: dict[bytes, _Waiting] = {}
        self._closed = False
        wire.subscribe(f"{self._inbox}*", self._heard)

    async def ask(self, subject: str, body: bytes, timeout_s: float) -> Answer | None:
        """The first answer, None where nobody listens. Raises NoAnswer after `timeout_s`, and BrokerClosed."""
        frame, token = self._framed(subject, body)
        give_up_at = self._loop.time() + timeout_s
        if not self._wire.connected:
            await self._connected_or_late(subject, timeout_s)
        answered = self._single[token] = self._loop.create_future()
        timer = self._loop.call_at(give_up_at, _give_up, answered, subject, timeout_s)
        try:
            self._wire.send(frame)
            answer = await answered
        finally:
            timer.cancel()
            del self._single[token]
        return None if answer.header is not None and _is_nobody(answer) else answer

    async def _connected_or_late(self, subject: str, timeout_s: float) -> None:
        """Wait for the connection; raises NoAnswer after `timeout_s`, and BrokerClosed."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._wire.wait_connected()
        except TimeoutError:
            raise NoAnswer(f"no answer on {subject} within {timeout_s:g} s") from None
        if self._closed:
            raise BrokerClosed("the connection to the NATS server is closed")

    def _framed(self, subject: str, body: bytes) -> tuple[bytes, bytes]:
        """The request as bytes, and the token of its answers. Raises BrokerClosed, MessageTooLarge, InvalidName."""
        if self._closed:
            raise BrokerClosed("the connection to the NATS server is closed")
        self._count += 1
        token = str(self._count)
        limit = int(self._wire.info.get("max_payload", 1024 * 1024))
        return core_frame(subject, self._inbox + token, body, limit), token.encode()

    async def ask_many(
        self, subject: str, body: bytes, timeout_s: float, last: Callable[[Answer], bool]
    ) -> list[Answer]:
        """All answers up to the one that `last` says is the last. Raises NoAnswer after `timeout_s`."""
        frame, token = self._framed(subject, body)
        waiting = self._waiting[token] = _Waiting([], last, self._loop.create_future())
        try:
            async with asyncio.timeout(timeout_s):
                await self._wire.wait_connected()
                self._wire.send(frame)
                await waiting.done
        except TimeoutError:
            raise NoAnswer(f"no answer on {subject} within {timeout_s:g} s") from None
        finally:
            del self._waiting[token]
        return waiting.answers

    def _heard(self, subject: bytes, _reply: bytes, header: bytes | None, body: bytes) -> None:
        token = subject[self._token_at :]
        single = self._single.get(token)
        if single is not None:
            if not single.done():
                single.set_result(Answer(header, body))
            return
        waiting = self._waiting.get(token)
        if waiting is None or waiting.done.done():
            return
        answer = Answer(header, body)
        waiting.answers.append(answer)
        if waiting.last(answer):
            waiting.done.set_result(None)

    async def api(self, verb: str, payload: Any = None) -> bytes | ApiError:
        """What JetStream answers, asked again while it has no leader. Raises NoAnswer, BrokerClosed.

        What was asked may have been done although no answer came: callers ask only what may be asked twice.
        """
        body = b"" if payload is None else msgspec.json.encode(payload)
        ends = self._loop.time() + API_TIMEOUT_S
        failures = 0
        while (left := ends - self._loop.time()) > 0:
            pause = _BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)]
            failures += 1
            try:
                answer = await self.ask(API + verb, body, min(left, _TRY_S))
            except NoAnswer:
                continue
            if answer is not None:
                error = _decode_errors(answer.body).error
                if error is None:
                    return answer.body
                if error.err_code not in NOT_AVAILABLE:
                    return error
            await asyncio.sleep(min(pause, max(0.0, left)))
        raise NoAnswer(f"JetStream did not answer {verb} within {API_TIMEOUT_S:g} s")

    async def command(self, verb: str, payload: Any = None) -> bytes:
        """As `api`, where no refusal is expected: raises BrokerError for one."""
        answer = await self.api(verb, payload)
        if isinstance(answer, ApiError):
            raise BrokerError(f"{verb}: {answer.description} ({answer.err_code or answer.code})")
        return answer

    def close(self) -> None:
        """Fail all that waits with BrokerClosed."""
        self._closed = True
        closed = BrokerClosed("the connection to the NATS server is closed")
        for single in self._single.values():
            if not single.done():
                single.set_exception(closed)
        for waiting in self._waiting.values():
            if not waiting.done.done():
                waiting.done.set_exception(closed)


def _give_up(answered: asyncio.Future[Answer], subject: str, timeout_s: float) -> None:
    if not answered.done():
        answered.set_exception(NoAnswer(f"no answer on {subject} within {timeout_s:g} s"))


def _is_nobody(answer: Answer) -> bool:
    return status_of(answer.header) == NO_RESPONDERS and not answer.body
