"""This node's side of attestation: answer challenges, stay attested with the coordinator, challenge other peers."""

import asyncio
import logging
import os
import time
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import grpc
import grpc.aio

from dilocox.node.attest.attesters import Attester
from dilocox.node.attest.verify import appraise
from dilocox.node.exchange.coordinator_client import Answer, CoordinatorLink
from dilocox.protocol import events
from dilocox.protocol.consensus.rules import Outcome
from dilocox.protocol.crypto import Identity
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.member import member_io
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.attestation import (
    NONCE_BYTES,
    AttestationError,
    Claims,
    Code,
    Evidence,
    Policy,
    Verdict,
    check_binding,
    report_data,
)
from dilocox.protocol.wire.messages import Statement, open_envelope, seal
from dilocox.transport.limits.caller_auth import Context
from dilocox.transport.net.peer_directory import PeerDirectory
from dilocox.transport.net.rpc import ChannelPool

__all__ = ["AttestorService", "Challenger", "Prover", "Result", "prove"]

log = logging.getLogger(__name__)

RENEW_SHARE = 0.5
"""Of a verdict's time, after which the peer asks to be challenged again."""
RETRY_SECONDS = 5.0
ANSWER_SECONDS = 30.0
"""How long a peer may take to answer a challenge."""
ANSWERS_AT_ONCE = 1
"""Quotes are made one at a time: hardware is slow."""


@dataclass(frozen=True)
class Result:
    """How this node stands with the coordinator's policy."""

    attested: bool
    kind: str = ""
    code: str = ""
    reason: str = ""
    valid_until: int = 0
    """Unix seconds."""


class Prover:
    def __init__(self, identity: Identity, manifest: Manifest, kind: str, attester: Attester) -> None:
        self.identity, self.manifest = identity, manifest
        self._kind, self._attester = kind, attester
        self._turn = asyncio.Semaphore(ANSWERS_AT_ONCE)
        self.result = Result(False, kind, reason="not challenged yet")
        self.changed = asyncio.Event()
        """Set when the result changed."""

    async def answer(self, nonce: bytes) -> Statement:
        """Evidence bound to our key, the run and the nonce. Raises AttestationError."""
        key, run = self.identity.key, self.manifest.run_id
        data = report_data(self._kind, key, run, nonce)
        async with self._turn:
            evidence = await asyncio.to_thread(self._attester, data)
        body = pb.BoundEvidence(key=key, run=run, nonce=nonce, evidence=evidence.message())
        return seal(self.identity, pb.KIND_EVIDENCE, run, body)

    @property
    def busy(self) -> bool:
        """A quote is being made."""
        return self._turn.locked()

    async def stay_attested(self, coordinator: CoordinatorLink) -> None:
        """Be challenged, answer, and again before the verdict runs out; for ever."""
        while True:
            try:
                statement = await self.answer(await coordinator.challenge(self.identity.peer))
                self._note(await coordinator.submit(statement))
            except AttestationError as error:
                self._become(Result(False, self._kind, error.code, error.cause))
            left = self.result.valid_until - time.time()
            await asyncio.sleep(max(1.0, RENEW_SHARE * left) if self.result.attested else RETRY_SECONDS)

    def _note(self, answer: Answer) -> None:
        if answer.outcome is Outcome.ACCEPT and answer.valid_until_ms:
            self._become(Result(True, self._kind, valid_until=answer.valid_until_ms // 1000))
        elif answer.outcome is Outcome.ACCEPT:
            self._become(Result(False, self._kind, Code.MALFORMED, "the coordinator sent no duration of its verdict"))
        else:
            code, _, reason = answer.detail.partition(": ")
            self._become(Result(False, self._kind, code, reason))

    def _become(self, result: Result) -> None:
        before, self.result = self.result, result
        if (before.attested, before.code) != (result.attested, result.code):
            what = "attested" if result.attested else f"attestation refused: {result.code}: {result.reason}"
            label = " (simulated)" if result.kind == "simulated" else ""
            log.log(logging.INFO if result.attested else logging.WARNING, "%s, kind %s%s", what, result.kind, label)
        self.changed.set()


class Machine(Protocol):
    def feed(self, event: member_io.Attestation) -> None: ...

    def emit(self, event: events.Event) -> None: ...


async def prove(prover: Prover, machine: Machine) -> None:
    """Feed the machine whether we are attested, for ever: its claim waits for that."""
    refused = ""
    while True:
        await prover.changed.wait()
        prover.changed.clear()
        result = prover.result
        if result.code and result.code != refused:
            machine.emit(events.AttestationRefused(result.code, result.reason))
        refused = result.code
        machine.feed(member_io.Attestation(result.attested, result.reason))


class AttestorService(rpc.AttestorServicer):
    """Answers other peers' challenges: from the start of the server on, with evidence once the run is known."""

    def __init__(self) -> None:
        self._prover: Prover | None = None
        """None where the run asks for no evidence, or is not known yet."""

    def serve(self, prover: Prover | None) -> None:
        """Answer with its evidence from now on; None: the run asks for none."""
        self._prover = prover

    async def Attest(self, request: services.Challenge, context: Context) -> pb.Envelope:
        if len(request.nonce) != NONCE_BYTES:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"a nonce has {NONCE_BYTES} bytes")
        if self._prover is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this peer has no evidence")
            raise AssertionError  # abort raises; this tells the type checker
        if self._prover.busy:  # strangers never queue: the node's own renewal would wait behind them and expire
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "another quote is being made; retry later")
        try:
            return (await self._prover.answer(request.nonce)).envelope
        except AttestationError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.detail)
            raise


