"""``tmrun run --detach``: the launch goes on in the background; its caller hears that it is there, or why it is not.

May not know: what a launch does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import click

from tmrun.cli import jobs
from tmrun.core.errors import UsageError
from tmrun.core.keys import MAX_NAME, name_of

ENV_BEHIND = "TMRUN_BEHIND"
"""Id of the job, in the process that goes on: it does not detach again."""
_LOOK_S = 0.1


def behind() -> str:
    """The job's id, if this process is the one that goes on."""
    return os.environ.get(ENV_BEHIND, "")


def detach(job: str, arguments: list[str]) -> int:
    """Start the same command once more, away from this terminal; returns 0 when other commands find the job, else its exit code.

    Raises UsageError.
    """
    name = f"tmrun-{name_of(job)[:MAX_NAME]}.log"
    try:
        log = Path.cwd() / name
        opened = log.open("ab")
    except OSError as error:
        raise UsageError(f"--detach: its output cannot go to ./{name} ({error.strerror}); start it from another folder") from None
    with opened as out:
        began = out.tell()
        argv, env = [sys.executable, "-m", "tmrun", *arguments], {**os.environ, ENV_BEHIND: job}
        launch = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    try:
        while launch.poll() is None:
            if any(record.pid == launch.pid for record in jobs.local_jobs()):
                click.echo(f"job {job} runs in the background (pid {launch.pid}), output in {log}; `tmrun top`, `tmrun stop`")
                return 0
            time.sleep(_LOOK_S)
    except KeyboardInterrupt:
        launch.terminate()
        launch.wait()
        raise
    with log.open("rb") as said:
        said.seek(began)
        sys.stderr.buffer.write(said.read())
    return launch.returncode if launch.returncode >= 0 else 128 - launch.returncode
