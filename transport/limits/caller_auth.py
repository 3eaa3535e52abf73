"""Authentication of callers: every call contains a credential, signed by the caller for one run and one server's
certificate.

TLS proves the server to the caller; this proves the caller to the server. A credential travels inside TLS to the one
server that it names and that the caller has pinned, and is invalid at any other. So it needs no challenge, and its
verdict is cached by its bytes.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from dilocox.protocol import limits
from dilocox.protocol.crypto import Identity, sha256
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.messages import open_envelope, seal
from dilocox.transport.limits.head_gossip import HeadGossip

__all__ = ["CallerAuth", "Credentials"]

HEADER = "dilocox-call-bin"
Context = grpc.aio.ServicerContext[Any, Any]


class Credentials(grpc.AuthMetadataPlugin):
    """Credential that this peer adds to every call to one server."""

    def __init__(self, identity: Identity, run_id: bytes, certificate_der: bytes, heads: HeadGossip | None = None) -> None:
        self._heads = heads or HeadGossip()
        call = pb.Call(certificate=sha256(certificate_der))
        self.metadata = ((HEADER, seal(identity, pb.KIND_CALL, run_id, call).envelope.SerializeToString()),)

    def __call__(self, context: grpc.AuthMetadataContext, callback: grpc.AuthMetadataPluginCallback) -> None:
        callback((*self.metadata, *self._heads.metadata()), None)


class CallerAuth:
    """Reads the credentials of the calls to one server."""

    def __init__(self, run_id: bytes, certificate_der: bytes, is_known: Callable[[str], bool] = lambda peer: False) -> None:
        """`is_known`: whether a verified caller takes part in the run."""
        self._run_id, self._certificate, self._is_known = run_id, sha256(certificate_der), is_known
        self._verified_known: OrderedDict[bytes, str] = OrderedDict()
        """Peer ids of known peers, by valid credentials: calls of unknown peers never evict them."""
        self._verified_unknown: OrderedDict[bytes, str] = OrderedDict()
        """Peer ids of unknown peers, by valid credentials."""

    def peer(self, context: Context) -> str:
        """Return the caller's peer id; empty if it sends none. Raises RemoteError if the credential is invalid."""
        for key, value in context.invocation_metadata() or ():
            if key == HEADER:
                return self._verified(value if isinstance(value, bytes) else value.encode())
        return ""

    def remembered(self, context: Context) -> str:
        """Return the caller's peer id where its credential was verified before, else an empty one. Verifies nothing."""
        for key, value in context.invocation_metadata() or ():
            if key == HEADER:
                raw = value if isinstance(value, bytes) else value.encode()
                return self._verified_known.get(raw) or self._verified_unknown.get(raw, "")
        return ""

    def _verified(self, raw: bytes) -> str:
        peer = self._verified_known.get(raw) or self._verified_unknown.pop(raw, "")
        if not peer:
            if len(raw) > limits.CREDENTIAL_BYTES:
                raise RemoteError(
                    pb.REASON_OVERSIZE, f"a credential of {len(raw)} bytes; the limit is {limits.CREDENTIAL_BYTES}"
                )
            call = open_envelope(raw, self._run_id, (pb.KIND_CALL,))
            if call.body.certificate != self._certificate:
                raise RemoteError(pb.REASON_BAD_SIGNATURE, "the credential is for another server")
            peer = call.peer
        verified = self._verified_known if self._is_known(peer) else self._verified_unknown
        verified[raw] = peer
        verified.move_to_end(raw)
        if len(verified) > limits.CREDENTIALS:
            verified.popitem(last=False)
        return peer
