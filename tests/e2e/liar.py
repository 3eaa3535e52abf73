"""Real node with false evidence: `python -P tests/e2e/liar.py LIE node …`."""

import sys
from collections.abc import Awaitable, Callable

from dilocox.cli.main import main
from dilocox.node.attest.prover import Prover
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.attestation import AttestationError, Code
from dilocox.protocol.wire.messages import Statement, seal

Answer = Callable[[Prover, bytes], Awaitable[Statement]]
honest: Answer = Prover.answer
said: list[Statement] = []


async def without(prover: Prover, nonce: bytes) -> Statement:
    raise AttestationError(Code.UNAVAILABLE, "no hardware here")


async def borrowed(prover: Prover, nonce: bytes) -> Statement:
    """Return evidence that was made for another peer's key."""
    statement = await honest(prover, nonce)
    statement.body.key = b"\x01" * 32
    return seal(prover.identity, pb.KIND_EVIDENCE, prover.manifest.run_id, statement.body)


async def replayed(prover: Prover, nonce: bytes) -> Statement:
    """Return the first answer again at every later request."""
    said.append(await honest(prover, nonce))
    return said[0]


async def elsewhere(prover: Prover, nonce: bytes) -> Statement:
    """Return evidence that was made for another run."""
    statement = await honest(prover, nonce)
    statement.body.run = b"\x02" * 32
    return seal(prover.identity, pb.KIND_EVIDENCE, prover.manifest.run_id, statement.body)


async def lying(prover: Prover, nonce: bytes) -> Statement:
    """Return evidence whose report data belong to another peer, for any request."""
    statement = await honest(prover, nonce)
    other = await honest(prover, b"\x03" * 32)
    statement.body.evidence.CopyFrom(other.body.evidence)
    return seal(prover.identity, pb.KIND_EVIDENCE, prover.manifest.run_id, statement.body)


if __name__ == "__main__":
    Prover.answer = globals()[sys.argv.pop(1)]  # type: ignore[method-assign]
    main()
