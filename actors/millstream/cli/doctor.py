"""What `millstream doctor` looks at: can everything be reached, is there room, does anything stand still?

It reads; it stores nothing and changes nothing. Every finding says what to do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Final

import msgspec

from millstream import settings as configuration
from millstream.cli.api import Tracker
from millstream.cli.checks import Check
from millstream.cli.doctor_limits import Seen, examine_limits
from millstream.cli.output import inert, size, span
from millstream.configuration import overlaid
from millstream.errors import MillstreamError, NoAnswer, SettingsError
from millstream.ports import Broker, StreamInfo
from millstream.settings import Settings
from millstream_schemas.codec import encode
from millstream_schemas.commands import WorkerInfo
from millstream_schemas.envelope import MAX_ENVELOPE_BYTES
from millstream_schemas.permits import Limits, LimitsListing, PermitReply
from millstream_schemas.topology import WORKER_ENTRY_TTL_S, topology

CARD_BYTES: Final = 64 * 1024
"""What an event or a dead letter may hold beside the envelope: its state card, texts and headers."""
STEP_S: Final = 15.0
GOVERNOR_S: Final = 2.0
SKEW_S: Final = 2.0
UNTAKEN_S: Final = 10.0
FULL, TIGHT = 0.9, 0.6
"""Parts of the store: from the second on, the dispatcher takes no new tasks."""


Step = Callable[[], Awaitable[Sequence[Check]]]


async def examine(settings: Settings) -> list[Check]:
    """All checks over NATS; where the server cannot be used, that one alone."""
    from millstream.connecting import open_broker

    try:
        broker = await open_broker(settings, "doctor")
    except MillstreamError as error:
        todo = "start one with `millstream up`, or give its address: --nats-url or MILLSTREAM_NATS_URL"
        return [Check("server", "fail", inert(error, 500), todo)]
    try:
        return await _Examination(broker, settings).run()
    finally:
        await broker.close()


class _Examination:
    """The checks of one run; later ones use what earlier ones have found."""

    def __init__(self, broker: Broker, settings: Settings) -> None:
        self._broker = broker
        self._settings = settings
        self._names = settings.names
        self._streams: dict[str, StreamInfo] = {}
        self._workers: list[WorkerInfo] = []
        self._store_bytes = 0

    async def run(self) -> list[Check]:
        steps: Mapping[str, Step] = {
            "server": self._server,
            "topology": self._topology,
            "room": self._room,
            "dispatcher": self._dispatcher,
            "workers": self._live_workers,
            "governor": self._governor,
            "clocks": self._clocks,
        }
        found: list[Check] = []
        for name, step in steps.items():
            if name == "room" and not self._streams:
                break  # there is nothing to look at
            try:
                async with asyncio.timeout(STEP_S):
                    found += await step()
            except (MillstreamError, TimeoutError) as error:
                said = inert(error, 500) or f"no answer within {STEP_S:g} s"
                found.append(Check(name, "fail", said, "look at the server's log; JetStream must be on"))
        return found

    async def _server(self) -> list[Check]:
        info = await self._broker.server_info()
        self._store_bytes = info.store_bytes
        checks = [Check("server", "ok", f"nats-server {inert(info.version, 40)} at {inert(info.url, 200)}")]
        needed = max(MAX_ENVELOPE_BYTES, self._settings.worker.max_result_bytes) + CARD_BYTES
        payload = f"max_payload is {size(info.max_payload_bytes)}, {size(needed)} are needed"
        fits = info.max_payload_bytes >= needed
        todo = "" if fits else f"set `max_payload: {needed}` or more in the server's configuration"
        return [*checks, Check("payload", "ok" if fits else "fail", payload, todo)]

    async def _topology(self) -> list[Check]:
        declared = topology(self._names, self._settings.lifetimes)
        missing: list[str] = []
        for stream in declared.streams:
            info = await self._broker.stream_info(stream.name)
            if info is None:
                missing.append(stream.name)
            else:
                self._streams[stream.name] = info
                there = {consumer.name for consumer in await self._broker.consumers(stream.name)}
                wanted = [consumer.durable for consumer in declared.consumers if consumer.stream == stream.name]
                missing += [f"{stream.name}/{name}" for name in wanted if name not in there]
        if missing:
            todo = "start a dispatcher: it declares them (or is the prefix another one?)"
            return [Check("topology", "fail", f"missing: {', '.join(missing)}", todo)]
        counts = f"{len(declared.streams)} streams, {len(declared.consumers)} consumers"
        return [Check("topology", "ok", f"{counts} under prefix {self._names.prefix}")]

    async def _room(self) -> list[Check]:
        if not self._store_bytes:
            return [Check("room", "warn", "the size of the store cannot be found out", "watch it on the server")]
        info = await self._broker.server_info()
        limits = sum(stream.max_bytes for stream in self._streams.values() if stream.max_bytes > 0)
        share = info.store_used_bytes / self._store_bytes
        detail = f"{size(info.store_used_bytes)} of {size(self._store_bytes)} used, streams reserve {size(limits)}"
        checks: list[Check] = []
        if limits > self._store_bytes:
            checks.append(Check("room", "fail", detail, "raise `max_file_store`: it is less than the streams may fill"))
        elif share >= TIGHT:
            todo = "raise `max_file_store`, or shorten `history_s`; from 60 % on no new tasks are admitted"
            checks.append(Check("room", "fail" if share >= FULL else "warn", detail, todo))
        else:
            checks.append(Check("room", "ok", detail))
        inbox = self._streams.get(self._names.inbox_stream)
        if inbox is not None and inbox.max_bytes > 0 and inbox.bytes > TIGHT * inbox.max_bytes:
            full = f"{size(inbox.bytes)} of {size(inbox.max_bytes)} of the inbox are taken"
            checks.append(Check("inbox", "warn", full, "start more dispatchers, or submit less"))
        return checks

    async def _dispatcher(self) -> list[Check]:
        inbox = self._streams.get(self._names.inbox_stream)
        if inbox is None:
            return []
        waits = max(time.time() - inbox.first_at, 0.0) if inbox.messages else 0.0
        if waits > UNTAKEN_S:
            detail = f"{inbox.messages} tasks lie in the inbox, the oldest for {span(waits)}"
            return [Check("dispatcher", "fail", detail, "start one: `millstream dispatcher`")]
        return [Check("dispatcher", "ok", f"nothing waits long in the inbox ({inbox.messages} tasks)")]

    async def _live_workers(self) -> list[Check]:
        entries = await self._broker.kv_all(self._names.workers_bucket)
        for entry in entries.values():
            try:
                self._workers.append(msgspec.json.decode(entry, type=WorkerInfo))
            except (msgspec.MsgspecError, ValueError, RecursionError):
                continue
        if not self._workers:
            return [Check("workers", "warn", "no live worker", "start one: `millstream worker module:app`")]
        queues = sorted({queue for worker in self._workers for queue in worker.queues})
        slots = sum(worker.slots for worker in self._workers)
        detail = f"{len(self._workers)} live, {slots} slots, queues {inert(', '.join(queues), 300)}"
        unreadable = len(entries) - len(self._workers)
        if unreadable:
            return [Check("workers", "warn", f"{detail}; {unreadable} entries of another version", "update Millstream")]
        return [Check("workers", "ok", detail)]

    async def _governor(self) -> list[Check]:
        names = self._names
        revision, settings, found = 0, self._settings, list[Check]()
        stored = await self._broker.kv_get(names.config_bucket, names.config_key)
        if stored is not None:
            revision = stored.revision
            try:
                settings = overlaid(settings, stored.value)
            except SettingsError as error:
                todo = "store a good one: `millstream config apply FILE`"
                found.append(Check("settings", "fail", f"the stored configuration is wrong: {inert(error, 500)}", todo))
        leader = await self._broker.kv_get(names.leaders_bucket, names.governor_lock)
        held = await self._broker.subjects(names.held_stream, names.held_filter)
        seen = Seen(
            settings=settings,
            workers=self._workers,
            listing=await self._listing(),
            revision=revision,
            leader="" if leader is None else leader.value.decode(errors="replace").rpartition(" ")[0],
            waiting_queues=frozenset(names.parse_held(subject).queue for subject in held),
        )
        return [*found, *examine_limits(seen)]

    async def _listing(self) -> LimitsListing | None:
        try:
            body = await self._broker.request(self._names.governor("limits"), encode(Limits()), GOVERNOR_S)
            reply = msgspec.json.decode(body, type=PermitReply)
        except (NoAnswer, msgspec.MsgspecError):
            return None
        return reply if isinstance(reply, LimitsListing) else None

    async def _clocks(self) -> list[Check]:
        """Only what proves skew counts: a time stamp that lies ahead, or a heartbeat older than the registry keeps."""
        now, found = time.time(), list[Check]()
        ahead = 0.0
        if self._names.events_stream in self._streams:
            newest = await self._broker.last(self._names.events_stream, self._names.event_filter)
            ahead = newest.at - now if newest is not None else 0.0
        if ahead > SKEW_S:
            found.append(_skewed(f"the server's clock is {span(ahead)} ahead of this machine's"))
        for worker in self._workers:
            away = worker.seen_at - now
            if away > SKEW_S or -away > WORKER_ENTRY_TTL_S + SKEW_S:
                words = "ahead of" if away > 0 else "behind"
                who = f"{inert(worker.worker_id, 64)} on {inert(worker.host, 64)}"
                found.append(_skewed(f"the clock of {who} is {span(abs(away))} {words} this machine's"))
        return found or [Check("clocks", "ok", "no sign of skew to the server or the workers")]


def _skewed(detail: str) -> Check:
    return Check(
        "clocks", "warn", detail, "keep the clocks in step (NTP): due times and deadlines are wall-clock times"
    )


def examine_tracker(tracker: Tracker) -> list[Check]:
    """Does the tracker answer, how far is it behind, and how far is its clock away?"""
    try:
        ready = tracker.get("/readyz")
        date = tracker.headers("/healthz").get("date", "")
    except MillstreamError as error:
        return [Check("tracker", "fail", inert(error, 500), "start one: `millstream tracker`")]
    checks = [Check("tracker", "ok", f"it answers at {tracker.url}, {ready.get('lag_events', 0)} events behind")]
    try:
        away = parsedate_to_datetime(date).timestamp() - time.time()
    except (ValueError, TypeError):
        return checks
    if abs(away) > SKEW_S:
        words = "ahead of" if away > 0 else "behind"
        checks.append(_skewed(f"the tracker's clock is {span(abs(away))} {words} this machine's"))
    return checks


def examine_settings(settings: Settings) -> list[Check]:
    """What is allowed but probably not meant."""
    found = list(configuration.warnings(settings))
    todo = "change millstream.toml, then `millstream check`"
    return [Check("settings", "warn", text, todo) for text in found] or [Check("settings", "ok", "nothing to remark")]
