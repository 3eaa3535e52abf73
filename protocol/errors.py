"""Whose fault it is.

DilocoxError
├── LocalError          ours: configuration, disk, a bug; says what to do
│   ├── ConfigError     a run file, a flag or a folder that cannot be used
│   └── PortError       an address of this machine that we cannot listen on
└── RemoteError         theirs: something that arrived breaks a rule; carries the Reason it is recorded under
"""

from dilocox.protocol.pb import messages_pb2 as pb

__all__ = ["ConfigError", "DilocoxError", "LocalError", "PortError", "RemoteError", "reason_name"]


def reason_name(reason: pb.Reason) -> str:
    """`REASON_NORM_TOO_LARGE` -> `norm-too-large`, the form shown to people."""
    return pb.Reason.Name(reason).removeprefix("REASON_").lower().replace("_", "-")


class DilocoxError(Exception):
    """Everything this project raises on purpose."""


class LocalError(DilocoxError):
    """Our side cannot go on; the message says what failed and one action."""


class Diverged(LocalError):
    """Training made numbers that are none."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: training diverged on this node. Lower training.learning_rate.")


class ConfigError(LocalError):
    """Something a person wrote cannot be used."""


class PortError(LocalError):
    """Somebody else listens there, or the address is not this machine's, or not this user's to open."""


class RemoteError(DilocoxError):
    """Something that arrived breaks a rule."""

    def __init__(self, reason: pb.Reason, detail: str) -> None:
        super().__init__(f"{reason_name(reason)}: {detail}")
        self.reason = reason
        self.detail = detail
