"""Queue classes through the releaser: 8 to 3 to 1 while all wait, an absent one's share to the others, none starved."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.support.releasing import ReleaseHouse, release_house, releasing


async def _classes(house: ReleaseHouse, each: int) -> Counter[str]:
    """What was released at first, by class."""
    async with releasing(house):
        return Counter(item.card.priority for item in await house.released(each))


async def _hold(house: ReleaseHouse, **counts: int) -> None:
    for priority, count in counts.items():
        more: dict[str, Any] = {"priority": priority}
        await house.hold(count, **more)


async def test_classes_share_by_their_weights_and_the_lowest_is_never_starved() -> None:
    """Twelve at a time, while every class has more than its share."""
    async with release_house() as house:
        await _hold(house, high=60, normal=60, low=60)
        await house.worker(6)
        assert await _classes(house, 12) == {"high": 8, "normal": 3, "low": 1}


async def test_the_share_of_a_class_that_has_nothing_goes_to_the_others_by_their_weights() -> None:
    """Three to one where nobody asks for `high`."""
    async with release_house() as house:
        await _hold(house, normal=40, low=40)
        await house.worker(6)
        assert await _classes(house, 12) == {"normal": 9, "low": 3}
