"""Challenges for attestation: nonces that need no memory, each valid once, for one peer and a short time.

A nonce contains a window of time, a random salt, and this coordinator's MAC over both and the peer. A request costs no
memory; only used nonces are remembered, and only until they expire. After a restart peers request new ones.
"""

import hmac
import os
import struct
from collections import OrderedDict
from collections.abc import Callable

from dilocox.protocol import limits
from dilocox.protocol.wire.attestation import NONCE_BYTES, AttestationError, Code

__all__ = ["Challenges"]

LIFETIME_SECONDS = 120
"""Shortest time between a challenge and its answer; the longest is twice that. Hardware makes a quote in seconds."""
HEAD = struct.Struct(">Q8s")
"""Window and salt; the MAC fills the rest."""


class Challenges:
    def __init__(self, clock: Callable[[], float], random: Callable[[int], bytes] = os.urandom) -> None:
        self._clock, self._random = clock, random
        self._secret = random(32)
        self._used: OrderedDict[bytes, None] = OrderedDict()

    def give(self, peer: str) -> bytes:
        """A new nonce for this peer."""
        head = HEAD.pack(self._window(), self._random(8))
        return head + self._mac(peer, head)

    def redeem(self, peer: str, nonce: bytes) -> None:
        """Use the nonce up. Raises AttestationError when it is not an open challenge of this peer."""
        head, mac = nonce[: HEAD.size], nonce[HEAD.size :]
        if not hmac.compare_digest(mac, self._mac(peer, head)):
            raise AttestationError(
                Code.NONCE, "this coordinator sent this peer no such challenge, or sent it before its last start"
            )
        if not 0 <= self._window() - HEAD.unpack(head)[0] <= 1:
            raise AttestationError(Code.NONCE, f"the challenge is older than {LIFETIME_SECONDS} s")
        if nonce in self._used:
            raise AttestationError(Code.NONCE, "the challenge was used before")
        self._used[nonce] = None
        if len(self._used) > limits.CHALLENGES:
            self._used.popitem(last=False)

    def _window(self) -> int:
        return int(self._clock() // LIFETIME_SECONDS)

    def _mac(self, peer: str, head: bytes) -> bytes:
        return hmac.digest(self._secret, head + peer.encode(), "sha256")[: NONCE_BYTES - HEAD.size]
