"""The connection of a host to its cluster's lead host."""

from dataclasses import asdict
from typing import Any

from dilocox.node.hosts.cluster_link import ClusterLink, proof
from dilocox.node.workers.devices import Devices
from dilocox.protocol.pb import boxes_pb2 as boxes
from dilocox.protocol.pb import boxes_pb2_grpc as rpc
from dilocox.transport.net.rpc import ChannelPool, record_of

__all__ = ["LeadConnection", "hello_of"]


def hello_of(link: ClusterLink, me: str, machine: Devices, corpus: bytes = b"") -> boxes.BoxHello:
    """Return this host's first message. `corpus`: digest of the private data, if the run's data are private."""
    shown = proof(link.secret, link.lead.run_id, link.lead.coordinator, me)
    return boxes.BoxHello(proof=shown, corpus=corpus, **asdict(machine))


class LeadConnection:
    def __init__(self, link: ClusterLink, channels: ChannelPool, hello: boxes.BoxHello) -> None:
        self._link, self._channels, self.hello = link, channels, hello

    @property
    def lead(self) -> str:
        """Peer id of the lead host."""
        return self._link.lead.coordinator

    async def stub(self) -> Any:
        """Raises RemoteError where the lead host cannot be dialled."""
        return rpc.LeadStub(self._channels.channel(await record_of(self._link.lead.ways[0])))
