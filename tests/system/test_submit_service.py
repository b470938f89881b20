"""The submit service and everything else under a prefix of one's own, as a plain NATS client sees them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.support.fleet import Fleet

if TYPE_CHECKING:
    from nats.aio.client import Client as NatsClient

PREFIX = "other"


async def _ask(client: NatsClient, body: dict[str, Any]) -> dict[str, Any]:
    """One validated submit by request and reply."""
    reply = await client.request(f"{PREFIX}.request.submit", json.dumps(body).encode(), timeout=10)
    answer: dict[str, Any] = json.loads(reply.data)
    return answer


async def test_other_prefix_serves_submits_of_both_kinds_and_makes_no_default_stream(
    make_fleet: Callable[..., Fleet],
) -> None:
    """A request is accepted or rejected with the path of its fault, a publish is taken; no stream of the default exists."""
    fleet = make_fleet(prefix=PREFIX)
    fleet.all_at_once()
    async with fleet.plain() as client:
        task = {"task_id": "asked", "task_type": "echo", "tenant_id": "acme", "queue": "agent-run", "payload": {"a": 1}}
        accepted = await _ask(client, task)
        assert accepted["kind"] == "accepted", accepted
        assert (accepted["task_id"], accepted["tenant_id"], accepted["queue"]) == ("asked", "acme", "agent-run")
        found = await fleet.wait_for("asked", "completed", "failed", tenant="acme")
        assert (found["state"], found["result"]) == ("completed", {"a": 1})
        assert (await fleet.get(accepted["status_url"])).json()["key"] == accepted["key"]

        rejected = await _ask(client, {"task_id": "bad", "task_type": "echo", "budget": {"max_attempts": "many"}})
        assert (rejected["kind"], rejected["path"]) == ("rejected", "$.budget.max_attempts")
        assert rejected["message"]

        body = {"task_id": "published", "task_type": "echo", "payload": 2}
        ack = await client.jetstream().publish(f"{PREFIX}.submit.acme.agent-run", json.dumps(body).encode())
        assert ack.seq == accepted["inbox_seq"] + 1, "the rejected submit was stored"
        found = await fleet.wait_for("published", "completed", "failed", tenant="acme")
        assert (found["state"], found["result"]) == ("completed", 2)

        streams = [info.config.name or "" for info in await client.jetstream().streams_info()]
    assert fleet.names.inbox_stream in streams
    assert not [name for name in streams if "mill" in name.lower()]
