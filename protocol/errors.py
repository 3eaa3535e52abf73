"""Errors, by the side that caused them.

DilocoxError
├── LocalError          this side: configuration, disk, a bug; contains what to do
│   ├── ConfigError     a run file, a flag or a folder that cannot be used
│   └── PortError       an address of this machine that cannot be used
└── RemoteError         the other side: something that arrived breaks a rule; contains the Reason for the record
"""

from dilocox.protocol.pb import messages_pb2 as pb

__all__ = ["ConfigError", "DilocoxError", "LocalError", "PortError", "RemoteError", "reason_name"]


def reason_name(reason: pb.Reason) -> str:
    """Return the form of a reason for people: `REASON_NORM_TOO_LARGE` -> `norm-too-large`."""
    return pb.Reason.Name(reason).removeprefix("REASON_").lower().replace("_", "-")


class DilocoxError(Exception):
    """Everything this project raises on purpose."""


class LocalError(DilocoxError):
    """Error of this side: it cannot continue. The message contains what failed and one action."""


class Diverged(LocalError):
    """Training made numbers that are none."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: training diverged on this node. Set a lower training.learning_rate.")


class ConfigError(LocalError):
    """Something a person wrote cannot be used."""


class PortError(LocalError):
    """Error: another process uses the port, or the address is not this machine's, or this user may not open it."""


class RemoteError(DilocoxError):
    """Something that arrived breaks a rule."""

    def __init__(self, reason: pb.Reason, detail: str) -> None:
        super().__init__(f"{reason_name(reason)}: {detail}")
        self.reason = reason
        self.detail = detail
