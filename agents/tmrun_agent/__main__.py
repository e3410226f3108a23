"""``python -m tmrun_agent CONFIG``: assemble an agent, run it, leave nothing behind.

May not know: what an agent decides.
"""

from __future__ import annotations

import os
import signal
import sys
import uuid
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tmrun import __version__, procs
from tmrun.beacon import Beacon
from tmrun.config import AgentConfig, beacon_path
from tmrun.core import codec, node, watchdog
from tmrun.core.errors import NotFoundError, StoreError, TmrunError
from tmrun.core.keys import Keys
from tmrun.core.model import Host, Incarnation, Member, Spec
from tmrun.store.access import open_store
from tmrun.store.api import Store
from tmrun.store.etcd import boottime
from tmrun_agent import timers
from tmrun_agent.effects import socket_path
from tmrun_agent.feeders import Interrupted, LeaseLost, StoreMoved
from tmrun_agent.health import Health
from tmrun_agent.ipc import WorkerServer
from tmrun_agent.lease import Lease, enter
from tmrun_agent.logs import Logs
from tmrun_agent.loop import Agent, Inbox
from tmrun_agent.master import MasterStore
from tmrun_agent.metrics import Metrics
from tmrun_agent.notices import Notices, sources
from tmrun_agent.patience import Patience
from tmrun_agent.processes import Processes
from tmrun_agent.publisher import Publisher
from tmrun_agent.rendezvous import Rendezvous
from tmrun_agent.views import Views

STORE_DEADLINE_S = 3.0
"""Longest wait for the store in the loop; the fence has a thread of its own."""


def main(argv: list[str]) -> int:
    """Run one agent until its job ends."""
    config = AgentConfig.load(Path(argv[1]))
    procs.die_with_parent(config.parent_pid)
    store = open_store(config.store, STORE_DEADLINE_S)
    try:
        return _serve(config, store)
    except TmrunError as error:
        print(f"tmrun: {config.host}: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        store.close()


def heed(inbox: Inbox) -> None:
    """Signals that ask for the agent's end are told to the loop."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda n, _: inbox.put(Interrupted(n)))
    for number in (signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # not SIG_IGN, which the workers would inherit
            signal.signal(number, lambda *_: None)  # the launcher decides what Ctrl-C means
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)  # until there are workers to pass it on to


def _serve(config: AgentConfig, store: Store) -> int:
    keys = Keys(config.job)
    inbox = Inbox()
    heed(inbox)
    patience = Patience(config.host, inbox, config.store_wait_s)
    launched = patience.ask(lambda: store.get(keys.spec))
    if launched is None:
        raise NotFoundError(f"job {config.job} is not in its store any more: it has ended, and somebody else cleared it away")
    spec = codec.decode(Spec, launched.value)
    life = uuid.uuid4().hex[:12]
    publisher = Publisher(store, keys, Host(config.host), life)
    server = WorkerServer(Path(socket_path(config)), inbox.put, Rendezvous(store, keys).serve)
    lease = Lease(store, spec.lease_ttl_s, lambda number: inbox.put(LeaseLost(number)), boottime)
    master = MasterStore(config.address, config.master_port, publisher.event)
    member = Member(Host(config.host), Incarnation(life), config.address, os.getpid(), __version__, labels=config.labels)
    member = replace(member, node_rank=config.node_rank, ports=master.ports, witness=config.witness, store_members=config.store_members)
    logs = Logs(config.output, config.job, config.host, Path(config.runtime_dir), publisher.event, publisher.logs)
    processes = Processes(inbox.put, config.grace_s, () if config.witness_fd < 0 else (config.witness_fd,))
    metrics = Metrics(config.job, Host(config.host))
    shown = beacon_path(config.runtime_dir, config.host)
    beacon = Beacon.attach(str(shown) if shown.exists() else None)  # a launcher of another kind may not look at it
    health = Health(Path(config.runtime_dir), config.host, watchdog.limits(spec.hang_timeout), inbox.put)

    pipe = Path(config.runtime_dir) / f"{config.host}.timers"
    file_timers = timers.from_environment(pipe, processes.signal_one, health.waits, processes.worker_of)

    try:
        granted = patience.ask(lambda: enter(lease, keys, member, publisher.event, patience.pause))
        if config.metrics:
            publisher.event(f"{config.host}: {metrics.serve(config.metrics)}")
        Notices(sources(config.notices), inbox.put, publisher.event).start()
        views = Views(store, keys, config.host, lambda: inbox.put(StoreMoved()))
        agent = Agent(
            config=config,
            keys=keys,
            store=store,
            lease=lease,
            member=member,
            views=views,
            publisher=publisher,
            inbox=inbox,
            processes=processes,
            server=server,
            logs=logs,
            master=master,
            metrics=metrics,
            health=health,
            beacon=beacon,
            file_timers=file_timers,
            patience_s=spec.node_wait_s,
            node=node.Node(member.seat, granted),
        )
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda n, _: agent.pass_on(n))
        try:
            return agent.run()
        finally:
            agent.preload.close()
    finally:
        processes.close()
        logs.close()
        master.close()
        server.close()
        metrics.close()
        publisher.close()
        with suppress(StoreError):  # it runs out by itself
            lease.release()


if __name__ == "__main__":
    sys.exit(main(sys.argv))
