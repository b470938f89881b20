"""The contract as JSON Schema (draft 2020-12), for producers and consumers in other languages.

`python -m millstream_schemas.export [FOLDER]` writes one self-contained document for each kind of message, by default
into the folder of the checkout that it is started from.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin

import msgspec

from millstream_schemas import commands, envelope, events, infos, permits
from millstream_schemas.codec import VERSION

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Document:
    """One file: its type, and what its reader must know that the type cannot say."""

    name: str
    title: str
    type: Any
    description: str


DOCUMENTS: Final = (
    Document(
        "envelope",
        "Task envelope",
        envelope.Envelope,
        f"What a producer publishes to submit a task. UTF-8 JSON, at most {envelope.MAX_ENVELOPE_BYTES} bytes and "
        f"{envelope.MAX_NESTING} levels of nesting. Unknown fields are recorded and skipped.",
    ),
    Document("event", "Life-cycle event", events.Event, "Moves a task. Each holds the whole state of its task."),
    Document("info", "Info", infos.Info, "Told about a task; moves nothing."),
    Document("work-item", "Work item", events.WorkItem, "What a worker pulls: the envelope and the state of its task."),
    Document("dead-letter", "Dead letter", events.DeadLetter, "A failed task with everything needed to run it again."),
    Document("command", "Command", commands.Command, "What operators ask of the dispatcher."),
    Document("submit-reply", "Reply to a submit", commands.SubmitReply, "The answer to a validated submit."),
    Document("worker-info", "Worker entry", commands.WorkerInfo, "A live worker, as the registry shows it."),
    Document("permit-request", "Permit request", permits.PermitRequest, "What workers ask of the rate-governor."),
    Document("permit-reply", "Permit reply", permits.PermitReply, "What the rate-governor answers."),
    Document("governor-said", "Governor's word", permits.Said, "What the rate-governor tells everybody, unasked."),
)

ENVELOPE_FIELDS: Final = {
    "v": "Version of the envelope.",
    "task_type": "Which handler runs it, e.g. `agent.run`.",
    "task_id": "The producer's id, unique per tenant; without it, the derived key.",
    "idempotency_key": "Same tenant and same key: same task, for the history window; with another payload: conflict.",
    "tenant_id": "Filled from the subject; if given, it must agree.",
    "queue": "Filled from the subject; if given, it must agree.",
    "run_id": "Groups the tasks of one run.",
    "session_id": "Groups the tasks of one session.",
    "parent_id": "The task that made this one.",
    "step": "Which step of its run this is.",
    "title": "For people.",
    "tags": "For people; tasks are found by them.",
    "payload": "Input of the handler, any JSON; or use `payload_ref`.",
    "payload_ref": "Where the input lies, a URI such as `object://…`; or use `payload`.",
    "context": "What the agent knew, any JSON; kept whole over retries and replays. Or use `context_ref`.",
    "context_ref": "Where the context lies, a URI; or use `context`.",
    "priority": "Which class of its queue.",
    "not_before": "Earliest start; or use `delay_seconds`.",
    "delay_seconds": "Earliest start, counted from when the server stored the submit; or use `not_before`.",
    "deadline_at": "Never start after this instant.",
    "budget": "What the task may use over all its attempts; unset fields take the queue's defaults.",
    "retry_policy": "How long to wait between attempts, and which error classes are worth one.",
    "attempt": "Accepted and ignored: the system counts.",
    "usage_estimate": "What one attempt is likely to use; reserved at the rate-governor.",
    "limits": "Further limit keys to ask a permit on.",
    "ordering_key": "Tasks with one key run one at a time, in order of acceptance.",
    "unique": "How long the key holds. Without `idempotency_key`, the key is the hash of type, payload and context.",
    "approval": "Held until a person approves.",
    "pins": "Versions that the task was made for, such as model and data set.",
    "mode": "`replay` and `dry_run` tell handlers to have no effect outside.",
    "callback": "A webhook on the outcome.",
    "trace_context": "W3C trace context, as text or as two ids; the headers of the message serve as well.",
}
_ONE_OF: Final = (("payload", "payload_ref"), ("context", "context_ref"), ("not_before", "delay_seconds"))


def documents() -> dict[str, bytes]:
    """File name → JSON Schema; the same contract always gives the same bytes."""
    return {f"{document.name}.json": _document(document) for document in DOCUMENTS}


def write(folder: Path) -> list[Path]:
    """Write all documents into `folder`, remove other JSON files there, and return the paths written."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = documents()
    for stray in sorted(folder.glob("*.json")):
        if stray.name not in wanted:
            stray.unlink()
    for name, content in wanted.items():
        (folder / name).write_bytes(content)
    return [folder / name for name in wanted]


