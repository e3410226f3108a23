"""Forks test processes from one that has torch imported: importing it takes longer than a whole small job runs.

Run as a script it is that process: one JSON request a line on stdin, ``pid`` and later ``pid code`` a line on stdout.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any


class Child:
    """What tests use of a Popen."""

    def __init__(self, pid: int, nursery: Nursery) -> None:
        self.pid, self._nursery = pid, nursery

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self._nursery.codes.get(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        with self._nursery.changed:
            if not self._nursery.changed.wait_for(lambda: self.pid in self._nursery.codes, timeout):
                raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout or 0)
        return self._nursery.codes[self.pid]

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ends just now
                os.kill(self.pid, signal.SIGKILL)


class Nursery:
    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        self.pid = self._process.pid
        self.changed = threading.Condition()
        self.codes: dict[int, int] = {}
        self._born: list[int] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def run(self, script: Path, arguments: list[str], environment: dict[str, str], log: Path, directory: Path) -> Child:
        """Fork, and run a script as ``__main__``; its output goes to ``log``."""
        request = {"script": str(script), "arguments": arguments, "environment": environment, "log": str(log), "directory": str(directory)}
        assert self._process.stdin is not None
        with self.changed:
            count = len(self._born)
            print(json.dumps(request), file=self._process.stdin, flush=True)
            assert self.changed.wait_for(lambda: len(self._born) > count, 120), "the nursery does not answer"
            return Child(self._born[-1], self)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._reader.join(10)
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            pid, *code = map(int, line.split())
            with self.changed:
                if code:
                    self.codes[pid] = code[0]
                else:
                    self._born.append(pid)
                self.changed.notify_all()


def serve() -> None:
    """Until stdin ends; then all children are killed."""
    import torch.distributed.device_mesh
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel
    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    assert len(list(Path("/proc/self/task").iterdir())) == 1, "forking a process with threads"
    living: set[int] = set()
    buffer = b""
    while True:
        if select.select([0], [], [], 0.02)[0]:
            chunk = os.read(0, 1 << 16)
            if not chunk:
                break
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    grow(json.loads(line))
                living.add(pid)
                print(pid, flush=True)
        for pid in list(living):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                living.remove(pid)
                print(pid, os.waitstatus_to_exitcode(status), flush=True)
    for pid in living:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def grow(request: dict[str, Any]) -> None:
    """The child: become a process of its own that runs the script."""
    code = 1
    try:
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.chdir(request["directory"])
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.path[:0] = [p for p in os.environ.get("PYTHONPATH", "").split(":") if p]
        sys.argv = [request["script"], *request["arguments"]]
        runpy.run_path(request["script"], run_name="__main__")
        code = 0
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
