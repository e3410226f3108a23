"""The environment of a worker: torchrun's variables, for one local rank of a slot.

May not know: the agent's own environment, processes.
"""

from __future__ import annotations

from tmrun.core.model import Spec


def worker_environment(spec: Spec, job: str, slot: int, local_rank: int, master: str, restarts: int) -> dict[str, str]:
    """What torch.distributed.run sets (torch 2.13), with one role and ranks that follow the slot.

    ``master``: address of slot 0's host. Process groups find each other through the agent, so nothing listens on MASTER_PORT.
    """
    rank = spec.ranks(slot)[local_rank]
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(spec.world),
        "LOCAL_WORLD_SIZE": str(spec.nproc),
        "GROUP_RANK": str(slot),
        "GROUP_WORLD_SIZE": str(spec.nnodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(spec.world),
        "MASTER_ADDR": master,
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def default_threads(spec: Spec, inherited: str | None) -> str | None:
    """OMP_NUM_THREADS as torchrun sets it: the inherited value, else 1 where several workers share a host."""
    return inherited if inherited is not None else ("1" if spec.nproc > 1 else None)
