"""Tests of downloads that take turns, so that no link is idle."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from dilocox.node.exchange.downloader import FETCHES_AT_ONCE, places_behind
from dilocox.transport.limits.priority_semaphore import PrioritySemaphore
from tests.helpers import until


def test_the_smallest_goes_first_and_who_gives_up_holds_nobody_up():
    async def scenario() -> list[int]:
        slots, done = PrioritySemaphore(1), list[int]()
        first = asyncio.Event()

        async def take(order: int) -> None:
            async with slots.one(order):
                done.append(order)
                if order == 0:
                    await first.wait()

        tasks = [asyncio.create_task(take(0))]
        await until(lambda: done == [0])
        tasks += [asyncio.create_task(take(order)) for order in (5, 3, 4, 3)]
        await asyncio.sleep(0)
        tasks[2].cancel()  # it waits
        first.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with slots.one(0):  # free again
            return done

    assert asyncio.run(scenario()) == [0, 3, 4, 5]


def test_who_is_cancelled_as_its_turn_comes_passes_it_on():
    async def scenario() -> None:
        slots = PrioritySemaphore(1)

        async def take() -> None:
            async with slots.one(0):
                pass

        async with slots.one(0):
            waiting = asyncio.create_task(take())
            await asyncio.sleep(0)
        waiting.cancel()  # it has the slot since a moment
        await asyncio.gather(waiting, return_exceptions=True)
        after = asyncio.create_task(take())
        for _ in range(10):
            await asyncio.sleep(0)
        assert after.done()

    asyncio.run(scenario())


def seconds_of_an_exchange(order: Callable[[int, int], int], clusters: int) -> float:
    """Return the time of an exchange over that of links which are never idle. Each cluster fetches a payload of each
    other, FETCHES_AT_ONCE at a time in this order of (us, other). Transfers share each link evenly, both ways."""
    left = [
        sorted((other for other in range(clusters) if other != us), key=lambda other: order(us, other))
        for us in range(clusters)
    ]
    going: dict[tuple[int, int], float] = {}
    seconds = 0.0

    def begin(us: int) -> None:
        while left[us] and sum(taker == us for taker, _ in going) < FETCHES_AT_ONCE:
            going[us, left[us].pop(0)] = 1.0

    for us in range(clusters):
        begin(us)
    while going:
        down = [sum(taker == us for taker, _ in going) for us in range(clusters)]
        up = [sum(giver == us for _, giver in going) for us in range(clusters)]
        rates = {pair: 1 / max(down[pair[0]], up[pair[1]]) for pair in going}
        step = min(size / rates[pair] for pair, size in going.items())
        seconds += step
        for pair in list(going):
            going[pair] -= step * rates[pair]
            if going[pair] < 1e-9:
                del going[pair]
        for us in range(clusters):
            begin(us)
    return seconds / (clusters - 1)


def names(count: int) -> Sequence[str]:
    return [f"cluster-{number:03}" for number in range(count)]


@pytest.mark.parametrize("clusters", [2, 5, 24])
def test_in_the_order_of_the_ring_no_line_stands_idle(clusters: int):
    ring = names(clusters)
    assert seconds_of_an_exchange(lambda us, other: places_behind(ring[us], ring[other], ring), clusters) < 1.01


def test_in_the_order_of_the_announcements_most_lines_would():
    assert seconds_of_an_exchange(lambda us, other: other, 24) > 2
