"""Schedule of faults and the members that they hit, from a seed alone."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dilocox.node.workers.environment import WORKER

__all__ = ["CLOCK_SECONDS", "COORDINATOR", "DEADLINE_SECONDS", "Fault", "cut_pairs", "plan"]

COORDINATOR = "coordinator"
DEADLINE_SECONDS = 20.0
"""Deadline of the run's rounds."""
REST_SECONDS = 12.0
"""After a fault was put right, at least, before the next one."""
DOWN_SECONDS = 4.0
"""Seconds between `kill -9` and the restart that an operator's supervisor would make."""
HANG_SECONDS = 90.0
"""Longer than a daemon takes to notice a worker that hangs."""
NODE_FILES = (
    "runs/*/chain.db",
    "runs/*/own.db",
    "runs/*/blobs/*",
    "runs/*/stages/*",
    "data/*",
    "runs/*/manifest.json",
    "runs/*/peers.json",
    "daemon.json",
    "starts",
    "tls.pem",
    "libp2p.key",
)
COORDINATOR_FILES = ("runs/*/chain.db", "runs/*/peers.json", "daemon.json", "starts", "tls.pem", "libp2p.key")
DAMAGES = ("a byte", "half", "all")
"""Damage of a file: one flipped bit, its second half deleted, or all bytes replaced by garbage."""
CLOCK_SECONDS = 3600
"""Seconds by which a wall clock is moved forward or back, and later corrected."""
CHILDREN = ("dht_child", "p2pd")


@dataclass(frozen=True)
class Fault:
    kind: str
    """A method of the world."""
    targets: tuple[str, ...]
    """Members that it hits. Their loss is the fault's price; the bench measures the loss of all other members."""
    seconds: float = 0.0
    """Seconds until the repair, or at most until the member has repaired itself; 0: only the member repairs it."""
    detail: str = ""
    at: float = 0.0
    """Seconds after the first fault could have been."""

    def __str__(self) -> str:
        return " ".join(filter(None, [self.kind.replace("_", " "), self.detail, ", ".join(self.targets)]))


def _deck(random: random.Random, nodes: Sequence[str], clocks: bool) -> list[Fault]:
    """Return every fault once, on freshly drawn members."""

    def one() -> tuple[str, ...]:
        return (random.choice(nodes),)

    deck = [
        Fault("kill", one(), DOWN_SECONDS),
        Fault("kill", (COORDINATOR,), DOWN_SECONDS),
        Fault("kill_child", one(), detail=WORKER),
        *(Fault("kill_child", target, detail=word) for word in CHILDREN for target in (one(), (COORDINATOR,))),
        Fault("stop_worker", one(), 10.0),
        Fault("hang_worker", one(), HANG_SECONDS),
        Fault("cut", one(), 20.0, "off"),
        Fault("cut", one(), 20.0, "outgoing"),
        Fault("cut", one(), 20.0, "incoming"),
        Fault("cut", tuple(random.sample(nodes, len(nodes) // 2)), 20.0, "half"),
        Fault("cut", (COORDINATOR,), 2.25 * DEADLINE_SECONDS, "off"),
        Fault("slow", one(), 20.0, "256kbit"),
        Fault("slow", (COORDINATOR,), 20.0, "1mbit"),
        Fault("fill_disk", one(), 10.0),
        Fault("fill_disk", (COORDINATOR,), 10.0),
        *(Fault("damage", one(), DOWN_SECONDS, file) for file in NODE_FILES),
        *(Fault("damage", (COORDINATOR,), DOWN_SECONDS, file) for file in COORDINATOR_FILES),
        Fault("damage_live", one(), detail=NODE_FILES[2]),
        *(
            Fault("step_clock", target, 20.0, by)
            for by in (f"{CLOCK_SECONDS:+}", f"{-CLOCK_SECONDS:+}")
            if clocks
            for target in (one(), (COORDINATOR,))
        ),
        Fault("kill", tuple(nodes), DOWN_SECONDS),
        Fault("kill", (COORDINATOR, *nodes), DOWN_SECONDS),
    ]
    random.shuffle(deck)
    return [replace(f, detail=f"{random.choice(DAMAGES)} of {f.detail}") if "damage" in f.kind else f for f in deck]


def _endless(random: random.Random, nodes: Sequence[str], clocks: bool) -> Iterator[Fault]:
    while True:
        yield from _deck(random, nodes, clocks)


def plan(seed: int, minutes: float, nodes: Sequence[str], every: float, clocks: bool = False) -> list[Fault]:
    """Return the faults of `minutes`, about `every` seconds apart, one after the other. Each kind occurs once before any
    repeats. `clocks`: whether they can be stepped here."""
    drawn = random.Random(seed)
    faults: list[Fault] = []
    at = 0.0
    for fault in _endless(drawn, nodes, clocks):
        if at + fault.seconds > 60 * minutes:
            return faults
        faults.append(replace(fault, at=at))
        at += max(drawn.uniform(0.8, 1.2) * every, fault.seconds + min(every, REST_SECONDS))
    raise AssertionError("unreachable")


def cut_pairs(fault: Fault, members: Sequence[str]) -> set[tuple[str, str]]:
    """Return the directions (from, to) that a cut blocks. Members on one side of it still reach each other."""
    inside, outside = set(fault.targets), set(members) - set(fault.targets)
    out = {(a, b) for a in inside for b in outside}
    back = {(b, a) for a, b in out}
    return {"outgoing": out, "incoming": back}.get(fault.detail, out | back)
