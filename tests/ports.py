"""A member machine that takes every input and does nothing: the port of node/member/driver.py for tests."""

from dilocox.protocol import events
from dilocox.protocol.consensus.head import HostRange
from dilocox.protocol.member import member_io
from dilocox.protocol.member.member_state import MemberState
from dilocox.protocol.member.node_status import Status
from dilocox.transport.process.watched_state import Changes


class Port:
    def __init__(self, state: MemberState) -> None:
        self.state, self.changes = state, Changes()
        self.fed: list[member_io.Input] = []
        self.emitted: list[events.Event] = []
        self.shown: list[Status | None] = []

    def feed(self, event: member_io.Input) -> None:
        self.fed.append(event)

    def emit(self, event: events.Event) -> None:
        self.emitted.append(event)

    def show(self, busy: Status | None) -> None:
        self.shown.append(busy)

    @property
    def laid(self) -> list[tuple[HostRange, ...]]:
        """Return the received placements of stages on hosts, the newest last."""
        return [event.hosts for event in self.fed if isinstance(event, member_io.Laid)]

    @property
    def whole(self) -> list[bool]:
        """Return for each input, the newest last, whether all hosts of the stages were present."""
        return [event.here for event in self.fed if isinstance(event, member_io.Whole)]
