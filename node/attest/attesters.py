"""Evidence of this machine: what it can show of the kinds that a run admits."""

from collections.abc import Callable, Sequence
from pathlib import Path

from dilocox.node.attest import simulated
from dilocox.node.attest.kinds import MachineKind, find_kind
from dilocox.protocol.crypto import sha256
from dilocox.protocol.wire.attestation import SIMULATED, AttestationError, Code, Evidence, deny_unexpected

__all__ = ["Attester", "choose_attester", "no_attester", "simulated_measurement"]

Attester = Callable[[bytes], Evidence]
"""Report data (64 bytes) -> evidence. Blocking. Raises AttestationError, with Code.UNAVAILABLE where there is no such hardware."""


def unavailable(reason: str) -> AttestationError:
    return AttestationError(Code.UNAVAILABLE, reason)


def simulated_measurement(path: Path | None, version: str) -> bytes:
    """48 bytes: what the file says in hexadecimal, else a hash of the software's version."""
    if path is None:
        return (sha256(b"dilocox-simulated-measurement\0", version.encode()) + bytes(16))[: simulated.MEASUREMENT_BYTES]
    try:
        measurement = bytes.fromhex(path.read_text().strip())
    except (OSError, ValueError) as error:
        raise unavailable(f"{path} contains no measurement: {error}") from error
    if len(measurement) != simulated.MEASUREMENT_BYTES:
        raise unavailable(f"{path}: a simulated measurement has {simulated.MEASUREMENT_BYTES} bytes in hexadecimal")
    return measurement


def no_attester(error: AttestationError) -> Attester:
    """Of a machine that has nothing to show."""

    def refuse(report_data: bytes) -> Evidence:
        raise error

    return refuse


def choose_attester(
    kinds: Sequence[str], version: str, simulated_file: Path | None, collateral: Path | None
) -> tuple[str, Attester]:
    """Return the first of the kinds that this machine can show, and its attester.

    Raises AttestationError (unavailable, or internal if a plugin fails), and ConfigError if a plugin cannot be used.
    """
    for name in kinds:
        if isinstance(kind := find_kind(name), MachineKind) and _is_here(kind):
            return name, _attester(kind, collateral)
    if SIMULATED in kinds:
        return SIMULATED, lambda data: simulated.make(data, simulated_measurement(simulated_file, version))
    if not kinds:
        raise unavailable("no kind of hardware evidence is installed: install dilocox-tee")
    raise unavailable(f"this machine is not a confidential guest of a required kind: {' or '.join(kinds)}")


@deny_unexpected
def _is_here(kind: MachineKind) -> bool:
    return kind.is_here()


def _attester(kind: MachineKind, collateral: Path | None) -> Attester:
    return deny_unexpected(lambda report_data: kind.attest(report_data, collateral))
