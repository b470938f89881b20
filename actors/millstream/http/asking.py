"""What the tracker asks of others to answer a request: the governor's limits, and the registry of live workers."""

import math
from typing import Final

import msgspec

from millstream.errors import NoAnswer
from millstream.http.context import Context
from millstream_schemas.codec import encode
from millstream_schemas.commands import WorkerInfo
from millstream_schemas.permits import Gate, Gates, GatesListing, Limits, LimitsListing, Operate, PermitReply, Pool

GOVERNOR_WAIT_S: Final = 2.0
GLANCE_S: Final = 1.0
"""How long an explanation or `/metrics` waits for the governor; after that they go on without it."""

_reply: Final = msgspec.json.Decoder(PermitReply)


async def governor(
    context: Context, request: Limits | Gates | Operate, wait_s: float = GOVERNOR_WAIT_S
) -> PermitReply | None:
    """The governor's reply; None where none answers, or the reply is of a version that is not known here."""
    verb = str(request.__struct_config__.tag)
    try:
        return _reply.decode(await context.broker.request(context.names.governor(verb), encode(request), wait_s))
    except (NoAnswer, TimeoutError, msgspec.MsgspecError):
        return None


async def limits(context: Context, key: str | None = None, wait_s: float = GOVERNOR_WAIT_S) -> LimitsListing | None:
    """All limits, or those of one key; None where no governor answers."""
    reply = await governor(context, Limits(key=key), wait_s)
    return reply if isinstance(reply, LimitsListing) else None


async def gate(context: Context, keys: tuple[str, ...], tokens_in: int = 0, tokens_out: int = 0) -> Gate | None:
    """The gate of one pool, with the key that limits it most; None where no governor answers.

    An open gate does not name that key, so each key is asked for by itself as well, in the same request.
    """
    pools = tuple(
        Pool(keys=some, tokens_in=tokens_in, tokens_out=tokens_out) for some in (keys, *((key,) for key in keys))
    )
    reply = await governor(context, Gates(pools=pools), GLANCE_S)
    if not isinstance(reply, GatesListing) or len(reply.items) != len(pools):
        return None
    whole, *each = reply.items
    if whole.limiting_key or not whole.open:
        return whole
    slowest = min(each, key=_openness)
    limited = slowest.rate_per_s is not None or slowest.places is not None
    return msgspec.structs.replace(whole, limiting_key=slowest.keys[0]) if limited else whole


def _openness(gate: Gate) -> tuple[float, float]:
    """How much a gate lets through, to compare gates by: rate first, then places."""
    return (math.inf if gate.rate_per_s is None else gate.rate_per_s, math.inf if gate.places is None else gate.places)


async def workers(context: Context) -> list[WorkerInfo]:
    """The live workers, by id."""
    return decoded_workers(await context.broker.kv_all(context.names.workers_bucket))


def decoded_workers(entries: dict[str, bytes]) -> list[WorkerInfo]:
    """The registry's entries, without those that this version cannot read."""
    found: list[WorkerInfo] = []
    for value in entries.values():
        try:
            found.append(msgspec.json.decode(value, type=WorkerInfo))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            continue
    return sorted(found, key=lambda worker: worker.worker_id)
