"""`POST /v1/tasks`: check as the dispatcher will, store in the inbox, answer with where to look."""

import re
from dataclasses import dataclass
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from millstream.http import params, views
from millstream.http.context import MAX_PREFER_WAIT_S, Context, body_of
from millstream.http.problems import Fault, Problem, bad_parameter, invalid_envelope, json_response
from millstream.policy.admit import Admission, Submit, admit
from millstream.policy.trace import parse_traceparent
from millstream.ports import Outgoing, Published, Stored
from millstream.tracker.model import TaskRow
from millstream.tracker.projection import apply
from millstream_schemas.codec import InvalidEnvelope, decode_envelope
from millstream_schemas.envelope import MAX_ENVELOPE_BYTES, Envelope, Key
from millstream_schemas.lifecycle import TERMINAL
from millstream_schemas.names import DEFAULT_QUEUE, DEFAULT_TENANT, TRACEPARENT, TRACESTATE, is_token

STREAM_FULL: Final = frozenset({10047, 10077, 10122})
"""What the server answers when the inbox holds no more: no storage, maximum messages or bytes, discard new."""

_WAIT: Final = re.compile(r"(?:^|[,;\s])wait\s*=\s*\"?(\d{1,9})\"?(?=$|[,;\s])", re.IGNORECASE)
_PRINTABLE: Final = re.compile(r"[\x20-\x7e]{1,512}\Z")


@dataclass(frozen=True, slots=True)
class _Checked:
    """A submit that fits the contract: what to publish where, and what it becomes."""

    admission: Admission
    tenant: str
    queue: str
    body: bytes
    headers: dict[str, str]


class Submits:
    """Takes tasks over HTTP; the acknowledgement of the inbox is the acceptance."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def post(self, request: Request) -> Response | Problem:
        wrong = params.known_only(request, frozenset({"tenant", "queue"}))
        if wrong is not None:
            return wrong
        body = await body_of(request, MAX_ENVELOPE_BYTES)
        if isinstance(body, Problem):
            return body
        try:
            checked = self._check(request, body)
        except InvalidEnvelope as error:
            return invalid_envelope(error, malformed=not _is_json(body))
        if isinstance(checked, Problem):
            return checked
        known = await self._known(checked)
        if isinstance(known, Problem):
            return known
        context = self._context
        subject = context.names.submit(checked.tenant, checked.queue)
        published = await context.broker.publish(Outgoing(subject, checked.body, headers=checked.headers))
        if not isinstance(published, Stored):
            return _refusal(published)
        return await self._answer(request, checked, known, published.seq)

    def _check(self, request: Request, body: bytes) -> _Checked | Problem:
        envelope, _ = decode_envelope(body)
        members = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        tenant = _address(request, "tenant", envelope.tenant_id, DEFAULT_TENANT)
        queue = _address(request, "queue", envelope.queue, DEFAULT_QUEUE)
        if isinstance(tenant, Problem):
            return tenant
        if isinstance(queue, Problem):
            return queue
        added = self._added(request, envelope)
        if isinstance(added, Problem):
            return added
        if added:
            members |= {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in added.items()}
            body = msgspec.json.encode(members)
            envelope, _ = decode_envelope(body)
        headers = _trace_headers(request)
        context = self._context
        submit = Submit(
            envelope=envelope,
            tenant=tenant,
            queue=queue,
            stream=context.names.inbox_stream,
            seq=0,
            accepted_at=context.clock.now(),
            headers_traceparent=headers.get(TRACEPARENT),
            headers_tracestate=headers.get(TRACESTATE),
        )
        kinds = context.settings.metered(queue, envelope.task_type, tenant)
        admission = admit(submit, context.settings.queue(queue).defaults, context.settings.max_wait_s, kinds)
        return _Checked(admission, tenant, queue, body, headers)

    def _added(self, request: Request, envelope: Envelope) -> dict[str, str] | Problem:
        """What the envelope lacks: the header's idempotency key, and an id by which the answer can name the task."""
        added: dict[str, str] = {}
        given = request.headers.get("idempotency-key")
        if given is not None:
            key = _idempotency_key(given)
            if key is None or envelope.idempotency_key not in (None, key):
                expected = "1 to 512 printable characters, the same as `idempotency_key` in the body"
                fault = Fault(f"Expected {expected}", "#/idempotency_key")
                return Problem(422, "invalid_envelope", f"Expected {expected} - at header `Idempotency-Key`", (fault,))
            if envelope.idempotency_key is None:
                added["idempotency_key"] = key
        if envelope.task_id is None and envelope.unique is None and envelope.idempotency_key is None and not added:
            added["task_id"] = self._context.new_id()
        return added

    async def _known(self, checked: _Checked) -> TaskRow | Problem | None:
        """The task that has this key already, as far as the read model knows; a Problem where it is another one."""
        card, reader = checked.admission.card, self._context.reader
        known = await reader.find(card.key, checked.tenant)
        of_id = await reader.find(card.task_id, checked.tenant) if checked.admission.envelope.task_id else None
        held = known is not None and not _is_free_again(checked, known)
        other = known is not None and held and known.payload_hash != card.payload_hash
        if other or (of_id is not None and of_id.key != card.key):
            names = "id" if not other else "idempotency key" if checked.admission.envelope.idempotency_key else "id"
            return Problem(409, "conflict", f"The {names} belongs to a task with another payload; it is untouched")
        return known

    async def _answer(self, request: Request, checked: _Checked, known: TaskRow | None, seq: int) -> Response:
        context = self._context
        held = known if known is not None and not _is_free_again(checked, known) else None
        generation = known.generation + 1 if known is not None and held is None else 1
        row = held if held is not None else self._expected(checked, seq, generation)
        headers = {"Cache-Control": "no-store"}
        wait_s = _prefer_wait(request)
        if wait_s is not None:
            headers["Preference-Applied"] = f"wait={wait_s}"
            row = await context.outcome(checked.admission.key, checked.tenant, wait_s, generation) or row
        if held is not None:
            headers["Idempotent-Replayed"] = "true"
        headers["Location"] = views.task_url(row)
        result = await context.reader.result(row)
        lines = await context.reader.timeline(row) if row.n else []
        return json_response(views.task(row, lines, result), 202, headers)

    def _expected(self, checked: _Checked, seq: int, generation: int) -> TaskRow:
        """The task as its first event will make it; the dispatcher writes that event, from the same rules."""
        now = self._context.clock.now()
        row = apply(None, checked.admission.event, 0, now, self._context.names.inbox_stream).row
        return msgspec.structs.replace(row, inbox_seq=seq, n=0, generation=generation)


