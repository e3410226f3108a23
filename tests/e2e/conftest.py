"""Fixtures of the end-to-end tests: a lab a test, one uninterrupted run a session."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from e2e_lab import DEADLINE_S, GPT, STEPS, WORLD, Lab, Oracle, make_lab


@pytest.fixture
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A lab that must be clean at the end: no process, no file of ours. Short path: unix sockets are limited to ~100 bytes."""
    lab = make_lab(tmp_path_factory.mktemp("e2e"))
    try:
        yield lab
        lab.go_fast()  # also after a failure: nobody has to wait for a slow job
        for launch in lab.launches:
            launch.wait(DEADLINE_S)
        end = time.monotonic() + 30
        while lab.leftovers() and time.monotonic() < end:
            time.sleep(0.1)
        assert lab.leftovers() == []
    finally:
        for index in range(len(lab.launches)):
            print(f"--- launch {index}\n{lab.output(index)}")  # pytest shows it only if the test failed
        lab.close()


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """The same training under torchrun, never interrupted."""
    lab = make_lab(tmp_path_factory.mktemp("oracle"))
    lab.go_fast()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD)]
    argv = [*torchrun, str(GPT), "--steps", str(STEPS), "--log-losses", str(lab.losses)]
    done = subprocess.run(argv, env=lab.environment(), text=True, capture_output=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("final parameters sha256")]
    return Oracle(lab.read_losses(), line.split()[-1])
