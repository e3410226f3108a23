"""``tmrun doctor``: is this store and this host fit for a job? One line a check, what to do, and an exit code.

Gathers facts; ``core.checks`` judges them.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import resource
import shutil
import socket
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import click

from tmrun import interfaces
from tmrun.cli import jobs, place
from tmrun.config import StoreAccess
from tmrun.core import checks
from tmrun.core.checks import Check, HostFacts, StoreFacts
from tmrun.core.errors import UsageError
from tmrun.store import access as accessing
from tmrun.store.endpoints import endpoints

_MARK = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "bad": ("BAD ", "red")}


@click.command("doctor", short_help="Check the store and this host; what to do about what is wrong.")
@click.argument("job_id", metavar="[JOB]", required=False)
@jobs.job_options
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Form of the output.")
def command(job_id: str | None, job: str | None, etcd: str | None, output: str) -> int:
    """Check the store of the running job, or of --etcd, and this host. Exit code 0: well, 1: warnings, 2: something is bad.

    JSON: {"api_version", "store", "checks": [{"code", "grade", "what", "advice"}]}; codes are stable.
    """
    with ExitStack() as stack:
        where = _access(job_id or job, etcd, stack)
        found = checks.store_checks(_store(where)) if where else []
        found += checks.host_checks(_host(where))
    if output == "json":
        value = {"api_version": checks.API_VERSION, "store": where.endpoints if where else None, "checks": [asdict(c) for c in found]}
        click.echo(json.dumps(value, indent=2))
    else:
        for check in found:
            _show(check)
    return checks.exit_code(found)


def _show(check: Check) -> None:
    text, color = _MARK[check.grade.value]
    click.echo(f"{click.style(text, fg=color)} {check.code}: {check.what}{f'; {check.advice}' if check.advice else ''}")


def _access(job: str | None, etcd: str | None, stack: ExitStack) -> StoreAccess | None:
    """The store that is meant; None: only this host is looked at."""
    if etcd is not None:
        return jobs.remote(etcd, stack)
    if job is None and not jobs.local_jobs():
        return None
    return jobs.choose_local(job).access


def _store(where: StoreAccess) -> StoreFacts:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from tmrun.store.inspect import inspect  # slow to import

    password = os.environ.get(accessing.ENV_PASSWORD) if where.user else None
    facts = inspect(endpoints(where.endpoints), where.user, password, accessing.tls_files(where))
    return replace(facts, tls_days={p: d for p in (where.ca, where.cert) if p and (d := _days_left(Path(p))) is not None})


def _days_left(path: Path) -> float | None:
    from cryptography import x509

    certificates = x509.load_pem_x509_certificates(path.read_bytes())
    now = datetime.datetime.now(datetime.timezone.utc)
    return min((c.not_valid_after_utc - now).total_seconds() / 86400 for c in certificates) if certificates else None


def _host(where: StoreAccess | None) -> HostFacts:
    name = socket.gethostname()
    address, no_route = "", ""
    if where is not None:
        try:
            address = place.address(None, where.endpoints)
        except UsageError as error:
            no_route = str(error)
    version, backends, gpus = _torch()
    return HostFacts(
        hostname=name,
        address=address,
        no_route=no_route,
        interface=interfaces.interface_of(address) or "" if address else "",
        resolved=_resolve(name),
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        torch=version,
        backends=backends,
        gpus=gpus,
        compiler=shutil.which(os.environ.get("CXX", "c++")) or "",
        shm_mb=_shm_mb(),
    )


def _resolve(name: str) -> tuple[str, ...]:
    try:
        return tuple(sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}))
    except OSError:
        return ()


def _shm_mb() -> int:
    try:
        return shutil.disk_usage("/dev/shm").total // 2**20
    except OSError:
        return 0


def _torch() -> tuple[str, tuple[str, ...], int]:
    try:
        version = importlib.metadata.version("torch")
        import torch
        import torch.distributed as dist
    except (ImportError, OSError):  # not there, or its libraries do not load
        return "", (), 0
    if not dist.is_available():
        return version, (), 0
    names = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    return version, tuple(name for name, there in names.items() if there()), torch.cuda.device_count()
