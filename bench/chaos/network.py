"""Network between members in namespaces: one bridge, one address each, and the possible faults of a link.

A cut gives the receiver a hardware address that no host has. Packets in that direction disappear, as on a failed link,
and neither end notices. The bench itself connects over the bridge, past every cut.
"""

import shutil
from collections.abc import Iterable, Sequence

from dilocox.testnet import namespaces
from dilocox.testnet.namespaces import Namespaces, Net, run

__all__ = ["LINE", "Wire", "lacking"]

LINE = "eth0"
NOBODY = "02:dc:00:00:ff:ff"


def lacking() -> str:
    """Return why this machine cannot have such a network; empty if it can."""
    if why := namespaces.lacking():
        return f"chaos: {why}"
    return "" if shutil.which("mount") else "chaos needs mount (of util-linux), for small disks"


class Wire(Namespaces):
    def __init__(self, names: Sequence[str]) -> None:
        super().__init__([Net(LINE, names, here=True)])

    def cut(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Drop all packets from the first of a pair to the second."""
        self._point(pairs, cut=True)

    def mend(self, pairs: Iterable[tuple[str, str]]) -> None:
        self._point(pairs, cut=False)

    def _point(self, pairs: Iterable[tuple[str, str]], cut: bool) -> None:
        for sender, receiver in pairs:
            hardware = NOBODY if cut else self.hardware(receiver, LINE)
            neighbour = ["ip", "-n", self.namespace(sender), "neigh", "replace", self.address(receiver, LINE)]
            run(*neighbour, "lladdr", hardware, "nud", "permanent", "dev", LINE)
