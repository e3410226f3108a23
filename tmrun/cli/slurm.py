"""What Slurm says of the host that a launcher runs on. May not know: what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping

from tmrun.core.hostlist import topology_labels


def labels(environment: Mapping[str, str]) -> dict[str, str]:
    """Labels of this host: its switches (topology/tree) or blocks; empty outside of Slurm."""
    return topology_labels(environment.get("SLURM_TOPOLOGY_ADDR", ""), environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", ""))
