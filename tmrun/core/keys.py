"""The etcd key layout: build and parse, nothing else.

    /tmrun/v1/{job}/ctl/...    protocol state; the coordinator watches all of it
        job/...                what every agent watches
            spec  term  leader  head  end  notice  pause
            map/{epoch}  comm/{epoch}  migration/{id}  admin/{host}  op/{id}
        node/{host}/...        of which each node has one; only the coordinator and the node itself watch it
            member  obituary  vote  doubt  stall  eviction  leaving  fault
        slot/{slot}/...        of which each slot has one; only the coordinator and who holds, leaves or joins the slot watch it
            run  trouble  done
    /tmrun/v1/{job}/kv/...     where process groups find each other (c10d's Store); watched only while somebody waits
    /tmrun/v1/{job}/log/...    for people: progress/{host}, folder/{host}, timing/{epoch}/{rank}, events/{writer}/{number},
        remark/reason, remark/overdue, remark/lag/{host}, failures/{epoch}/{rank}; agents never read it
    /tmrun/jobs/{job}          index of jobs

With N nodes, a key of each node below ``job/`` would be N events to N watchers at every migration: that is why there are three places.
Numbers in keys are padded, so that key order is numeric order; a job's id is percent-encoded where it has to be.
May not know: what the values mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import quote, unquote

ROOT = "/tmrun/v1/"


JOBS = "/tmrun/jobs/"
"""Index: one key a job, so that finding jobs does not read what is in them."""


MAX_NAME = 100
"""So much of a job's id is in the names of files; they have to stay below 255 bytes."""


@lru_cache
def name_of(job: str) -> str:
    """A job's id as a part of keys and of file names: itself, unless it has other characters than letters, digits and ``._-~``."""
    return quote(job, safe="")


