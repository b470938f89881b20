"""Key-value buckets: compare-and-set and values that expire."""

from __future__ import annotations

import asyncio

from millstream.ports import KeyValue
from tests.broker.setups import BUCKET_TTL_S, Setup


async def test_a_value_is_kept_and_replaced(setup: Setup) -> None:
    """The revision grows with every write."""
    broker, bucket = setup.broker, setup.bucket
    assert await broker.kv_get(bucket, "a") is None
    first = await broker.kv_put(bucket, "a", b"1")
    second = await broker.kv_put(bucket, "a", b"2")
    assert second > first
    assert await broker.kv_get(bucket, "a") == KeyValue(b"2", second)


async def test_all_values_at_once(setup: Setup) -> None:
    """Of those keys that have one."""
    broker, bucket = setup.broker, setup.bucket
    assert await broker.kv_all(bucket) == {}
    for key in ("w-1", "w-2", "w.3"):
        await broker.kv_put(bucket, key, key.encode())
    await broker.kv_delete(bucket, "w-2")
    assert await broker.kv_all(bucket) == {"w-1": b"w-1", "w.3": b"w.3"}


async def test_one_of_many_creates_wins(setup: Setup) -> None:
    """Over several connections at once."""
    other = await setup.connect()
    brokers = [(setup.broker, other)[i % 2] for i in range(10)]
    results = await asyncio.gather(*(each.kv_create(setup.bucket, "lock", b"%d" % i) for i, each in enumerate(brokers)))
    winners = [(i, revision) for i, revision in enumerate(results) if revision is not None]
    assert len(winners) == 1
    index, revision = winners[0]
    assert await setup.broker.kv_get(setup.bucket, "lock") == KeyValue(b"%d" % index, revision)


async def test_an_update_needs_the_last_revision(setup: Setup) -> None:
    """A stale one changes nothing."""
    broker, bucket = setup.broker, setup.bucket
    first = await broker.kv_create(bucket, "a", b"1")
    assert first is not None
    second = await broker.kv_update(bucket, "a", b"2", first)
    assert second is not None
    assert await broker.kv_update(bucket, "a", b"3", first) is None
    assert await broker.kv_get(bucket, "a") == KeyValue(b"2", second)


async def test_after_a_delete_the_key_is_free(setup: Setup) -> None:
    """For a create, and not for an update of what was there; deleting nothing is fine."""
    broker, bucket = setup.broker, setup.bucket
    await broker.kv_delete(bucket, "a")
    first = await broker.kv_create(bucket, "a", b"1")
    assert first is not None
    await broker.kv_delete(bucket, "a")
    assert await broker.kv_get(bucket, "a") is None
    assert await broker.kv_update(bucket, "a", b"2", first) is None
    assert await broker.kv_create(bucket, "a", b"3") is not None


async def test_a_value_expires_unless_it_is_written_again(setup: Setup) -> None:
    """As a lease that its holder renews, and then does not."""
    broker, bucket = setup.broker, setup.bucket
    revision = await broker.kv_create(bucket, "lock", b"me")
    assert revision is not None
    for _ in range(6):
        await setup.elapse(BUCKET_TTL_S / 4)
        revision = await broker.kv_update(bucket, "lock", b"me", revision)
        assert revision is not None, "the lease was lost while it was renewed"
    assert await broker.kv_create(bucket, "lock", b"other") is None
    renewed = setup.now()

    async def taken_over() -> bool:
        return await broker.kv_create(bucket, "lock", b"other") is not None

    await setup.until(taken_over, "the lease to end")
    assert setup.now() - renewed >= 0.9 * BUCKET_TTL_S
    assert await broker.kv_update(bucket, "lock", b"me", revision) is None
    assert await broker.kv_all(bucket) == {"lock": b"other"}
