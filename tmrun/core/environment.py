"""The environment and the arguments of a worker: torchrun's, for one local rank of a slot.

May not know: the agent's own environment, processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import Template

from tmrun.core.errors import UsageError
from tmrun.core.model import Spec

_SECRETS = ("TMRUN_ETCD", "TMRUN_SECRET", "TMRUN_EVENT_URL")
"""What the training program has no use for, and must not be able to tell."""


def worker_environment(spec: Spec, job: str, slot: int, local_rank: int, master: tuple[str, int], restarts: int) -> dict[str, str]:
    """What torch.distributed.run sets (torch 2.13), with one role and ranks that follow the slot.

    ``master``: where the agent of slot 0's host serves a TCPStore; every worker is a client of it.
    """
    rank = spec.ranks(slot)[local_rank]
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0" if spec.virtual_local_rank else str(local_rank),
        "WORLD_SIZE": str(spec.world),
        "LOCAL_WORLD_SIZE": str(spec.nproc),
        "GROUP_RANK": str(slot),
        "GROUP_WORLD_SIZE": str(spec.nnodes),
        "ROLE_NAME": spec.role,
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(spec.world),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def inherited(spec: Spec, local_rank: int, outer: Mapping[str, str]) -> dict[str, str]:
    """The agent's environment as a worker gets it: without secrets, with torchrun's defaults. Raises UsageError."""
    env = {k: v for k, v in outer.items() if not k.startswith(_SECRETS)}
    if env.get("GRPC_VERBOSITY") == "NONE":
        del env["GRPC_VERBOSITY"]  # ours
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if spec.nproc > 1:
        env.setdefault("OMP_NUM_THREADS", "1")
    if spec.virtual_local_rank:
        env["CUDA_VISIBLE_DEVICES"] = _visible_device(local_rank, outer.get("CUDA_VISIBLE_DEVICES"))
    return env


def _visible_device(local_rank: int, visible: str | None) -> str:
    """The one device of a worker that calls it 0."""
    if visible is None:
        return str(local_rank)
    devices = visible.split(",")
    if local_rank >= len(devices):
        raise UsageError(f"--virtual-local-rank: local rank {local_rank} has no device in CUDA_VISIBLE_DEVICES={visible}")
    return devices[local_rank].strip()


def target(command: Sequence[str]) -> tuple[str, ...]:
    """Script, program, or ``-m`` and module, without the arguments."""
    return tuple(command[: 2 if command[0] == "-m" else 1])


def worker_command(command: Sequence[str], local_rank: int) -> list[str]:
    """Arguments with ``${local_rank}`` filled in, as torchrun does (``$$`` is a dollar sign)."""
    return [Template(part).safe_substitute(local_rank=local_rank) for part in command]