def _document(document: Document) -> bytes:
    schema: Schema = msgspec.json.schema(_Describable().of(document.type))
    _walk(schema, _portable_pattern)
    if "Envelope" in schema["$defs"]:
        _explain_envelope(schema["$defs"]["Envelope"])
    schema["$schema"] = DIALECT
    schema["$id"] = f"urn:millstream:schema:v{VERSION}:{document.name}"
    schema["title"] = document.title
    schema["description"] = document.description
    return msgspec.json.format(msgspec.json.encode(schema, order="sorted"), indent=2) + b"\n"


def _explain_envelope(schema: Schema) -> None:
    fields: Schema = schema["properties"]
    for name, field in fields.items():
        field["description"] = ENVELOPE_FIELDS[name]
    # A raw member counts as given even as null; any other null means the same as its absence.
    schema["allOf"] = [
        {
            "not": {
                "required": list(pair),
                "properties": {name: {"not": {"type": "null"}} for name in pair if "anyOf" in fields[name]},
            }
        }
        for pair in _ONE_OF
    ]


def _portable_pattern(schema: Schema) -> None:
    # Python's `$` lets a final line break pass, so the contract says \Z; in JSON Schema `$` is the end and \Z unknown.
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        schema["pattern"] = re.sub(r"\\Z\Z", "$", pattern)


def _walk(node: object, visit: Callable[[Schema], None]) -> None:
    if isinstance(node, dict):
        visit(node)
        for value in node.values():
            _walk(value, visit)
    elif isinstance(node, list):
        for value in node:
            _walk(value, visit)


class _Describable:
    """Rebuilds types with `Any` in place of raw JSON, whose default msgspec cannot put into a schema."""

    def __init__(self) -> None:
        self._structs: dict[type, Any] = {}

    def of(self, kind: Any) -> Any:
        """The type that `kind` has in a schema."""
        if kind is msgspec.Raw:
            return Any
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            if kind not in self._structs:
                self._structs[kind] = self._struct(kind)
            return self._structs[kind]
        origin, arguments = get_origin(kind), get_args(kind)
        if origin is Annotated:
            return Annotated[(self.of(arguments[0]), *arguments[1:])]
        if origin in (Union, UnionType):
            return reduce(or_, (self.of(argument) for argument in arguments))
        if origin in (list, dict, tuple):
            generic: Any = origin
            return generic[tuple(self.of(argument) for argument in arguments)]
        return kind

    def _struct(self, kind: type[msgspec.Struct]) -> Any:
        fields: list[Any] = []
        for field in msgspec.structs.fields(kind):
            described = self.of(field.type)
            if field.type is msgspec.Raw and not field.required:
                fields.append((field.name, described | msgspec.UnsetType, msgspec.UNSET))
            elif field.required:
                fields.append((field.name, described))
            elif field.default_factory is not msgspec.NODEFAULT:
                fields.append((field.name, described, field.default_factory()))
            else:
                fields.append((field.name, described, field.default))
        config = kind.__struct_config__
        return msgspec.defstruct(
            kind.__name__,
            fields,
            namespace={"__doc__": kind.__doc__},
            kw_only=True,
            frozen=True,
            tag_field=config.tag_field,
            tag=config.tag,
        )


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("schemas", "json-schema")
    for path in write(target):
        sys.stdout.write(f"{path}\n")
