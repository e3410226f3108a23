"""torchrun, and ft_launcher, which descends from it: every worker starts again from a checkpoint, the spare is a waiting agent.

Tuned torchrun: no shared store (with it, gloo and a spare, the job is lost), a dead agent is noticed after 4 s in
place of 15 (an agent's heartbeats may be two intervals apart: with fewer attempts living agents are thrown out, again and again). For
a killed worker no spare waits: its own host starts it again; with a spare three agents restart each other for two places, without end.
Tuned ft_launcher: rank heartbeats watched closely; its rendezvous' keep-alive cannot be set.
"""

from __future__ import annotations

from bench.compare.systems.base import System


class Torchrun(System):
    """c10d rendezvous on node0."""

    venv = "tmrun"  # stock torch; nothing of tmrun is loaded
    script = "restart.py"
    program = "torch.distributed.run"

    @property
    def harmed_by_a_spare(self) -> bool:
        """Whether it does better without one."""
        return self.trial.tuned and self.trial.event == "kill"

    def start_spare(self) -> None:
        """See ``System``."""
        if not self.harmed_by_a_spare:
            super().start_spare()

    def rendezvous(self) -> str:
        """--rdzv-conf."""
        settings = {"join_timeout": 600}
        if self.trial.tuned:
            settings |= {"keep_alive_interval": 1, "keep_alive_max_attempt": 4}
        return ",".join(f"{k}={v}" for k, v in settings.items())

    def flags(self) -> list[str]:
        """What differs from ft_launcher."""
        return []

    def argv(self, name: str) -> list[str]:
        """See ``System``."""
        master = self.lab.address("node0")
        return [
            *(self.python, "-m", self.program, "--nnodes", str(self.trial.nodes), "--nproc-per-node", "1", "--max-restarts", "5"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{master}:{self.port}", "--rdzv-id", "bench"),
            *("--rdzv-conf", f"{self.rendezvous()},is_host={int(name == 'node0')}", "--local-addr", self.lab.address(name)),
            *self.flags(),
            *self.work,
        ]

    def env(self, name: str) -> dict[str, str]:
        """See ``System``."""
        quiet = {"LOGLEVEL": "INFO"}  # tells when a spare waits
        return {**quiet, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if self.trial.tuned else quiet

    def spare_ready(self) -> bool:
        """It is in the rendezvous."""
        spare = self.lab.nodes.get(self.spare_name)
        return spare is None or "Rendezvous'ing worker group" in spare.output()


class FtLauncher(Torchrun):
    """nvidia-resiliency-ext's launcher."""

    venv = "nvrx"
    program = "nvidia_resiliency_ext.fault_tolerance.launcher"
    harmed_by_a_spare = False

    def rendezvous(self) -> str:
        """--rdzv-conf."""
        return "join_timeout=600,upscaling_enabled=False"

    def flags(self) -> list[str]:
        """See ``Torchrun``."""
        common = ["--ft-enable-nic-monitor", "False"]  # for InfiniBand cards
        if not self.trial.tuned:
            return common
        first = 120 if self.trial.compiled != "off" else 30
        watched = {"initial-rank-heartbeat-timeout": first, "rank-heartbeat-timeout": 3, "workload-check-interval": 0.5}
        stop = ("--workers-stop-timeout", "2")
        return [*common, *(x for k, v in watched.items() for x in (f"--ft-{k}", str(v))), *stop]
