"""The job that is simulated: its size, layout and length. May not know: strategies, costs."""

from __future__ import annotations

from dataclasses import dataclass

from tmrun.core.errors import UsageError

MAX_NODES = 16_384


@dataclass(frozen=True, slots=True)
class Shape:
    """``replicas``: copies of each rank's state in the job; 1 means fully sharded: a lost shard is nowhere else."""

    nodes: int
    nproc: int = 8
    replicas: int = 2
    rack_nodes: int = 8
    days: float = 7.0
    seed: int = 0

    def __post_init__(self) -> None:
        for wrong, what in (
            (not 2 <= self.nodes <= MAX_NODES, f"--nodes {self.nodes}: expected 2 to {MAX_NODES}"),
            (self.nproc < 1, f"--nproc-per-node {self.nproc}: expected at least 1"),
            (
                not 1 <= self.replicas <= self.nodes,
                f"--replicas {self.replicas}: expected 1 (fully sharded) to the number of nodes ({self.nodes})",
            ),
            (self.rack_nodes < 1, f"--rack-nodes {self.rack_nodes}: expected at least 1"),
            (not 0 < self.days <= 3650, f"--days {self.days:g}: expected a number above 0, at most 3650"),
        ):
            if wrong:
                raise UsageError(what)

    @property
    def gpus(self) -> int:
        """Of the active nodes."""
        return self.nodes * self.nproc

    @property
    def horizon_s(self) -> float:
        """Simulated time in seconds."""
        return self.days * 86_400.0

    def holders(self, slot: int) -> list[int]:
        """Slots that hold a copy of this slot's state."""
        stride = self.nodes // self.replicas
        return [(slot + k * stride) % self.nodes for k in range(1, self.replicas)]
