"""Every flag of ``tmrun run``: torchrun 2.13's, with the same names and defaults, and ours. What they lead to is in ``run``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from tmrun.cli.arguments import Flag, load_file, option
from tmrun.cli.care import Care, care_options

DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
NUMA_MODES = ("node", "socket", "exclusive", "core-complex")
MEANINGLESS = {
    "monitor_interval": "--monitor-interval has no effect: exits are noticed at once",
    "start_method": "--start-method has no effect: every worker is a fresh interpreter",
    "exit_barrier_timeout": "--exit-barrier-timeout has no effect: who finishes early waits for the job's end",
    "event_log_handler": "--event-log-handler has no effect: `tmrun history` and the console tell the job's events",
}
"""Flags that are accepted, and why nothing follows from them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags(Care):
    """The flags as given, before any relation between them is checked."""

    config: str | None
    nnodes: str | None
    nproc_per_node: str
    standby: str | None
    local_nodes: int | None
    node_rank: int | None
    node_name: str | None
    local_addr: str | None
    standalone: bool
    rdzv_backend: str
    rdzv_endpoint: str
    rdzv_conf: str
    job: str | None
    master_addr: str | None
    master_port: int | None
    etcd: str | None
    etcd_members: int | None
    secret_file: str | None
    insecure: bool
    max_restarts: int
    lease_ttl: int
    join_timeout: float | None
    shutdown_timeout: float
    signals_to_handle: str
    monitor_interval: float
    exit_barrier_timeout: float
    module: bool
    no_python: bool
    run_path: bool
    role: str
    virtual_local_rank: bool
    numa_binding: str | None
    start_method: str
    log_dir: str | None
    redirects: str
    tee: str
    local_ranks_filter: str
    duplicate_stdout_filters: str
    duplicate_stderr_filters: str
    log_line_prefix_template: str
    logs_specs: str | None
    event_log_handler: str
    metrics: str | None
    on_event: str
    detach: bool