class Challenger:
    """Asks any peer for evidence and judges the answer by the run's policy."""

    def __init__(self, manifest: Manifest, directory: PeerDirectory, channels: ChannelPool) -> None:
        self.manifest, self._directory, self._channels = manifest, directory, channels
        self._policy = Policy(manifest.attestation)

    async def challenge(self, peer: str) -> tuple[Verdict, Claims | None]:
        """Raises RemoteError when the peer cannot be reached or its answer is not its own."""
        record = await self._directory.find(peer)
        if record is None:
            raise RemoteError(pb.REASON_UNAVAILABLE, "its address is not known")
        nonce, run = os.urandom(NONCE_BYTES), self.manifest.run_id
        stub = rpc.AttestorStub(self._channels.channel(record))
        try:
            envelope = await stub.Attest(services.Challenge(nonce=nonce), timeout=ANSWER_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise AttestationError(Code.UNAVAILABLE, error.details() or str(error.code())) from error
        statement = open_envelope(envelope, run, (pb.KIND_EVIDENCE,))
        if statement.peer != peer:
            raise AttestationError(Code.PEER, f"another peer, {statement.peer}, answered")
        bound: pb.BoundEvidence = statement.body
        check_binding(bound, envelope.key, run, nonce)
        evidence = Evidence.from_message(bound.evidence)
        expected = report_data(evidence.kind, envelope.key, run, nonce)
        return await asyncio.to_thread(appraise, self._policy, evidence, expected, int(time.time()))

    async def report(self, peer: str) -> dict[str, Any]:
        """The verdict for people. Never raises."""
        try:
            verdict, claims = await self.challenge(peer)
        except AttestationError as error:
            return {"peer": peer, "ok": False, "code": error.code, "reason": error.cause}
        except RemoteError as error:
            return {"peer": peer, "ok": False, "code": Code.UNAVAILABLE, "reason": error.detail}
        facts: dict[str, Any] = {"peer": peer, **asdict(verdict)}
        if claims is not None:
            facts |= {"kind": claims.kind, "measurement": ":".join(claims.measurement), "tcb_status": claims.tcb_status}
            facts |= {"product": claims.product, "tcb": dict(claims.tcb), "gpus": len(claims.gpus), "notes": list(claims.notes)}
            facts |= {"bound": verdict.code != Code.REPORT_DATA}
        return facts
