"""Routes of the node's HTTP API. Every value is read on request; routes that change something need the daemon's key."""

import hmac
import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry

from dilocox.node.api.metrics import node_metrics, state_agreed
from dilocox.node.attest.prover import Challenger, Prover
from dilocox.node.exchange.coordinator_client import CoordinatorLink
from dilocox.node.exchange.downloader import Downloader
from dilocox.node.exchange.relays import Relays
from dilocox.node.member.participant import Participant
from dilocox.node.member.participation import ParticipationSchedule
from dilocox.protocol.errors import LocalError, reason_name
from dilocox.protocol.payload.native import kernels
from dilocox.transport.limits.traffic import Traffic
from dilocox.transport.net.network import Network
from dilocox.views import json_views as views
from dilocox.views.health import answers
from dilocox.views.http import Problem, add_run_routes, create_app, json_response
from dilocox.views.query_params import Flag, Parameter, takes
from dilocox.views.reasons import advice

__all__ = ["Sources", "create_node_app"]

NOW = Flag(name="now", says="`yes`: without finishing the open round", word="yes")


@dataclass(frozen=True)
class Sources:
    """Sources of a node's page and API, beside its part in the run."""

    name: str
    network: Network
    relays: Relays
    downloader: Downloader
    coordinator: CoordinatorLink
    prover: Prover | None
    """Prover of this machine. None: the run requires no evidence."""


def node_status(participant: Participant, sources: Sources) -> dict[str, Any]:
    """Am I reachable, in sync, in this round, and counted?"""
    progress, chain = participant.progress, participant.chain
    head = chain.head
    fetched, coordinator = sources.downloader.statistics(), sources.coordinator
    reach, prover = sources.network.reach, sources.prover
    history = participant.counted_history()
    last = chain.commit(head.round - 1) if head.round else None
    mine = [item for item in last.body.excluded if item.peer == participant.machine.cluster] if last else []
    status, manifest = participant.machine.status, participant.manifest
    idle = participant.stands_still or status.name == "paused"
    inner_steps = head.inner_steps if head.round == progress.round else manifest.rounds.inner_steps
    current = progress.states.get(head.round) or progress.states.get(head.round - 1) or {}
    return {
        "role": "node",
        "run": views.run(participant.manifest),
        "peer": participant.identity.peer,
        "name": sources.name,
        "address": sources.network.address,
        "reachable": reach.reachable,
        "reach": reach.sentence,
        "nobody_keeps": sources.relays.alone,
        "coordinator_connected": coordinator.connected,
        "clock_offset": coordinator.clock_offset,
        "attestation": asdict(prover.result) if prover else None,
        "state": status.name,
        "why": status.why,
        "advice": status.advice,
        "round_why": participant.round_why,
        "finished": head.finished,
        "round": head.round,
        "phase_round": progress.round,
        "inner_step": progress.step,
        "inner_steps": inner_steps,
        "on_roster": participant.identity.peer in head.cluster_by_peer,
        "cluster": participant.machine.cluster,
        "boxes": views.boxes(head, participant.machine.cluster),
        "counted": history,
        "nobody_counted": last is not None and bool(mine) and not last.body.counted,
        "excluded": [
            {"reason": reason_name(item.reason), "detail": item.detail, "do": advice(reason_name(item.reason)).do}
            for item in mine
        ],
        "loss": progress.loss or None,
        "tokens_per_second": progress.tokens_per_second,
        "step_seconds": progress.step_seconds,
        "phase_seconds_left": 0.0 if idle else max(0, inner_steps - progress.step) * progress.step_seconds,
        "seconds_left": views.seconds_left(
            participant.manifest, head, json.loads(chain.rows(max(0, chain.length - views.USUAL))), idle
        ),
        "stands_still": participant.stands_still,
        "tokens": progress.tokens,
        "total_steps": progress.total_steps,
        "clock_seconds": progress.clock_seconds,
        "codec_cpu_seconds": progress.codec_cpu_seconds,
        "codec_native": kernels() is not None,
        "network": views.network(sources.downloader.traffic),
        "allreduce_bytes": _allreduce_bytes(participant, sources.downloader.traffic),
        "fetch_failures": fetched.failures,
        "downloading": {"held": fetched.held, "size": fetched.wanted} if fetched.wanted else None,
        "applied_at_step": {str(round): step for round, step in sorted(progress.applied_at.items())},
        "phase_steps": {str(round): steps for round, steps in sorted(progress.inner_steps.items())},
        "state_roots": {str(round): root.hex() for round, root in sorted(progress.roots.items())},
        "states": {str(stage): digest.hex() for stage, digest in sorted(current.items())},
        "state_hashes": {
            str(round): [digest.hex() for _, digest in sorted(states.items())]
            for round, states in sorted(progress.states.items())
        },
    }


