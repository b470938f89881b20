"""The configuration document: laid over the settings of a process while it runs, as a whole or not at all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import cast

import pytest

from millstream.clock import SystemClock
from millstream.configuration import Configuration, overlaid
from millstream.errors import BrokerError, SettingsError
from millstream.memory import MemoryServer
from millstream.ports import Broker, KeyValue
from millstream.settings import Settings, build
from millstream.telemetry.events import Recorder
from millstream_schemas.topology import BucketSpec, Topology
from tests.support.waiting import wait_until

OWN = build(
    {
        "lease_s": "7s",
        "limits": {
            "llm": {"requests": "600/min", "concurrency": 4, "adaptive": {"min": 0.1}},
            "tenant/{tenant_id}": {"cost": "5 USD/day"},
        },
        "queues": {"agent-run": {"max_attempts": 5, "limits": ["llm"]}},
        "tenants": {"acme": {"weight": 3}},
        "prices": {"m-1": {"tokens_in": 2.5}},
    }
)


def document(**sections: object) -> bytes:
    """A configuration document."""
    return json.dumps(sections).encode()


def test_a_document_is_laid_over_field_by_field() -> None:
    """What it does not name stays: other fields, other entries, other sections."""
    found = overlaid(
        OWN,
        document(
            limits={"llm": {"requests": "300/min", "adaptive": {"decrease": 0.5}}, "tool": {"concurrency": 1}},
            tenants={"default": {"weight": 2}},
            task_types={"t": {"limits": ["tool"]}},
        ),
    )
    llm = found.limits["llm"]
    assert (llm.requests, llm.concurrency) == ("300/min", 4)
    assert not isinstance(llm.adaptive, bool)
    assert (llm.adaptive.min, llm.adaptive.decrease) == (0.1, 0.5)
    assert found.limits["tool"].concurrency == 1
    assert found.limits["tenant/{tenant_id}"] == OWN.limits["tenant/{tenant_id}"]
    assert {name: one.weight for name, one in found.tenants.items()} == {"acme": 3.0, "default": 2.0}
    assert found.task_types["t"].limits == ("tool",)
    assert (found.queues, found.prices, found.lease_s) == (OWN.queues, OWN.prices, 7.0)


def test_an_empty_document_changes_nothing() -> None:
    """So does one with empty sections."""
    assert overlaid(OWN, b"{}") == OWN
    assert overlaid(OWN, document(limits={}, queues={}, task_types={}, tenants={}, prices={})) == OWN


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b"", "truncated"),
        (b"\xff\xfe", "malformed"),
        (b"[]", "array"),
        (b"[" * 5000, ""),
        (document(nats={"url": "nats://elsewhere"}), "nats"),
        (document(limits=[]), "$"),
        (document(limits={"llm": 3}), "$"),
        (document(limits={"llm": {"request": "1/min"}}), "request"),
        (document(limits={"llm": {"requests": "many"}}), "limits.llm.requests"),
        (document(limits={"llm": {"requests_per_minute": 5}}), "limits.llm.requests_per_minute"),
        (document(limits={"x/{payload}": {"requests": "1/s"}}), "payload"),
        (document(queues={"a b": {}}), "queues.a b"),
        (document(tenants={"acme": {"weight": -1}}), "weight"),
        (document(prices={"m": {"tokens_in": "cheap"}}), "tokens_in"),
    ],
)
def test_a_document_with_a_fault_is_refused_as_a_whole(body: bytes, where: str) -> None:
    """The error names the place."""
    with pytest.raises(SettingsError) as raised:
        overlaid(OWN, body)
    assert where in str(raised.value)


@dataclass
class Site:
    """A configuration that is watched."""

    broker: Broker
    telemetry: Recorder
    configuration: Configuration
    taken: list[Settings] = field(default_factory=list[Settings])

    async def write(self, body: bytes) -> int:
        """Store a document; returns its revision."""
        return await self.broker.kv_put(OWN.names.config_bucket, OWN.names.config_key, body)

    async def until(self, revision: int) -> None:
        """Wait until a document is in effect."""
        await wait_until(lambda: self.configuration.revision == revision, f"revision {revision} to be in effect")


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    """A broker with the bucket, and a configuration that looks."""
    broker = MemoryServer(SystemClock()).connect()
    buckets = (BucketSpec(name=OWN.names.config_bucket, ttl_s=0.0),)
    await broker.declare(Topology(revision=1, streams=(), consumers=(), buckets=buckets))
    telemetry = Recorder("test")
    made = Site(broker, telemetry, Configuration(broker, OWN, telemetry))
    made.configuration.on_change = made.taken.append
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(made.configuration.run(stop))
        yield made
        stop.set()


async def test_a_new_document_takes_effect_while_it_is_watched(site: Site) -> None:
    """Each revision once; the process's own settings until there is one, and again when it is removed."""
    assert site.configuration.settings is OWN
    revision = await site.write(document(limits={"llm": {"concurrency": 9}}))
    await site.until(revision)
    assert site.configuration.settings.limits["llm"].concurrency == 9
    later = await site.write(document(limits={"llm": {"concurrency": 8}}))
    await site.until(later)
    assert site.configuration.settings.limits["llm"].concurrency == 8
    await site.broker.kv_delete(OWN.names.config_bucket, OWN.names.config_key)
    await site.until(0)
    assert site.configuration.settings == OWN
    assert [settings.limits["llm"].concurrency for settings in site.taken] == [9, 8, 4]
    assert site.telemetry.counts["config.changed"] == 3


async def test_a_faulty_document_changes_nothing_and_shows(site: Site) -> None:
    """What was in effect stays in effect, with the reason beside it, until a right one comes."""
    revision = await site.write(document(limits={"llm": {"concurrency": 9}}))
    await site.until(revision)
    faulty = await site.write(document(limits={"llm": {"concurrency": 0}, "tool": {"concurrency": 1}}))
    await wait_until(lambda: site.configuration.fault, "the fault to show")
    assert str(faulty) in site.configuration.fault
    assert site.configuration.revision == revision
    assert "tool" not in site.configuration.settings.limits
    assert (len(site.taken), site.telemetry.counts["config.refused"]) == (1, 1)
    await site.until(await site.write(document(tenants={})))
    assert site.configuration.fault == ""


async def test_an_outage_changes_nothing() -> None:
    """The last settings stay, and the caller is told that nothing was read."""

    class Silent:
        async def kv_get(self, bucket: str, key: str) -> KeyValue | None:
            raise BrokerError("no leader")

    configuration = Configuration(cast("Broker", Silent()), OWN, Recorder("test"))
    assert not await configuration.look()
    assert configuration.settings is OWN
    assert configuration.fault == ""
