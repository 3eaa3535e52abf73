"""Challenges: random nonces, each good once, for one peer and a short time. In memory: after a restart peers ask again."""

import os
from collections import OrderedDict
from collections.abc import Callable

from dilocox.protocol import limits
from dilocox.protocol.attestation import NONCE_BYTES, AttestationError, Code

__all__ = ["Challenges"]

LIFETIME_SECONDS = 120.0
"""Between a challenge and its answer: hardware makes a quote in seconds."""


class Challenges:
    def __init__(self, clock: Callable[[], float], random: Callable[[int], bytes] = os.urandom) -> None:
        self._clock, self._random = clock, random
        self._open: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        """Nonce -> (peer, when it was given), oldest first."""

    def give(self, peer: str) -> bytes:
        """A new nonce for this peer. A peer that asks too often loses its own oldest challenge."""
        mine = [nonce for nonce, (other, _) in self._open.items() if other == peer]
        for nonce in mine[: len(mine) - limits.CHALLENGES_PER_PEER + 1]:
            del self._open[nonce]
        while len(self._open) >= limits.CHALLENGES:
            self._open.popitem(last=False)
        nonce = self._random(NONCE_BYTES)
        self._open[nonce] = (peer, self._clock())
        return nonce

    def redeem(self, peer: str, nonce: bytes) -> None:
        """Use the nonce up. Raises AttestationError when it is not an open challenge of this peer."""
        owner, given_at = self._open.get(nonce, ("", 0.0))
        if owner != peer:
            what = "another peer's challenge" if owner else "no open challenge: never given, used before, or too old"
            raise AttestationError(Code.NONCE, what)
        del self._open[nonce]
        if self._clock() - given_at > LIFETIME_SECONDS:
            raise AttestationError(Code.NONCE, f"the challenge is older than {LIFETIME_SECONDS:.0f} s")
