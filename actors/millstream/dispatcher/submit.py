"""The submit service: validates a task before it is stored, and answers with its id."""

from dataclasses import dataclass
from urllib.parse import quote

import msgspec

from millstream.dispatcher.context import Context
from millstream.errors import BrokerError, MessageTooLarge
from millstream.policy import admit as policy
from millstream.policy.admit import Submit
from millstream.ports import Outgoing, Stored
from millstream_schemas.codec import InvalidEnvelope, decode_envelope, encode
from millstream_schemas.commands import SubmitAccepted, SubmitRejected, SubmitReply
from millstream_schemas.envelope import MAX_ENVELOPE_BYTES, Envelope
from millstream_schemas.names import DEFAULT_QUEUE, DEFAULT_TENANT


@dataclass(frozen=True)
class SubmitService:
    """Answers `mill.request.submit`. Whatever is asked, it answers; a fault of ours is no fault of the asker's."""

    context: Context

    async def answer(self, body: bytes) -> bytes:
        """The reply to one validated submit."""
        return encode(await self._submit(body))

    async def _submit(self, body: bytes) -> SubmitReply:
        try:
            envelope, _ = decode_envelope(body)
            tenant = envelope.tenant_id or DEFAULT_TENANT
            queue = envelope.queue or DEFAULT_QUEUE
            settings = self.context.settings
            probe = Submit(envelope, tenant, queue, "", 0, self.context.clock.now())
            policy.admit(probe, settings.queue(queue).defaults, settings.max_wait_s)
        except InvalidEnvelope as fault:
            return SubmitRejected(
                code=fault.code, message=fault.message, path=fault.path, byte_offset=fault.byte_offset
            )
        if envelope.task_id is None and envelope.idempotency_key is None and envelope.unique is None:
            envelope = msgspec.structs.replace(envelope, task_id=self.context.ids.new())
        return await self._store(envelope, tenant, queue)

    async def _store(self, envelope: Envelope, tenant: str, queue: str) -> SubmitReply:
        body = encode(envelope)
        if len(body) > MAX_ENVELOPE_BYTES:  # by the id that it was given here
            message = f"the envelope has {len(body)} bytes, the limit is {MAX_ENVELOPE_BYTES}"
            return SubmitRejected(code="payload_too_large", message=message)
        outgoing = Outgoing(subject=self.context.names.submit(tenant, queue), body=body)
        try:
            answer = await self.context.broker.publish(outgoing)
        except MessageTooLarge as error:
            return SubmitRejected(code="payload_too_large", message=str(error))
        except BrokerError as error:
            return SubmitRejected(code="not_stored", message=str(error))
        if not isinstance(answer, Stored):
            return SubmitRejected(code="not_stored", message=f"the broker did not store it: {answer}")
        key = policy.task_key(envelope, tenant, "", 0, 0.0)
        task_id = envelope.task_id or key
        return SubmitAccepted(
            task_id=task_id,
            key=key,
            tenant_id=tenant,
            queue=queue,
            inbox_seq=answer.seq,
            status_url=f"/v1/tasks/{quote(task_id, safe='')}?tenant={tenant}",
        )