def _allreduce_bytes(participant: Participant, traffic: Traffic) -> int:
    """Return the bytes of an AllReduce in the last whole round; 0 before there is one."""
    last = traffic.last_round
    commit = participant.chain.commit(last.round) if last is not None else None
    if last is None or commit is None:
        return 0
    steps = participant.progress.inner_steps.get(last.round, 0)
    return views.allreduce_bytes(participant.manifest, views.round_row(commit.body)["roster"], steps)


def create_node_app(
    participant: Participant, attendance: ParticipationSchedule, key: str, challenger: Challenger, sources: Sources
) -> web.Application:
    """Return the node's API. `key`: the operator's. A request for live peers asks the coordinator."""
    registry, directory, coordinator = CollectorRegistry(), sources.network.directory, sources.coordinator
    traffic = sources.downloader.traffic
    metrics = node_metrics(registry, participant, traffic, sources.network.reach, lambda: coordinator.connected)

    async def peers() -> list[views.View]:
        records = {peer: record.body for peer, record in directory.records.items()}
        return views.peers(
            participant.manifest,
            participant.chain.head,
            await coordinator.presence(),
            records,
            participant.chain.head.coordinator,
        )

    async def status() -> views.View:
        value = node_status(participant, sources)
        hours = str(attendance.hours) if attendance.hours is not None else None
        account = attendance.account
        privacy = account.sentence if account is not None and account.budget.bounds else None
        return {**value, "hours": hours, "privacy": privacy, "answers": answers(value, state_agreed(participant))}

    async def attest(request: web.Request) -> web.Response:
        """Challenge a peer now."""
        peer = request.match_info["peer"]
        if not participant.manifest.attestation.kinds:
            raise Problem("no-attestation", "this run requires no evidence")
        return json_response(await challenger.report(peer))

    app = create_app(registry, status, metrics.refresh)
    add_run_routes(
        app,
        participant.chain,
        peers,
        participant.machine.events,
        participant.machine.cluster,
        lambda: participant.machine.status,
    )
    add_operator_routes(app, attendance, key)
    app.router.add_post("/v1/attest/{peer}", attest)
    return app


def add_operator_routes(app: web.Application, attendance: ParticipationSchedule, key: str) -> None:
    """Add the operator's routes: pause, resume, leave."""

    def route(
        act: Callable[[bool], Awaitable[str]], *parameters: Parameter
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        @takes(*parameters)
        async def handle(request: web.Request) -> web.Response:
            if not hmac.compare_digest(request.headers.get("Authorization", "").encode(), f"Bearer {key}".encode()):
                raise Problem("not-the-operator", "only a user who can read api.key in the daemon's folder may do that")
            try:
                return json_response({"says": await act(NOW in parameters and NOW.read(request))})
            except LocalError as error:
                raise Problem("not-here", str(error)) from error

        return handle

    app.router.add_post("/v1/pause", route(attendance.pause, NOW))
    app.router.add_post("/v1/resume", route(lambda _: attendance.resume()))
    app.router.add_post("/v1/leave", route(attendance.leave, NOW))
