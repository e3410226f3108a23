"""``tmrun run``: the flags of a launch, checked once. What a launch does is in ``launch``."""

from __future__ import annotations

import os
import re
import secrets
import socket
from pathlib import Path

import click

from tmrun.cli import slurm
from tmrun.cli.hooks import ENV_URL, Wanted
from tmrun.cli.jobs import external
from tmrun.cli.launch import Launch, Where, launch
from tmrun.cli.own_store import Choice
from tmrun.cli.place import split_endpoint
from tmrun.core.errors import UsageError
from tmrun.core.model import Spec
from tmrun.core.planner import standby_count
from tmrun.store.access import ENV_SECRET

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@click.command(
    "run",
    short_help="Launch a script on this host (and on the others that run the same command).",
    context_settings={"allow_interspersed_args": False, "token_normalize_func": lambda t: t.replace("_", "-")},
)
@click.option("--nnodes", type=click.IntRange(1), default=None, help="Active nodes. [default: 1]")
@click.option("--nproc-per-node", type=click.IntRange(1), default=1, show_default=True, help="Workers a node.")
@click.option(
    "--standby", default="0", show_default=True, metavar="N|P%", help="Warm spare nodes beyond --nnodes; P% of nnodes, rounded up."
)
@click.option("--local-nodes", type=click.IntRange(1), help="Run so many nodes on this machine, for trying it out.")
@click.option("--etcd", metavar="URL[,URL]", envvar="TMRUN_ETCD_ENDPOINTS", help="Use this etcd; needs --job.")
@click.option(
    "--rdzv-endpoint", metavar="HOST[:PORT][,...]", help="The host with this address runs the job's store, the others connect to it."
)
@click.option(
    "--etcd-members",
    type=int,
    metavar="1|3|5",
    help="Size of the embedded store; 3 survive the loss of any one, of several hosts if --rdzv-endpoint names three.",
)
@click.option(
    "--secret-file",
    type=click.Path(exists=True, dir_okay=False),
    help="File with the job's secret, the same on every host; or $TMRUN_SECRET.",
)
@click.option("--insecure", is_flag=True, help="Let the embedded store listen on the network without a secret.")
@click.option("--job", "--rdzv-id", "job", metavar="ID", help="Job id, the same on every host. [default: a new one]")
@click.option("--node-name", metavar="NAME", help="This host's name in the job. [default: its hostname]")
@click.option("--local-addr", metavar="ADDR", help="Address of this host for the others. [default: the one that routes to the store]")
@click.option("--label", multiple=True, metavar="KEY=VALUE", help="Where this host is, e.g. rack=r1. Repeatable.")
@click.option(
    "--max-restarts", type=click.IntRange(0), default=0, show_default=True, help="Restarts that an error of the program itself may cost."
)
@click.option(
    "--lease-ttl", type=click.IntRange(2, 300), default=15, show_default=True, metavar="SECONDS", help="A silent node is dead after this."
)
@click.option(
    "--join-timeout", type=float, default=600, show_default=True, metavar="SECONDS", help="Wait this long for the store and for nodes."
)
@click.option("--shutdown-timeout", type=float, default=30, show_default=True, metavar="SECONDS", help="From SIGTERM to SIGKILL.")
@click.option(
    "--metrics",
    metavar="[HOST:]PORT",
    envvar="TMRUN_METRICS",
    help="Serve Prometheus metrics of this host's agents there (the next ports with --local-nodes). [default host: 127.0.0.1]",
)
@click.option(
    "--on-event",
    metavar="COMMAND",
    envvar="TMRUN_ON_EVENT",
    default="",
    help="Run this for each event of this host's agents, with the event as JSON on standard input; $TMRUN_EVENT_URL: POST it there.",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module name, as in python -m.")
@click.argument("command_line", metavar="SCRIPT [ARGS]...", nargs=-1, type=click.UNPROCESSED, required=True)
def command(
    nnodes: int | None,
    nproc_per_node: int,
    standby: str,
    local_nodes: int | None,
    etcd: str | None,
    rdzv_endpoint: str | None,
    etcd_members: int | None,
    secret_file: str | None,
    insecure: bool,
    job: str | None,
    node_name: str | None,
    local_addr: str | None,
    label: tuple[str, ...],
    max_restarts: int,
    lease_ttl: int,
    join_timeout: float,
    shutdown_timeout: float,
    metrics: str | None,
    on_event: str,
    module: bool,
    command_line: tuple[str, ...],
) -> int:
    """Launch SCRIPT. Without --etcd or --rdzv-endpoint everything runs on this machine, with a store of its own.

    Exit code: 0 when all workers succeed; the first failing worker's own code (128+n for a signal); 130 after Ctrl-C; 143 after
    `tmrun stop`.
    """
    _check_script(command_line, module)
    if etcd and rdzv_endpoint:
        raise UsageError("--etcd and --rdzv-endpoint exclude each other: the first names a running etcd, the second starts one")
    if local_nodes and (etcd or rdzv_endpoint):
        raise UsageError("--local-nodes runs a whole job on this machine; it cannot be combined with --etcd or --rdzv-endpoint")
    if etcd and not job:
        raise UsageError("--etcd needs --job ID, the same on every host: a shared store can hold several jobs")
    spares = standby_count(standby, nnodes or 1)
    active, local = _sizes(nnodes, spares, local_nodes, alone=not etcd and not rdzv_endpoint)
    spec = Spec(
        active, nproc_per_node, spares, (("-m",) if module else ()) + command_line, max_restarts, lease_ttl, node_wait_s=join_timeout
    )
    where = Where(local, _name(node_name or socket.gethostname(), "--node-name"), local_addr)
    store = _store(etcd, rdzv_endpoint, etcd_members, secret_file, insecure)
    name = _name(job or ("job" if rdzv_endpoint else f"j-{secrets.token_hex(3)}"), "--job")
    hooks = Wanted(on_event, os.environ.get(ENV_URL, ""))
    hooks.check()
    labels = slurm.labels(os.environ) | _labels(label)
    return launch(Launch(name, spec, where, store, labels, join_timeout, shutdown_timeout, metrics_address(metrics), hooks))


def _check_script(command_line: tuple[str, ...], module: bool) -> None:
    script = command_line[0]
    if not module and not Path(script).is_file():
        what = "is a folder, not a file" if Path(script).is_dir() else "does not exist"
        raise UsageError(f"script {script!r} {what} (looked in {Path.cwd()})")


def _sizes(nnodes: int | None, spares: int, local_nodes: int | None, *, alone: bool) -> tuple[int, int]:
    """(active nodes, nodes to run on this machine; 0 = this machine is one node of several)."""
    if local_nodes is None:
        active = nnodes or 1
        return active, active + spares if alone else 0
    active = nnodes if nnodes is not None else local_nodes - spares
    if active < 1 or local_nodes < active + spares:
        raise UsageError(f"--local-nodes {local_nodes} is too few for {max(active, 1)} active + {spares} standby nodes")
    return active, local_nodes


def _store(etcd: str | None, rdzv_endpoint: str | None, members: int | None, secret_file: str | None, insecure: bool) -> Choice:
    if etcd:
        return Choice(existing=external(etcd))
    hosts = tuple(split_endpoint(part) for part in rdzv_endpoint.split(",")) if rdzv_endpoint else ()
    secret = Path(secret_file).read_text().strip() if secret_file else os.environ.get(ENV_SECRET, "")
    choice = Choice(None, hosts, members or max(1, len(hosts)), secret, insecure)
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


def _name(text: str, flag: str) -> str:
    if not _NAME.fullmatch(text):
        raise UsageError(f"{flag} {text!r}: use letters, digits, '.', '_' and '-', at most 63")
    return text


def _labels(given: tuple[str, ...]) -> dict[str, str]:
    labels = {}
    for item in given:
        key, separator, value = item.partition("=")
        if not separator or not key:
            raise UsageError(f"--label {item!r}: expected KEY=VALUE, e.g. rack=r1")
        labels[key] = value
    return labels
