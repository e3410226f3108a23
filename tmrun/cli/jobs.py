"""Find a job and connect to its store: by ``--etcd`` and ``--job``, or among the jobs that were launched on this machine.

May not know: what is then asked of the store.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from tmrun.cli.runtime_dir import runtime_root
from tmrun.config import AgentConfig, StoreAccess
from tmrun.core import codec
from tmrun.core.errors import NotFoundError, TmrunError, UsageError
from tmrun.core.keys import JOBS, Keys, job_of
from tmrun.core.membership import Job, fold
from tmrun.store.access import ENV_SECRET, open_store, tls_files, with_tls
from tmrun.store.api import Store
from tmrun.store.endpoints import endpoints
from tmrun.store.secret import issue

F = TypeVar("F", bound=Callable[..., Any])
_RECORD = "job.json"
DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class LocalJob:
    """A job that a launcher on this machine runs."""

    job: str
    pid: int
    access: StoreAccess


def announce(folder: Path, record: LocalJob) -> None:
    """Let other commands on this machine find the job."""
    draft = folder / f".{_RECORD}"
    draft.touch(mode=0o600)
    draft.write_text(codec.encode(record))
    draft.rename(folder / _RECORD)


def local_jobs() -> list[LocalJob]:
    """Jobs whose launcher lives on this machine."""
    found: dict[str, LocalJob] = {}
    for path in sorted(runtime_root().glob(f"*/{_RECORD}")):
        try:
            record = codec.decode(LocalJob, path.read_text())
            os.kill(record.pid, 0)
        except (OSError, codec.CodecError):
            continue
        found.setdefault(record.job, record)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Connection:
    """A store, and the job in it that is meant."""

    store: Store
    keys: Keys

    def read(self) -> Job:
        """The job's protocol state, read now."""
        return fold(self.keys, self.store.list(self.keys.ctl).entries)


def runtime_folders(job: str) -> list[Path]:
    """Runtime folders of the launchers of this machine that run a job."""
    found = []
    for path in sorted(runtime_root().glob(f"*/{_RECORD}")):
        try:
            if codec.decode(LocalJob, path.read_text()).job == job:
                found.append(path.parent)
        except (OSError, codec.CodecError):
            continue
    return found


def own_hosts(job: str) -> list[str]:
    """Names of the nodes that launchers on this machine run for a job. Raises NotFoundError, UsageError."""
    paths = [p for folder in runtime_folders(job) for p in sorted(folder.glob("*.json")) if p.name != _RECORD]
    found = [codec.decode(AgentConfig, p.read_text()).host for p in paths]
    if not found:
        raise NotFoundError(f"no launcher of job {job} runs on this machine")
    if len(found) > 1:
        raise UsageError(f"this machine is several nodes of job {job} ({', '.join(found)}): name the one you mean")
    return found


@contextmanager
def connect(job: str | None, etcd: str | None, deadline_s: float = DEADLINE_S) -> Iterator[Connection]:
    """Connect to the job that is meant. Raises NotFoundError, UsageError, StoreError."""
    with ExitStack() as stack:
        local = choose_local(job) if etcd is None else None
        where = local.access if local else remote(etcd or "", stack)
        store = open_store(where, deadline_s)
        stack.callback(store.close)
        yield Connection(store, Keys(local.job if local else _choose_remote(store, job, where.endpoints)))


def remote(etcd: str, stack: ExitStack) -> StoreAccess:
    """A store named on the command line: TLS files, user and secret come from the environment, as for `tmrun run`."""
    existing = external(etcd)
    secret = os.environ.get(ENV_SECRET, "")
    if not secret or existing.cert:
        return existing
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tmrun-tls-")))
    where = ",".join(part if "://" in part else f"https://{part}" for part in etcd.split(","))
    return with_tls(where, issue(secret, folder, ()))


def external(etcd: str) -> StoreAccess:
    """An etcd that is not ours, with what the environment says about it ($TMRUN_ETCD_USER, _CACERT, _CERT, _KEY)."""
    user, ca, cert, key = (os.environ.get(f"TMRUN_ETCD_{name}", "") for name in ("USER", "CACERT", "CERT", "KEY"))
    endpoints(etcd)  # complain about the flag before anything is started
    access = StoreAccess(etcd, user, ca, cert, key)
    tls_files(access)
    return access


def choose_local(job: str | None) -> LocalJob:
    """The job that is meant, among those of this machine. Raises NotFoundError, UsageError."""
    running = local_jobs()
    names = ", ".join(sorted(r.job for r in running)) or "none"
    matching = [r for r in running if job is None or r.job == job] or [r for r in running if job and r.job.startswith(job)]
    if not matching:
        wanted = f"no job {job!r}" if job else "no job"
        raise NotFoundError(f"{wanted} is running on this machine (running: {names}); for a job elsewhere give --etcd HOST:PORT")
    if len(matching) > 1:
        raise UsageError(f"several jobs are running on this machine: {names}; choose one with --job")
    return matching[0]


def _choose_remote(store: Store, job: str | None, where: str) -> str:
    names = sorted(job_of(kv.key) for kv in store.list(JOBS).entries)
    matching = names if job is None else [n for n in names if n == job] or [n for n in names if n.startswith(job)]
    if len(matching) == 1:
        return matching[0]
    if not matching:
        raise NotFoundError(f"no job {job!r} at {where} (there: {', '.join(names) or 'none'})" if job else f"no job at {where}")
    raise UsageError(f"several jobs at {where}: {', '.join(matching)}; choose one with --job")


def job_options(function: F) -> F:
    """--job and --etcd, as every verb takes them."""
    function = click.option("--job", metavar="JOB", help="Job id or a unique prefix; one running job needs none.")(function)
    return click.option(
        "--etcd", metavar="URL[,URL]", envvar="TMRUN_ETCD_ENDPOINTS", help="Store of the job; default: that of the job on this machine."
    )(function)


def still_running(job: Job) -> None:
    """Raise when the job has ended: nothing can be asked of it."""
    if job.end is not None:
        raise TmrunError(f"job {job.keys.job} has ended ({job.end.state.value}: {job.end.reason})")
