"""``tmrun run``: the flags of a launch, checked once. The flags are in ``flags``, what a launch does in ``launch``."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from tmrun.cli import background, numa
from tmrun.cli.arguments import Command
from tmrun.cli.flags import MEANINGLESS, Flags, run_options
from tmrun.cli.hooks import ENV_URL, Wanted
from tmrun.cli.jobs import external
from tmrun.cli.launch import Launch, Where, launch
from tmrun.cli.own_store import Choice
from tmrun.cli.rendezvous import Meeting, meeting
from tmrun.core import environment, streams
from tmrun.core.errors import UsageError
from tmrun.core.model import Spec
from tmrun.core.planner import standby_count
from tmrun.core.plural import many
from tmrun.core.streams import Output
from tmrun.store.access import ENV_SECRET

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_MAX_JOB = 200
_JOIN_TIMEOUT_S = 600.0


@click.command("run", cls=Command, short_help="Launch a script on this host (and on the others that run the same command).")
@run_options
@click.argument("command_line", metavar="SCRIPT [ARGS]...", nargs=-1, type=click.UNPROCESSED, required=True)
@click.pass_context
def command(ctx: click.Context, /, command_line: tuple[str, ...], **given: Any) -> int:
    """Launch SCRIPT. Where no other host is named everything runs on this machine, with a store of its own.

    Exit code: 0 when all workers succeed; the first failing worker's own code (128+n for a signal); 128+n when signal n ended the launch,
    143 after `tmrun stop`.
    """
    flags = Flags(**given)
    for name, why in MEANINGLESS.items():
        if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT:
            click.echo(f"tmrun: {why}", err=True)
    wanted = checked(flags, command_line)
    if flags.detach and not background.behind():
        return background.detach(wanted.job, sys.argv[1:])
    return launch(wanted)


def checked(flags: Flags, command_line: tuple[str, ...]) -> Launch:
    """The launch that the flags describe. Raises UsageError."""
    _check_script(flags, command_line)
    flags.check_care()
    minimum, spares = sizes(flags)
    meet = meeting(flags, minimum or 1, spares)
    if flags.local_nodes and not meet.alone:
        raise UsageError("--local-nodes runs a whole job on this machine; it cannot be combined with --etcd or --rdzv-endpoint")
    if meet.etcd and not flags.job:
        raise UsageError("--etcd needs --job ID, the same on every host: a shared store can hold several jobs")
    for note in meet.notes:
        click.echo(f"tmrun: {note}", err=True)
    active, local = _local(minimum, spares, flags.local_nodes, alone=meet.alone)
    job = background.behind() or _job("" if flags.standalone else flags.job or "") or ("job" if meet.hosts else f"j-{secrets.token_hex(3)}")
    rank = -1 if flags.node_rank is None else flags.node_rank
    where = Where(local, _name(flags.node_name or "", "--node-name"), flags.local_addr, rank, meet.master_port if rank <= 0 else 0)
    wait_s = flags.join_timeout or meet.seconds("join_timeout") or meet.seconds("timeout") or _JOIN_TIMEOUT_S
    hooks = Wanted(flags.on_event, os.environ.get(ENV_URL, ""))
    hooks.check()
    spec = flags.apply(_spec(flags, meet, active, spares, wait_s, command_line))
    return Launch(
        job, spec, where, _store(flags, meet), flags, wait_s, flags.shutdown_timeout,
        _output(flags), signals(flags.signals_to_handle), numa.cpus(flags.numa_binding, spec.nproc), metrics_address(flags.metrics), hooks,
    )  # fmt: skip


def _spec(flags: Flags, meet: Meeting, active: int, spares: int, wait_s: float, command_line: tuple[str, ...]) -> Spec:
    nproc = workers(flags.nproc_per_node)
    words = (("-m",) if flags.module and not flags.run_path else ()) + command_line
    spec = Spec(active, nproc, spares, words, flags.max_restarts, flags.lease_ttl, node_wait_s=wait_s)
    last_call = meet.seconds("last_call_timeout")
    spec = replace(
        spec,
        join_wait_s=spec.join_wait_s if last_call is None else last_call,
        role=flags.role,
        no_python=flags.no_python and not flags.run_path,
        virtual_local_rank=flags.virtual_local_rank,
    )
    environment.inherited(spec, nproc - 1, os.environ)  # complains about too few devices
    return spec


def _check_script(flags: Flags, command_line: tuple[str, ...]) -> None:
    if flags.no_python and flags.module and not flags.run_path:
        raise UsageError("--no-python and --module exclude each other")
    interpreter = os.environ.get("PYTHON_EXEC")
    if interpreter and shutil.which(interpreter) is None:
        raise UsageError(f"$PYTHON_EXEC {interpreter!r} is no program")
    script = command_line[0]
    if not flags.run_path and (flags.module or flags.no_python):
        return
    if not Path(script).exists():
        raise UsageError(f"script {script!r} does not exist (looked in {Path.cwd()})")
    if Path(script).is_dir() and not (Path(script) / "__main__.py").exists():
        raise UsageError(f"script {script!r} is a folder without a __main__.py (looked in {Path.cwd()})")


def sizes(flags: Flags) -> tuple[int | None, int]:
    """(active nodes as far as --nnodes says, standbys). Raises UsageError."""
    text = flags.nnodes
    if text is None:
        return None, standby_count(flags.standby or "0", 1)
    low, separator, high = text.partition(":")
    if not low.isdigit() or not (high.isdigit() or not separator) or int(low) < 1 or int(high or low) < int(low):
        raise UsageError(f"--nnodes {text!r}: expected a number of nodes, or MIN:MAX")
    more = int(high or low) - int(low)
    if more and flags.standby is not None:
        raise UsageError(f"--nnodes {text} already asks for {many(more, 'standby')}; give --standby or MAX, not both")
    return int(low), more or standby_count(flags.standby or "0", int(low))


def _local(minimum: int | None, spares: int, local_nodes: int | None, *, alone: bool) -> tuple[int, int]:
    """(active nodes, nodes to run on this machine; 0 = this machine is one node of several)."""
    if local_nodes is None:
        active = minimum or 1
        return active, active + spares if alone else 0
    active = minimum if minimum is not None else local_nodes - spares
    if active < 1 or local_nodes < active + spares:
        raise UsageError(f"--local-nodes {local_nodes} is too few for {max(active, 1)} active + {many(spares, 'standby node')}")
    return active, local_nodes


def workers(text: str) -> int:
    """--nproc-per-node: a number, or what this host has of something. Raises UsageError."""
    if text.isdigit() and int(text) > 0:
        return int(text)
    if text == "cpu":
        return len(os.sched_getaffinity(0))
    found = devices(text)
    if found is None:
        raise UsageError(f"--nproc-per-node {text!r}: expected a number above 0, cpu, gpu, xpu or auto")
    if found == 0:
        raise UsageError(f"--nproc-per-node {text}: torch finds none on this host")
    return found


def devices(name: str) -> int | None:
    """How many devices torch finds under this name; None: it does not know the name."""
    import torch

    if name == "gpu":
        return torch.cuda.device_count()
    if name == "xpu":
        return torch.xpu.device_count() if torch.xpu.is_available() else 0
    if name == "auto":
        return torch.accelerator.device_count() if torch.accelerator.is_available() else len(os.sched_getaffinity(0))
    if name == torch._C._get_privateuse1_backend_name() and hasattr(torch, name):
        return int(getattr(torch, name).device_count())
    return None


def _store(flags: Flags, meet: Meeting) -> Choice:
    if meet.etcd:
        existing = external(meet.etcd)
        named = {name: meet.conf[key] for name, key in (("ca", "cacert"), ("cert", "cert"), ("key", "key")) if key in meet.conf}
        return Choice(existing=replace(existing, **named))
    secret = Path(flags.secret_file).read_text().strip() if flags.secret_file else os.environ.get(ENV_SECRET, "")
    choice = Choice(None, meet.hosts, flags.etcd_members or max(1, len(meet.hosts)), secret, flags.insecure)
    choice.check()
    return choice


def metrics_address(text: str | None) -> tuple[str, int] | None:
    """``[HOST:]PORT`` -> (host, port); loopback unless a host is named. Raises UsageError."""
    if not text:
        return None
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"--metrics {text!r}: write PORT or HOST:PORT, IPv6 as [ADDR]:PORT")
    return host or "127.0.0.1", int(port)


def signals(text: str) -> tuple[int, ...]:
    """``SIGTERM,SIGINT`` -> numbers; what this system does not know is told and left out, as by torchrun. Raises UsageError."""
    numbers = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        found = signal.Signals.__members__.get(name)
        if found is None:
            click.echo(f"tmrun: --signals-to-handle {name}: no such signal here, left out; write e.g. SIGTERM,SIGINT", err=True)
            continue
        if found in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
            raise UsageError(f"--signals-to-handle {name!r}: not a signal that can be handled; write e.g. SIGTERM,SIGINT")
        numbers.append(int(found))
    return tuple(numbers)


def _output(flags: Flags) -> Output:
    if flags.log_dir and flags.log_dir != os.devnull and Path(flags.log_dir).exists() and not Path(flags.log_dir).is_dir():
        raise UsageError(f"--log-dir {flags.log_dir!r} is a file")
    if flags.logs_specs:
        raise UsageError("--logs-specs is not supported: its classes replace what tmrun itself does with logs; see --log-dir, -r and -t")
    only = flags.local_ranks_filter
    if only and not re.fullmatch(r"\d+(,\d+)*", only):
        raise UsageError(f"--local-ranks-filter {only!r}: expected local ranks, e.g. 0,1")
    return Output(
        str(Path(flags.log_dir).absolute()) if flags.log_dir else "",
        streams.parse_streams(flags.redirects, "--redirects"),
        streams.parse_streams(flags.tee, "--tee"),
        tuple(int(rank) for rank in only.split(",")) if only else (),
        _needles(flags.duplicate_stdout_filters),
        _needles(flags.duplicate_stderr_filters),
        flags.log_line_prefix_template,
    )


def _needles(text: str) -> tuple[str, ...]:
    """Comma-separated; a doubled comma is one that belongs to the text."""
    return tuple(part.replace("\0", ",") for part in text.replace(",,", "\0").split(",") if part)


def _job(text: str) -> str:
    """What torchrun takes for an id, too: any text that can be shown."""
    if len(text) > _MAX_JOB or not text.isprintable():
        raise UsageError(f"--job {text[:_MAX_JOB]!r}: use characters that can be printed, at most {_MAX_JOB}")
    return text


def _name(text: str, flag: str) -> str:
    if text and not _NAME.fullmatch(text):
        raise UsageError(f"{flag} {text!r}: use letters, digits, '.', '_' and '-', at most 63")
    return text
