"""The worker's line to its daemon: one gRPC stream over a Unix socket, served by a thread so that training never waits for it."""

import os
import queue
import threading
from collections.abc import Iterator
from typing import Any

import grpc

from dilocox.protocol import limits
from dilocox.protocol.pb import worker_pb2 as pb
from dilocox.protocol.pb import worker_pb2_grpc as rpc

__all__ = ["DaemonLink"]

_OPTIONS = [
    ("grpc.max_receive_message_length", limits.WORKER_MESSAGE_BYTES),
    ("grpc.max_send_message_length", limits.WORKER_MESSAGE_BYTES),
]


class DaemonLink:
    """Events go out in order; commands wait in a queue. When the stream breaks the process exits: the daemon starts a new one."""

    def __init__(self, socket: str) -> None:
        self._outgoing: queue.SimpleQueue[pb.WorkerEvent | None] = queue.SimpleQueue()
        self._commands: queue.SimpleQueue[pb.WorkerCommand] = queue.SimpleQueue()
        self.wake = threading.Event()
        """Event, set when a command arrives; a waiting thread clears it first."""
        self._channel = grpc.insecure_channel(f"unix:{socket}", options=_OPTIONS)
        self._closing = False
        self._thread = threading.Thread(target=self._receive, name="daemon-link", daemon=True)
        self._thread.start()

    def send(self, event: pb.WorkerEvent) -> None:
        self._outgoing.put(event)

    def next_command(self) -> pb.WorkerCommand | None:
        """The next command, or None when there is none now."""
        try:
            return self._commands.get_nowait()
        except queue.Empty:
            return None

    def wait_command(self) -> pb.WorkerCommand:
        return self._commands.get()

    def close(self) -> None:
        """Deliver what was sent, then end the stream."""
        self._closing = True
        self._outgoing.put(None)
        self._thread.join(timeout=10)

    def _events(self) -> Iterator[pb.WorkerEvent]:
        while (event := self._outgoing.get()) is not None:
            yield event

    def _receive(self) -> None:
        try:
            stub: Any = rpc.SupervisorStub(self._channel)  # type: ignore[arg-type]  # its types are asyncio's; a worker has none
            for command in stub.Attach(self._events(), wait_for_ready=True):
                self._commands.put(command)
                self.wake.set()
        except grpc.RpcError:
            pass
        if not self._closing:
            os._exit(0)