def _is_free_again(checked: _Checked, known: TaskRow) -> bool:
    """Whether the key holds no more, for the task is over: then the submit opens its next generation."""
    return checked.admission.unique_in_flight and known.state in TERMINAL


def _is_json(body: bytes) -> bool:
    try:
        msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False
    return True


def _address(request: Request, name: str, given: str | None, default: str) -> str | Problem:
    asked = request.query_params.get(name)
    if asked is not None and not is_token(asked):
        return bad_parameter(name, "a name that matches [A-Za-z0-9_-]{1,64}")
    if asked is not None and given is not None and asked != given:
        return bad_parameter(name, "the same name as in the body")
    return given or asked or default


def _idempotency_key(header: str) -> str | None:
    """The key of the header, which may be a quoted structured field or bare text; None where it is no key."""
    text = header.strip()
    if len(text) >= 2 and text[0] == text[-1] == '"':
        text = re.sub(r'\\(["\\])', r"\1", text[1:-1])
    if not _PRINTABLE.match(text):
        return None
    try:
        return msgspec.convert(text, Key)
    except msgspec.ValidationError:
        return None


def _trace_headers(request: Request) -> dict[str, str]:
    """The caller's W3C headers where they are valid; a bad one starts a new trace."""
    values = request.headers.getlist(TRACEPARENT)
    if len(values) != 1 or parse_traceparent(values[0]) is None:
        return {}
    headers = {TRACEPARENT: values[0].strip()}
    state = ",".join(request.headers.getlist(TRACESTATE))
    if _PRINTABLE.match(state):
        headers[TRACESTATE] = state
    return headers


def _prefer_wait(request: Request) -> int | None:
    """Seconds of `Prefer: wait=N`, capped; other preferences are ignored."""
    found = _WAIT.search(",".join(request.headers.getlist("prefer")))
    return None if found is None else min(int(found[1]), MAX_PREFER_WAIT_S)


def _refusal(published: Published) -> Problem:
    code = getattr(published, "code", 0)
    if code in STREAM_FULL:
        return Problem(503, "store_full", "The inbox is full; nothing was stored", retry_after_s=5)
    detail = "The broker did not confirm; the task may be stored: repeat with the same idempotency key or task id"
    return Problem(503, "broker_unavailable", detail, retry_after_s=2)
