"""The etcd key layout: build and parse, nothing else.

    /tmrun/v1/{job}/ctl/...    protocol state; agents watch it
        spec  term  leader  head  end  pause
        members/{host}  obituary/{host}  admin/{host}
        map/{epoch}  comm/{epoch}  migration/{id}  vote/{id}/{host}
        run/{slot}  trouble/{slot}  done/{slot}  doubt/{host}
        op/{id}
    /tmrun/v1/{job}/kv/...     where process groups find each other (c10d's Store); watched only while somebody waits
    /tmrun/v1/{job}/log/...    for people: progress/{host}, folder/{host}, timing/{epoch}/{rank}, events/{writer}/{number}, reason;
        agents never read it
    /tmrun/jobs/{job}          index of jobs

Numbers in keys are padded, so that key order is numeric order. May not know: what the values mean.
"""

from __future__ import annotations

from dataclasses import dataclass

ROOT = "/tmrun/v1/"


JOBS = "/tmrun/jobs/"
"""Index: one key a job, so that finding jobs does not read what is in them."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one job."""

    job: str

    @property
    def root(self) -> str:
        """Prefix of everything of the job."""
        return f"{ROOT}{self.job}/"

    @property
    def ctl(self) -> str:
        """Prefix of the protocol state."""
        return f"{self.root}ctl/"

    @property
    def log(self) -> str:
        """Prefix of what is only for people."""
        return f"{self.root}log/"

    @property
    def spec(self) -> str:
        """What was launched."""
        return f"{self.ctl}spec"

    @property
    def term(self) -> str:
        """Number of the last election."""
        return f"{self.ctl}term"

    @property
    def leader(self) -> str:
        """The coordinator, leased."""
        return f"{self.ctl}leader"

    @property
    def head(self) -> str:
        """The compare-and-swap point."""
        return f"{self.ctl}head"

    @property
    def end(self) -> str:
        """How the job ended."""
        return f"{self.ctl}end"

    @property
    def pause(self) -> str:
        """Automatic replacement is stopped."""
        return f"{self.ctl}pause"

    def member(self, host: str) -> str:
        """A registration, leased."""
        return f"{self.ctl}members/{host}"

    def obituary(self, host: str) -> str:
        """A confirmed death."""
        return f"{self.ctl}obituary/{host}"

    def admin(self, host: str) -> str:
        """What operators want of a host."""
        return f"{self.ctl}admin/{host}"

    def map(self, epoch: int) -> str:
        """A committed map."""
        return f"{self.ctl}map/{epoch:08d}"

    def comm(self, epoch: int) -> str:
        """Bootstrap ids of the communicators that changed."""
        return f"{self.ctl}comm/{epoch:08d}"

    def migration(self, number: int) -> str:
        """A migration."""
        return f"{self.ctl}migration/{number:08d}"

    def vote(self, migration: int, host: str) -> str:
        """A node's answer."""
        return f"{self.ctl}vote/{migration:08d}/{host}"

    def votes(self, migration: int) -> str:
        """Prefix of all answers to a migration."""
        return f"{self.ctl}vote/{migration:08d}/"

    def run(self, slot: int) -> str:
        """Who runs a slot, leased."""
        return f"{self.ctl}run/{slot:06d}"

    def trouble(self, slot: int) -> str:
        """A slot whose workers are gone."""
        return f"{self.ctl}trouble/{slot:06d}"

    def done(self, slot: int) -> str:
        """A slot whose workers ended well."""
        return f"{self.ctl}done/{slot:06d}"

    @property
    def troubles(self) -> str:
        """Prefix of all troubles."""
        return f"{self.ctl}trouble/"

    @property
    def dones(self) -> str:
        """Prefix of all ends of slots."""
        return f"{self.ctl}done/"

    def op(self, op_id: str) -> str:
        """An operator's request."""
        return f"{self.ctl}op/{op_id}"

    def kv(self, key: str) -> str:
        """A key of c10d's Store."""
        return f"{self.root}kv/{key}"

    def doubt(self, host: str) -> str:
        """A lost connection nobody has explained, leased."""
        return f"{self.ctl}doubt/{host}"

    @property
    def index(self) -> str:
        """The job's entry among all jobs."""
        return f"{JOBS}{self.job}"

    @property
    def reason(self) -> str:
        """Why the coordinator does what it does, or waits."""
        return f"{self.log}reason"

    def progress(self, host: str) -> str:
        """How far a node is."""
        return f"{self.log}progress/{host}"

    def logs(self, host: str) -> str:
        """Folder on the host in which the output of its workers is, one folder a local rank."""
        return f"{self.log}folder/{host}"

    def timing(self, epoch: int, rank: int) -> str:
        """A worker's account of a switch."""
        return f"{self.log}timing/{epoch:08d}/{rank:06d}"

    def event(self, writer: str, number: int) -> str:
        """One line of the job's story; ``writer`` is one life of an agent."""
        return f"{self.log}events/{writer}/{number:08d}"

    @property
    def events(self) -> str:
        """Prefix of all events."""
        return f"{self.log}events/"

    def parse(self, key: str) -> tuple[str, tuple[str, ...]]:
        """Key under ctl or log -> (kind, rest), e.g. ``vote``, (``00000003``, ``node1``)."""
        rest = key[len(self.root) :].split("/")
        return rest[1], tuple(rest[2:])