def job_of(index: str) -> str:
    """Key in the index of jobs -> the job's id."""
    return unquote(index.removeprefix(JOBS))


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one job."""

    job: str

    @property
    def root(self) -> str:
        """Prefix of everything of the job."""
        return f"{ROOT}{name_of(self.job)}/"

    @property
    def ctl(self) -> str:
        """Prefix of the protocol state."""
        return f"{self.root}ctl/"

    @property
    def common(self) -> str:
        """Prefix of what every agent watches."""
        return f"{self.ctl}job/"

    def node(self, host: str) -> str:
        """Prefix of what there is of one node."""
        return f"{self.ctl}node/{host}/"

    def slot(self, slot: int) -> str:
        """Prefix of what there is of one slot."""
        return f"{self.ctl}slot/{slot:06d}/"

    @property
    def log(self) -> str:
        """Prefix of what is only for people."""
        return f"{self.root}log/"

    @property
    def spec(self) -> str:
        """What was launched."""
        return f"{self.common}spec"

    @property
    def term(self) -> str:
        """Number of the last election."""
        return f"{self.common}term"

    @property
    def leader(self) -> str:
        """The coordinator, leased."""
        return f"{self.common}leader"

    @property
    def head(self) -> str:
        """The compare-and-swap point."""
        return f"{self.common}head"

    @property
    def end(self) -> str:
        """How the job ended."""
        return f"{self.common}end"

    @property
    def notice(self) -> str:
        """What the coordinator tells all agents of each other."""
        return f"{self.common}notice"

    @property
    def pause(self) -> str:
        """Automatic replacement is stopped."""
        return f"{self.common}pause"

    def member(self, host: str) -> str:
        """A registration, leased."""
        return f"{self.node(host)}member"

    def obituary(self, host: str) -> str:
        """A confirmed death."""
        return f"{self.node(host)}obituary"

    def admin(self, host: str) -> str:
        """What operators want of a host."""
        return f"{self.common}admin/{host}"

    @property
    def maps(self) -> str:
        """Prefix of all maps."""
        return f"{self.common}map/"

    def map(self, epoch: int) -> str:
        """A committed map."""
        return f"{self.common}map/{epoch:08d}"

    def comm(self, epoch: int) -> str:
        """Bootstrap ids of the communicators that changed."""
        return f"{self.common}comm/{epoch:08d}"

    def migration(self, number: int) -> str:
        """A migration."""
        return f"{self.common}migration/{number:08d}"

    def vote(self, host: str) -> str:
        """A node's answer to the last migration that asked it."""
        return f"{self.node(host)}vote"

    def run(self, slot: int) -> str:
        """Who runs a slot, leased."""
        return f"{self.slot(slot)}run"

    def trouble(self, slot: int) -> str:
        """A slot whose workers are gone."""
        return f"{self.slot(slot)}trouble"

    def done(self, slot: int) -> str:
        """A slot whose workers ended well."""
        return f"{self.slot(slot)}done"

    def op(self, op_id: str) -> str:
        """An operator's request."""
        return f"{self.common}op/{op_id}"

    def kv(self, key: str) -> str:
        """A key of c10d's Store."""
        return f"{self.root}kv/{key}"

    def doubt(self, host: str) -> str:
        """A lost connection nobody has explained, leased."""
        return f"{self.node(host)}doubt"

    def leaving(self, host: str) -> str:
        """A drained node that has not said yet that its processes are gone."""
        return f"{self.node(host)}leaving"

    def stall(self, host: str) -> str:
        """How its workers look that make no progress, leased."""
        return f"{self.node(host)}stall"

    def eviction(self, host: str) -> str:
        """An order to end workers that keep the job waiting."""
        return f"{self.node(host)}eviction"

    def fault(self, host: str) -> str:
        """What an operator does to it on purpose."""
        return f"{self.node(host)}fault"

    @property
    def index(self) -> str:
        """The job's entry among all jobs."""
        return f"{JOBS}{name_of(self.job)}"

    @property
    def remarks(self) -> str:
        """Prefix of what agents remark on the job, for people."""
        return f"{self.log}remark/"

    @property
    def reason(self) -> str:
        """Why the coordinator does what it does, or waits."""
        return f"{self.remarks}reason"

    @property
    def overdue(self) -> str:
        """Number of the migration that takes too long by the coordinator's clock; 0: none."""
        return f"{self.remarks}overdue"

    def lag(self, host: str) -> str:
        """How long a node waits for the store, if that is long."""
        return f"{self.remarks}lag/{host}"

    def progress(self, host: str) -> str:
        """How far a node is."""
        return f"{self.log}progress/{host}"

    @property
    def receivings(self) -> str:
        """Prefix of how much state joiners have received."""
        return f"{self.log}receiving/"

    def receiving(self, host: str) -> str:
        """How much state a node's joiners have received."""
        return f"{self.receivings}{host}"

    def logs(self, host: str) -> str:
        """Folder on the host in which the output of its workers is, one folder a local rank."""
        return f"{self.log}folder/{host}"

    @property
    def progresses(self) -> str:
        """Prefix of all nodes' progress."""
        return f"{self.log}progress/"

    def timings(self, epoch: int | None = None) -> str:
        """Prefix of the workers' accounts, of one switch or of all."""
        return f"{self.log}timing/" if epoch is None else f"{self.log}timing/{epoch:08d}/"

    def timing(self, epoch: int, rank: int) -> str:
        """A worker's account of a switch."""
        return f"{self.timings(epoch)}{rank:06d}"

    def failure(self, epoch: int, rank: int) -> str:
        """What is known of a worker's end."""
        return f"{self.failures}{epoch:08d}/{rank:06d}"

    @property
    def failures(self) -> str:
        """Prefix of all ends of workers."""
        return f"{self.log}failures/"

    def event(self, writer: str, number: int) -> str:
        """One line of the job's story; ``writer`` is one life of an agent."""
        return f"{self.log}events/{writer}/{number:08d}"

    @property
    def events(self) -> str:
        """Prefix of all events."""
        return f"{self.log}events/"

    def parse(self, key: str) -> tuple[str, tuple[str, ...]]:
        """Key under ctl or log -> (kind, what identifies it), e.g. ``vote``, (``node1``,)."""
        place, kind, *rest = key[len(self.root) :].split("/")
        if place != "ctl":
            return kind, tuple(rest)
        if kind == "job":
            return rest[0], tuple(rest[1:])
        return rest[1], (rest[0],)