_OPTIONS = (
    click.option(
        "--config", cls=Flag, ours=True, metavar="FILE", envvar="TMRUN_CONFIG", is_eager=True, callback=load_file,
        help="TOML file with values for these flags. [flag > $TMRUN_<FLAG>, $PET_<FLAG> > file > default]",
    ),
    option("--nnodes", metavar="N|MIN:MAX", help="Active nodes; MAX - MIN more are standbys. [default: 1]"),
    option("--nproc-per-node", default="1", show_default=True, metavar="N|cpu|gpu|xpu|auto", help="Workers a node."),
    option("--standby", ours=True, metavar="N|P%", help="Warm spare nodes beyond --nnodes; P% of nnodes, rounded up. [default: 0]"),
    option("--local-nodes", ours=True, type=click.IntRange(1), help="Run so many nodes on this machine, for trying it out."),
    option("--node-rank", type=click.IntRange(0), help="Which node of the layout this host is. [default: any]"),
    option("--node-name", ours=True, metavar="NAME", help="This host's name in the job. [default: its hostname]"),
    option("--local-addr", metavar="ADDR", help="Address of this host for the others. [default: the one that routes to the store]"),
    option("--label", ours=True, multiple=True, metavar="KEY=VALUE", help="Where this host is, e.g. rack=r1. Repeatable."),
    option("--standalone", is_flag=True, help="Everything on this machine, with a store of its own, whatever else is said."),
    option(
        "--rdzv-backend", default="static", show_default=True, metavar="static|c10d|etcd|etcd-v2",
        help="static, c10d: the host with the endpoint's address runs the store; etcd: the endpoint is one that runs already.",
    ),
    option("--rdzv-endpoint", default="", metavar="HOST[:PORT][,...]", help="Where the store of the job is."),
    option("--rdzv-conf", default="", metavar="K=V[,K=V]", help="join_timeout, last_call_timeout; for etcd: protocol, cacert, cert, key."),
    option("--rdzv-id", "--job", "job", metavar="ID", help="Job id, the same on every host. [default: a new one]"),
    option("--master-addr", metavar="ADDR", help="Host of node rank 0, for --rdzv-backend static. [default: 127.0.0.1]"),
    option("--master-port", type=click.IntRange(1, 65534), help="MASTER_PORT; the store listens one above. [default: 29500 or a free one]"),
    option("--etcd", ours=True, metavar="URL[,URL]", envvar="TMRUN_ETCD_ENDPOINTS", help="Use this etcd; needs --job."),
    option(
        "--etcd-members", ours=True, type=int, metavar="1|3|5",
        help="Size of the embedded store; 3 survive the loss of any one, of several hosts if --rdzv-endpoint names three.",
    ),
    option(
        "--secret-file", ours=True, type=click.Path(exists=True, dir_okay=False),
        help="File with the job's secret, the same on every host; or $TMRUN_SECRET.",
    ),
    option("--insecure", ours=True, is_flag=True, help="Let the embedded store listen on the network without a secret."),
    option(
        "--max-restarts", type=click.IntRange(0), default=0, show_default=True, help="Restarts that errors of the program may cost, in all."
    ),
    option(
        "--lease-ttl", ours=True, type=click.IntRange(2, 300), default=15, show_default=True, metavar="SECONDS",
        help="A silent node is dead after this.",
    ),
    option("--join-timeout", ours=True, type=float, metavar="SECONDS", help="Wait this long for the store and for nodes. [default: 600]"),
    option(
        "--shutdown-timeout", type=click.FloatRange(0), default=30, show_default=True, metavar="SECONDS",
        envvar="TORCH_ELASTIC_SHUTDOWN_TIMEOUT", help="From the first signal to SIGKILL, whoever ends workers.",
    ),
    option(
        "--signals-to-handle", default=DEFAULT_SIGNALS, show_default=True, metavar="LIST",
        help="Signals that are passed to the workers and end the job. SIGUSR1 and SIGUSR2, if not here, are passed on only.",
    ),
    option("--monitor-interval", type=float, default=0.1, hidden=True),
    option("--exit-barrier-timeout", ours=True, type=float, default=300, hidden=True),
    option("-m", "--module", is_flag=True, help="SCRIPT is a module name, as in python -m."),
    option("--no-python", is_flag=True, help="SCRIPT is a program of its own."),
    option("--run-path", is_flag=True, help="SCRIPT is run inside tmrun's interpreter; it always is."),
    option("--role", default="default", show_default=True, help="ROLE_NAME of the workers, and the prefix of their lines."),
    option("--virtual-local-rank", is_flag=True, help="LOCAL_RANK is 0 in every worker, CUDA_VISIBLE_DEVICES its one device."),
    option("--numa-binding", type=click.Choice(NUMA_MODES), help="Run workers on the CPUs near their GPUs."),
    option("--start-method", type=click.Choice(["spawn", "fork", "forkserver"]), default="spawn", hidden=True),
    option("--log-dir", metavar="DIR", help="Folder for logs; /dev/null: no files. [default: a temporary one, with -r or -t]"),
    option("-r", "--redirects", default="0", show_default=True, metavar="STREAMS", help="Into files: 0-3, or 0:3,1:2 by local rank."),
    option("-t", "--tee", default="0", show_default=True, metavar="STREAMS", help="Into files and, with a prefix, to the console."),
    option("--local-ranks-filter", default="", metavar="RANKS", help="Local ranks that the console shows. [default: all]"),
    option("--duplicate-stdout-filters", default="", metavar="LIST", help="Tee'd lines with such a text also go to filtered_stdout.log."),
    option("--duplicate-stderr-filters", default="", metavar="LIST", help="The same for stderr."),
    option(
        "--log-line-prefix-template", ours=True, default="", metavar="TEXT", envvar="TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
        help="Prefix of tee'd lines: ${role_name} ${rank} ${local_rank} ${node} ${time}.",
    ),
    option("--logs-specs", hidden=True),
    option("--event-log-handler", default="null", hidden=True),
    option(
        "--metrics", ours=True, metavar="[HOST:]PORT",
        help="Serve Prometheus metrics of this host's agents there (the next ports with --local-nodes). [default host: 127.0.0.1]",
    ),
    option(
        "--on-event", ours=True, metavar="COMMAND", default="",
        help="Run this for each event of this host's agents, with the event as JSON on standard input; $TMRUN_EVENT_URL: POST it there.",
    ),
    option("--detach", ours=True, is_flag=True, help="Go on in the background, with the output in ./tmrun-JOB.log, once the job is there."),
)  # fmt: skip


def run_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command all flags, in this order."""
    function = care_options(function)
    for decorate in reversed(_OPTIONS):
        function = decorate(function)
    return function
