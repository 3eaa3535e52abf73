"""The stages of the model that a host has."""

from collections.abc import Iterable

__all__ = ["HostedStages"]


class HostedStages:
    """The stages that this host has: of other stages it downloads nothing. Their placement changes with each worker group."""

    def __init__(self, stages: Iterable[int]) -> None:
        self._stages = frozenset(stages)

    def __contains__(self, stage: int) -> bool:
        return stage in self._stages

    @property
    def stages(self) -> frozenset[int]:
        return self._stages

    def host(self, stages: Iterable[int]) -> None:
        """Replace the stages that this host has."""
        self._stages = frozenset(stages)
