"""Make this process one that tmrun can move: connect to the agent, catch torch. Happens at a worker's first ``import tmrun``.

May not know: how the script is run.
"""

from __future__ import annotations

import gc
import os
import sys

from tmrun.worker.current import HOLDER


def activate() -> None:
    """Once; again is nothing. Too late when process groups exist already: then nothing is touched, and ``tmrun.join`` says so."""
    if HOLDER.runtime is not None:
        return
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        HOLDER.refused = "tmrun was imported after init_process_group, too late to move this process; import it at the top of the script"
        return
    from tmrun.worker import nccl_environment

    nccl_environment.prepare(os.environ)
    from tmrun.worker import intercept, runtime

    process = HOLDER.runtime = runtime.from_environment()
    process.start()
    intercept.install(process)
    gc.freeze()  # what is imported by now stays: a collection between two runs of the script (half a second else) skips it
