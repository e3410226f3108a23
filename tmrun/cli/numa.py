"""``--numa-binding``: which CPUs are near the GPU of each worker of this host, as torch itself decides it (``torch.numa.binding``).

torch is asked once, before anything starts, in a process of its own that sees all GPUs of this host: a worker that sees only one cannot
tell how to share the CPUs, and neither the launcher nor a script should find CUDA initialised.

    python -m tmrun.cli.numa MODE COUNT     one line a local rank: 0,1,2,3

May not know: what is done with the answer.
"""

from __future__ import annotations

import subprocess
import sys

from tmrun.core.errors import UsageError


def cpus(mode: str | None, count: int) -> tuple[str, ...]:
    """CPUs of so many workers, comma-separated, by local rank; none without a mode. Raises UsageError with torch's reason."""
    if not mode:
        return ()
    argv = [sys.executable, "-m", __name__, mode, str(count)]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UsageError(f"--numa-binding {mode}: torch cannot tell the CPUs of {count} GPUs of this host: {why}")
    return tuple(done.stdout.split())


def ask(mode: str, count: int) -> list[set[int]]:
    """What torch would bind each of so many local ranks to. Raises whatever torch does where it finds no GPU, RuntimeError for no CPU."""
    from torch.numa import binding

    options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
    found = [binding._get_logical_cpus_to_bind_to(gpu_index=gpu, numa_options=options) for gpu in range(count)]
    if not all(found):
        raise RuntimeError(f"no CPU that this process may use is near GPU {found.index(set())}")
    return found


if __name__ == "__main__":
    for chosen in ask(sys.argv[1], int(sys.argv[2])):
        print(",".join(map(str, sorted(chosen))))
