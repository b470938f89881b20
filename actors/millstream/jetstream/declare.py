"""Declares the topology: creates what is missing, changes what may be changed, refuses clearly what may not."""

from __future__ import annotations

from typing import Any

import msgspec

from millstream.errors import BrokerError, TopologyConflict
from millstream.jetstream.capacity import Capacity
from millstream.jetstream.protocol import (
    KV_STREAM,
    KV_SUBJECT,
    NO_STORAGE_LEFT,
    STREAM_EXISTS,
    STREAM_NOT_FOUND,
    SUBJECTS_OVERLAP,
    ApiError,
    nanos,
)
from millstream.jetstream.requests import Requests
from millstream_schemas.topology import BucketSpec, ConsumerSpec, StreamSpec, Topology

REVISION = "millstream_revision"
_LONGEST_KV_DEDUPE_S = 120.0
_SERVER_DEFAULTS: dict[str, Any] = {
    "deny_delete": False,
    "deny_purge": False,
    "allow_rollup_hdrs": False,
    "allow_direct": False,
    "allow_msg_ttl": False,
    "allow_msg_schedules": False,
    "allow_atomic": False,
    "allow_batched": False,
    "allow_msg_counter": False,
    "max_age": 0,
}

Config = dict[str, Any]


class Declarer:
    """Every step may be repeated, by any number of actors at once."""

    def __init__(self, requests: Requests, capacity: Capacity) -> None:
        self._requests = requests
        self._capacity = capacity

    async def declare(self, topology: Topology) -> None:
        """Create or adapt all of it. A newer revision found on the server is left as it is. Raises TopologyConflict."""
        # Those with a share come last: how much there is to share is asked with the subjects of the others (capacity.py).
        for stream in sorted(topology.streams, key=lambda spec: spec.store_share > 0):
            await self._stream(stream_config(stream), topology.revision, stream.store_share)
        for bucket in topology.buckets:
            await self._stream(bucket_config(bucket), topology.revision, 0.0)
        for consumer in topology.consumers:
            await self.consumer(consumer)

    async def consumer(self, spec: ConsumerSpec) -> None:
        """Create or adapt one consumer. Raises TopologyConflict."""
        request = {"stream_name": spec.stream, "config": consumer_config(spec)}
        answer = await self._requests.api(f"CONSUMER.CREATE.{spec.stream}.{spec.durable}", request)
        if isinstance(answer, ApiError):
            if answer.err_code == STREAM_NOT_FOUND:
                raise BrokerError(f"{spec.durable}: there is no stream {spec.stream}; declare the topology first")
            found = f"other settings ({answer.description})"
            raise TopologyConflict(spec.durable, found, f"filters {', '.join(spec.filters)}")

    async def _stream(self, wanted: Config, revision: int, store_share: float) -> None:
        name = wanted["name"]
        wanted["metadata"] = {REVISION: str(revision)}
        found = await self._found(name)
        if found is None:
            wanted["max_bytes"] = await self._max_bytes(store_share)
            answer = await self._requests.api(f"STREAM.CREATE.{name}", wanted)
            if not isinstance(answer, ApiError):
                return
            if answer.err_code == SUBJECTS_OVERLAP:
                raise TopologyConflict(name, f"a conflict: {answer.description}", _summary(wanted))
            found = await self._found(name) if answer.err_code == STREAM_EXISTS else None
            if found is None:
                raise BrokerError(_not_created(name, answer))
        check_changeable(found, wanted)
        metadata = dict(found.get("metadata") or {})
        if _revision(metadata) > revision:
            return
        if store_share:
            wanted["max_bytes"] = await self._max_bytes(store_share)
        wanted["metadata"] = {**metadata, **wanted["metadata"]}
        if all(found.get(key, _SERVER_DEFAULTS.get(key)) == value for key, value in wanted.items()):
            return
        answer = await self._requests.api(f"STREAM.UPDATE.{name}", {**found, **wanted})
        if isinstance(answer, ApiError):
            raise TopologyConflict(name, f"other settings ({answer.description})", _summary(wanted))

    async def _found(self, name: str) -> Config | None:
        answer = await self._requests.api(f"STREAM.INFO.{name}")
        if not isinstance(answer, ApiError):
            config: Config = msgspec.json.decode(answer)["config"]
            return config
        if answer.err_code == STREAM_NOT_FOUND:
            return None
        raise BrokerError(f"stream {name}: {answer.description} ({answer.err_code})")

    async def _max_bytes(self, share: float) -> int:
        if not share:
            return -1
        store = await self._capacity.store_bytes()
        return int(store * share) if store else -1


