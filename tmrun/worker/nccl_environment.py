"""What torch and NCCL have to be told, before they start, so that they let a process live through the loss of a peer.

Torch's default is that a thread of its own (*watchdog*) ends the process when a collective fails or takes too long, and another
(*heartbeat monitor*) when the watchdog itself hangs. Here whoever lives goes on, and tmrun decides who is lost: so both may look, not act.
Each entry says what it keeps torch from; read in torch 2.13's ``ProcessGroupNCCL``. Imports nothing, so that it can be done first.
May not know: torch.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

FORCED = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # the watchdog ends the process (1, 3) or aborts by itself (2); torchrun sets 1
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # the monitor aborts the process when the watchdog waits long, as it may behind an abort
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # the monitor writes a dump and aborts the process when some rank saw a failure
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # the watchdog sleeps four times as long after each failed operation; freeing waits for it
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # the watchdog throws out of its thread, which ends the process
    "TORCH_NCCL_PROPAGATE_ERROR": "0",  # the watchdog asks the store for others' errors
    "TORCH_NCCL_DESYNC_DEBUG": "0",  # turns error handling back on, whatever the first line says
    "NCCL_COMM_SPLIT_SHARE_RESOURCES": "0",  # a group and those split from it are aborted together
}
DEFAULTS = {
    "NCCL_RUNTIME_CONNECT": "1",  # transports and their buffers come with the first collective, not when a communicator is prepared
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",  # a state's parts are meant to go one after the other
}
OLD_NAMES = ("NCCL_ASYNC_ERROR_HANDLING", "NCCL_DESYNC_DEBUG")
"""Torch still reads these beside the new ones."""


def wanted(current: Mapping[str, str]) -> dict[str, str | None]:
    """What to change of an environment; None: remove."""
    changes: dict[str, str | None] = {name: value for name, value in FORCED.items() if current.get(name) != value}
    changes.update({name: value for name, value in DEFAULTS.items() if name not in current})
    changes.update({name: None for name in OLD_NAMES if name in current})
    return changes


def prepare(environment: MutableMapping[str, str]) -> None:
    """Change it."""
    for name, value in wanted(environment).items():
        if value is None:
            del environment[name]
        else:
            environment[name] = value
