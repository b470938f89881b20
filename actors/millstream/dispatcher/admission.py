"""From INBOX to WORK or HELD: admits submits in batches; event first, then publish, then ack."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

import msgspec

from millstream.dispatcher.context import Context, Standing
from millstream.errors import BrokerError
from millstream.journal import Last
from millstream.policy import admit as policy
from millstream.policy.admit import Admission, Submit
from millstream.policy.holding import onward
from millstream.policy.trace import resolve_trace
from millstream.ports import Delivery, Refused, Stored
from millstream_schemas.codec import InvalidEnvelope, UnknownMessage, decode_envelope
from millstream_schemas.events import Alias, Card, Cause, DeadLetter, Expired, Failed, Failure
from millstream_schemas.infos import Conflict, Duplicate, UnknownFields
from millstream_schemas.keys import derive_key
from millstream_schemas.names import TRACEPARENT, TRACESTATE, Names, SubmitAddress

RAW_CAP_BYTES = 4096
UNHEEDED = ("ordering_key", "callback")
"""Fields that are carried but not acted upon by this version."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """A submit on its way: what it becomes, and the delivery to ack in the end."""

    delivery: Delivery
    admission: Admission
    unknown: Sequence[str]


@dataclass(frozen=True, slots=True)
class Rejected:
    """A submit that does not fit the contract, with the dead letter that keeps it."""

    delivery: Delivery
    event: Failed
    letter: DeadLetter


@dataclass(frozen=True)
class Admitter:
    """Admits batches of submits. Stateless: all that it decides, with lane and limits, is written into the event."""

    context: Context

    async def handle(self, deliveries: Sequence[Delivery]) -> None:
        """Admit a batch and ack it; what could not be finished is left for redelivery."""
        planned = [self._plan(delivery) for delivery in deliveries]
        rejected = [one for one in planned if isinstance(one, Rejected)]
        admitted = await self._alias([one for one in planned if isinstance(one, Admitted)])
        standing = await self._append(admitted)
        done = await self.context.publish_onward(standing, "submit.unanswered")
        if rejected:
            done += await self._dead_letter(rejected)
        self.context.broker.ack(done)

    def _plan(self, delivery: Delivery) -> Admitted | Rejected:
        address = self.context.names.parse_submit(delivery.subject)
        try:
            _check_address(self.context.names, address, delivery.subject)
            envelope, unknown = decode_envelope(delivery.body)
            headers = _by_lower_name(delivery.headers)
            submit = Submit(
                envelope=envelope,
                tenant=address.tenant,
                queue=address.queue,
                stream=delivery.stream,
                seq=delivery.seq,
                accepted_at=delivery.at,
                headers_traceparent=headers.get(TRACEPARENT),
                headers_tracestate=headers.get(TRACESTATE),
            )
            settings = self.context.settings
            metered = self.context.metered(address.queue, envelope.task_type, address.tenant)
            admission = policy.admit(submit, settings.queue(address.queue).defaults, settings.max_wait_s, metered)
        except InvalidEnvelope as fault:
            return self._reject(delivery, fault)
        return Admitted(delivery, admission, unknown)

    # --- the batch, stage by stage ---------------------------------------------------------------

    async def _alias(self, admitted: list[Admitted]) -> list[Admitted]:
        """Reserve the task ids of submits that also carry another key; a taken id is a conflict."""
        aliased = [one for one in admitted if one.admission.alias_key is not None]
        if not aliased:
            return admitted
        journal = self.context.journal
        answers = await self.context.broker.publish_all([journal.entry(_alias(one), 0) for one in aliased])
        dropped: set[int] = set()
        for one, answer in zip(aliased, answers, strict=True):
            if not isinstance(answer, Stored) and not await self._alias_is_ours(one):
                dropped.add(one.delivery.seq)
        return [one for one in admitted if one.delivery.seq not in dropped]

    async def _alias_is_ours(self, one: Admitted) -> bool:
        card = one.admission.card
        last = await self._last(card.tenant_id, one.admission.alias_key or "")
        if last is None or last.event is None:  # not answered: leave it for redelivery
            return False
        if policy.alias_blocks(last.event, one.admission):
            detail = f"task id {card.task_id} belongs to another task"
            owner = last.event.points_to if isinstance(last.event, Alias) else last.event.card.key
            self._tell_again(one, key=owner, conflict=True, detail=detail)
            self.context.broker.ack([one.delivery])
            return False
        return True

    async def _append(self, admitted: Sequence[Admitted]) -> list[Standing]:
        """Append the first event of every task; a refused one means that the task is there already."""
        journal = self.context.journal
        answers = await self.context.broker.publish_all([journal.entry(one.admission.event, 0) for one in admitted])
        standing: list[Standing] = []
        for one, answer in zip(admitted, answers, strict=True):
            if isinstance(answer, Stored):
                standing.append(_standing(one, one.admission.event, answer.seq))
                self._tell_unknown(one)
            else:
                found = await self._stand(one)
                if found is not None:
                    standing.append(found)
        return standing

    async def _stand(self, one: Admitted) -> Standing | None:
        """Find out what to do for a submit whose first append was not stored; None leaves it for redelivery.

        Either the task is there already (an earlier delivery of this submit, or another submit of the same key), or the
        append is tried again.
        """
        admission = one.admission
        while True:
            last = await self._last(admission.card.tenant_id, admission.key)
            if last is None:
                return None
            match policy.standing(admission, last.event, last.seq, last.at):
                case policy.GoOn(fence, event):
                    return _standing(one, event, fence)
                case policy.Done():
                    return Standing(one.delivery, None)
                case policy.Again(conflict):
                    self._tell_again(one, key=admission.key, conflict=conflict)
                    return Standing(one.delivery, None)
                case policy.NewGeneration(expect_seq, generation):
                    first, expected = policy.in_generation(admission, generation), expect_seq
                case policy.AppendFirst():
                    first, expected = admission.event, 0
                case unknown:
                    assert_never(unknown)
            answer = await self.context.journal.append(first, expected)
            if isinstance(answer, Stored):
                return _standing(one, first, answer.seq)
            if isinstance(answer, Refused):
                self.context.telemetry.emit("broker.trouble", answer=answer.description)
                return None

    async def _dead_letter(self, rejected: Sequence[Rejected]) -> list[Delivery]:
        """Keep what does not fit the contract: its event, then its dead letter."""
        journal, broker = self.context.journal, self.context.broker
        await broker.publish_all([journal.entry(one.event, 0) for one in rejected])
        answers = await broker.publish_all([journal.dead_letter(one.letter) for one in rejected])
        done: list[Delivery] = []
        for one, answer in zip(rejected, answers, strict=True):
            failure = one.letter.failure
            self.context.telemetry.emit(
                "submit.invalid", seq=one.delivery.seq, path=failure.path, message=failure.message
            )
            if isinstance(answer, Stored) or await self._is_kept(one):
                done.append(one.delivery)
        return done

    async def quarantine(self, delivery: Delivery, fault: InvalidEnvelope) -> bool:
        """Dead-letter a submit that could not be admitted; True once its dead letter is stored."""
        return bool(await self._dead_letter([self._reject(delivery, fault)]))

    async def _is_kept(self, one: Rejected) -> bool:
        card = one.letter.card
        subject = self.context.names.dlq(card.tenant_id, card.queue, card.key, card.generation)
        return await self.context.broker.last(self.context.names.dlq_stream, subject) is not None

    # --- small parts -----------------------------------------------------------------------------

    async def _last(self, tenant: str, key: str) -> Last | None:
        """The last event, or None where it cannot be read now: the submit then waits for its redelivery."""
        try:
            return await self.context.journal.last(tenant, key)
        except (BrokerError, UnknownMessage) as error:
            self.context.telemetry.emit("submit.unanswered", key=key, error=str(error))
            return None

    def _tell_again(self, one: Admitted, *, key: str, conflict: bool, detail: str = "") -> None:
        seq, card = one.delivery.seq, one.admission.card
        info = Conflict(key=key, inbox_seq=seq, detail=detail) if conflict else Duplicate(key=key, inbox_seq=seq)
        self.context.journal.inform(info, card.tenant_id, card.queue)

    def _tell_unknown(self, one: Admitted) -> None:
        """Record what the submit asked for in vain: unknown fields, clamped values, what this version cannot do."""
        card, envelope = one.admission.card, one.admission.envelope
        unheeded = [name for name in UNHEEDED if getattr(envelope, name) is not None]
        if one.unknown or unheeded or one.admission.clamped:
            names = [name[:128] for name in (*unheeded, *one.unknown)][:64]
            info = UnknownFields(key=card.key, names=names, clamped=list(one.admission.clamped))
            self.context.journal.inform(info, card.tenant_id, card.queue)

    def _reject(self, delivery: Delivery, fault: InvalidEnvelope) -> Rejected:
        address = self.context.names.parse_submit(delivery.subject)
        key = derive_key("inbox", address.tenant, f"{delivery.stream}:{delivery.seq}:{delivery.at:.6f}")
        cause = Cause(stream=delivery.stream, seq=delivery.seq)
        card = Card(
            key=key,
            tenant_id=address.tenant,
            task_id=key,
            queue=address.queue,
            task_type="",
            payload_hash="",
            origin=cause,
            cause=cause,
            trace_id=resolve_trace(None, _by_lower_name(delivery.headers).get(TRACEPARENT), None, key).trace_id,
        )
        where = "" if fault.byte_offset is None else f" (byte {fault.byte_offset})"
        failure = Failure(
            reason="fatal",
            error_type=fault.code,
            message=f"{fault.message} - at `{fault.path}`{where}",
            fingerprint=f"{fault.code}:{fault.path}",
            path=fault.path,
        )
        event = Failed(card=card, reason="invalid_envelope", failure=failure)
        letter = DeadLetter(
            card=card,
            reason="invalid_envelope",
            failure=failure,
            failed_at=delivery.at,
            raw_base64=base64.b64encode(delivery.body[:RAW_CAP_BYTES]).decode(),
            raw_bytes=len(delivery.body),
        )
        return Rejected(delivery, event, letter)


def _check_address(names: Names, address: SubmitAddress, subject: str) -> None:
    """Raise InvalidEnvelope where the subject's tenant or queue is no token: the server stores wildcards as they stand."""
    if names.submit(address.tenant, address.queue) == subject:
        return
    field = "queue" if f".{address.tenant}." in subject else "tenant_id"
    raise InvalidEnvelope(f"Expected [A-Za-z0-9_-]{{1,64}} as `{field}` in the subject", f"$.{field}")


def _by_lower_name(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers by lower-case name; a doubled `traceparent` joins into one that is not valid, so that it counts as none."""
    found: dict[str, str] = {}
    for name, value in headers.items():
        key = name.lower()
        found[key] = f"{found[key]},{value}" if key in found else value
    return found


def _alias(one: Admitted) -> Alias:
    card = msgspec.structs.replace(one.admission.card, key=one.admission.alias_key or "")
    return Alias(card=card, points_to=one.admission.key)


def _standing(one: Admitted, event: policy.FirstEvent, fence: int) -> Standing:
    if isinstance(event, Expired):
        return Standing(one.delivery, None)
    admission = one.admission
    return Standing(one.delivery, onward(event, fence, admission.accepted_at, envelope=admission.envelope))