def check_changeable(found: Config, wanted: Config) -> None:
    """Raise TopologyConflict for what no server can turn into what is wanted."""
    name = found["name"]
    for key in ("retention", "storage"):  # between limits and interest it could be changed; nobody needs that
        if found.get(key) != wanted[key]:
            raise TopologyConflict(name, f"{key} {found.get(key)}", f"{key} {wanted[key]}")
    for key in ("deny_delete", "deny_purge", "allow_msg_schedules", "allow_msg_ttl", "allow_msg_counter"):
        if found.get(key, False) and not wanted[key]:
            raise TopologyConflict(name, f"{key} on", f"{key} off")
    if found.get("sealed"):
        raise TopologyConflict(name, "sealed on", "a stream that can be written")
    if found.get("mirror"):
        raise TopologyConflict(name, f"mirror of {found['mirror'].get('name')}", "a stream of its own")


def stream_config(spec: StreamSpec) -> Config:
    """The JetStream settings of one stream; all that the server would choose by itself is said."""
    return {
        "name": spec.name,
        "subjects": list(spec.subjects),
        "retention": spec.retention,
        "storage": "file",
        "discard": spec.discard,
        "max_bytes": -1,
        "max_age": nanos(spec.max_age_s),
        "max_msgs": spec.max_msgs,
        "max_msgs_per_subject": spec.max_msgs_per_subject,
        "max_msg_size": spec.max_msg_size_bytes,
        "max_consumers": spec.max_consumers,
        "duplicate_window": nanos(spec.duplicate_window_s),
        "allow_msg_ttl": spec.allow_msg_ttl,
        "allow_msg_schedules": spec.allow_msg_schedules,
        "allow_rollup_hdrs": spec.allow_msg_schedules,  # the server forces it on with schedules; off everywhere else
        "allow_atomic": False,
        "allow_batched": False,
        "allow_msg_counter": spec.allow_msg_counter,
        "deny_delete": spec.deny_delete,
        "deny_purge": spec.deny_purge,
        "allow_direct": spec.allow_direct,
    }


def bucket_config(spec: BucketSpec) -> Config:
    """The stream under a bucket: roll-ups off, since one such header could empty it; no markers, a lock would trip."""
    return {
        "name": KV_STREAM + spec.name,
        "subjects": [f"{KV_SUBJECT}{spec.name}.>"],
        "retention": "limits",
        "storage": "file",
        "discard": "new",
        "max_bytes": -1,
        "max_age": nanos(spec.ttl_s),
        "max_msgs": -1,
        "max_msgs_per_subject": spec.history,
        "max_msg_size": -1,
        "max_consumers": -1,
        "duplicate_window": nanos(min(_LONGEST_KV_DEDUPE_S, spec.ttl_s) if spec.ttl_s else _LONGEST_KV_DEDUPE_S),
        "allow_msg_ttl": False,
        "allow_msg_schedules": False,
        "allow_rollup_hdrs": False,
        "allow_atomic": False,
        "allow_batched": False,
        "allow_msg_counter": False,
        "deny_delete": True,
        "deny_purge": False,
        "allow_direct": True,
    }


def consumer_config(spec: ConsumerSpec) -> Config:
    """The JetStream settings of one durable pull consumer."""
    filters: Config = (
        {"filter_subject": spec.filters[0]} if len(spec.filters) == 1 else {"filter_subjects": list(spec.filters)}
    )
    return {
        "name": spec.durable,
        "durable_name": spec.durable,
        "deliver_policy": "all",
        "replay_policy": "instant",
        "ack_policy": "explicit",
        "ack_wait": nanos(spec.ack_wait_s),
        "max_deliver": spec.max_deliver,
        "max_ack_pending": spec.max_ack_pending,
        "max_waiting": spec.max_waiting,
        **filters,
    }


def _revision(metadata: dict[str, str]) -> int:
    text = metadata.get(REVISION, "0")
    return int(text) if text.isdigit() else 0


def _not_created(name: str, error: ApiError) -> str:
    hint = "; give the server more `max_file_store`" if error.err_code == NO_STORAGE_LEFT else ""
    return f"stream {name} cannot be created: {error.description} ({error.err_code or error.code}){hint}"


def _summary(wanted: Config) -> str:
    on = [key for key in ("allow_msg_schedules", "allow_msg_ttl", "deny_delete", "deny_purge") if wanted[key]]
    return f"{wanted['retention']} retention on {', '.join(wanted['subjects'])}" + (f" with {', '.join(on)}" * bool(on))
