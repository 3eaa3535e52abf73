"""hivemind's averager (OpenDiLoCo's exchange) as a peer of `python -m bench.exchange`."""

import time
from collections.abc import Callable, Sequence

import torch
from hivemind import DHT
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import AveragingStage
from hivemind.compression import NoCompression, Uniform8BitQuantization
from hivemind.utils import get_dht_time
from torch import Tensor

__all__ = ["Averager"]

MATCHMAKING_SECONDS = 4.0
"""Seconds to find a group, before the measured time begins."""
TIMEOUT_SECONDS = 300.0
POLL_SECONDS = 0.01


class Averager:
    def __init__(self, address: str, size: int, peers: int, bits: int) -> None:
        self._values, self._peers = torch.zeros(size), peers
        self._compression = Uniform8BitQuantization() if bits == 8 else NoCompression()
        self._dht = DHT(host_maddrs=[f"/ip4/{address}/tcp/0"], start=True, use_ipfs=False)
        self.address = str(self._dht.get_visible_maddrs()[0])
        self._averager: DecentralizedAverager | None = None

    def meet(self, addresses: Sequence[str]) -> None:
        self._dht = DHT(
            host_maddrs=["/ip4/" + self.address.split("/")[2] + "/tcp/0"], initial_peers=list(addresses), start=True
        )
        self._averager = DecentralizedAverager(
            [self._values],
            self._dht,
            start=True,
            prefix="exchange",
            target_group_size=self._peers,
            min_group_size=self._peers,
            min_matchmaking_time=MATCHMAKING_SECONDS,
            request_timeout=MATCHMAKING_SECONDS / 2,
            compression=self._compression,
        )

    def prepare(self, values: Tensor, round: int) -> Callable[[], Tensor]:
        """Wait until the group is complete; return the function that exchanges."""
        averager = self._averager
        assert averager is not None
        with averager.get_tensors() as [held]:
            held.copy_(values)
        at = get_dht_time() + MATCHMAKING_SECONDS
        control = averager.step(scheduled_time=at, wait=False, require_trigger=True, timeout=TIMEOUT_SECONDS)
        while control.stage != AveragingStage.AWAITING_TRIGGER:
            if control.done():
                control.result()
            time.sleep(POLL_SECONDS)

        def exchange() -> Tensor:
            control.allow_allreduce()
            control.result(TIMEOUT_SECONDS)
            with averager.get_tensors() as [held]:
                return held.clone()

        return exchange
