"""What a standby's warmth is worth: seconds from "take this rank" to "ready to receive its state", process by process.

    python bench/standby.py ready [--compile] [--repeats 3] [--d-model 64] [--layers 2]
    python bench/standby.py roles [--repeats 3]          # ... of another stage of a compiled pipeline, rehearsed before or not
    python bench/standby.py pauses [--repeats 3]         # kills and drains of whole launches: what each part takes off the pause
    python bench/standby.py steps [--seconds 20]         # the job's step time while a standby rehearses
    python bench/standby.py values                       # rehearsals on recorded and on made-up values

``ready``: one real worker process under the tests' agent (same socket and messages as the real one). It is told to take rank 1, and is
ready when it enters the construction of the new communicators: script at the loop, three steps rehearsed. cold: a new process; imported:
one forked with torch imported; rehearsed: a parked standby, of this rank or of another one. With ``--compile``, "cold" has an empty
Inductor cache and all others the one that it filled, but for the one that live ranks with another cache have sent theirs
(TMRUN_SHARE_COMPILED).
``roles``: two stages of different size (tests/worker/matrix.py), each rank with a cache of its own.
``pauses``: 2 nodes of 2 processes, ``pause_s`` of ``tmrun history``.
``values``: jobs of tests/worker/matrix.py record every tensor; then a standby rehearses with that tape, and one without.
``steps``: the job pinned to one core, the standby's node to another; the median step before, during and after a rehearsal.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "worker"))
PACED = ROOT / "tests" / "worker" / "paced_gpt.py"
RANK = 1
PATIENCE_S = 600.0
READY = ("cold", "imported", "rehearsed another rank, script again", "rehearsed another rank, in place", "rehearsed this rank")


def main() -> None:
    """Run, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["ready", "roles", "pauses", "steps", "values"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--d-model", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20)
    args = parser.parse_args()
    print({"ready": ready, "roles": other_roles, "pauses": pauses, "steps": steps, "values": values}[args.what](args))


# -- one process --------------------------------------------------------------------------------------------------------------------
def ready(args: argparse.Namespace) -> str:
    """Markdown table of ``until_ready``."""
    from nursery import Nursery

    nursery, rows = Nursery(), []
    with tempfile.TemporaryDirectory(prefix="tmrun-standby-") as cache:
        for mode in READY:
            if args.compile and mode == "cold":
                rows.append(("cold, empty compile cache", [until_ready(mode, args, nursery, cache)]))
                rows.append(("cold, empty cache, given what live ranks compiled", [until_given(args, cache) for _ in range(args.repeats)]))
            rows.append((mode, [until_ready(mode, args, nursery, cache) for _ in range(args.repeats)]))
    nursery.close()
    lines = [f"GPT d_model {args.d_model}, {args.layers} layers, {'compiled' if args.compile else 'eager'}, {os.cpu_count()} cores", ""]
    lines += ["| process | seconds, median | of |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {m} | {statistics.median(s):.2f} | {', '.join(f'{x:.2f}' for x in s)} |" for m, s in rows)])


def until_ready(mode: str, args: argparse.Namespace, nursery: Any, cache: str) -> float:
    """Seconds, once."""
    from cluster import Cluster

    from tmrun import wire

    flags = ["--steps", "100", "--d-model", str(args.d_model), "--layers", str(args.layers), *(["--compile"] if args.compile else [])]
    environment = {"TORCHINDUCTOR_CACHE_DIR": cache, "TEST_ON_ROLE": "none" if "again" in mode else "given"}
    with tempfile.TemporaryDirectory(prefix="tmrun-standby-") as folder:
        cluster = Cluster(Path(folder), 2, flags, environment, PACED)
        cluster.nursery = nursery if mode == "imported" else None
        try:
            if "rehearsed" in mode:
                worker = cluster.standby(0 if "another" in mode else RANK)
                cluster.agent.wait(lambda: any(isinstance(m, wire.Warm) for m in worker.channel.messages), PATIENCE_S, "warm")
                time.sleep(0.5)
                took = until_entered(cluster, RANK, lambda: worker)
            else:
                took = until_entered(cluster, RANK, lambda: cluster.standby(RANK))
        finally:
            cluster.close()
    print(f"{mode}: {took:.2f} s", file=sys.stderr, flush=True)
    return took


def until_given(args: argparse.Namespace, cache: str) -> float:
    """Seconds of a cold process whose cache is empty, while two ranks train that have shared what they compiled."""
    from cluster import Cluster

    flags = ["--steps", "500", "--d-model", str(args.d_model), "--layers", str(args.layers), "--compile"]
    with tempfile.TemporaryDirectory(prefix="tmrun-standby-") as folder:
        environment = {"TORCHINDUCTOR_CACHE_DIR": cache, "TMRUN_SHARE_COMPILED": "1", "TEST_PACE_S": "0.5"}
        cluster = Cluster(Path(folder), 2, flags, environment, PACED)
        try:
            cluster.start(at_once=True)
            cluster.agent.wait(
                lambda: any(k.startswith("compiled/") and k.endswith("/chunks") for k in cluster.agent._store), PATIENCE_S, "shared"
            )
            time.sleep(2)
            took = until_entered(cluster, RANK, lambda: cluster.standby(RANK, TORCHINDUCTOR_CACHE_DIR=f"{folder}/own"))
        finally:
            cluster.close()
    print(f"given what live ranks compiled: {took:.2f} s", file=sys.stderr, flush=True)
    return took


def until_entered(cluster: Any, rank: int, standby: Callable[[], Any]) -> float:
    """Seconds from the start of this, the order to take ``rank`` included, until it connects."""
    from tmrun import wire

    began = time.monotonic()
    standby().channel.send(wire.Prepare(1, wire.Kind.FAILURE, 2, (rank,), rank, 1))
    cluster.agent.wait(lambda: "m1/entered" in cluster.agent._store, PATIENCE_S, "ready")
    return time.monotonic() - began


def other_roles(args: argparse.Namespace) -> str:
    """Markdown table: a standby of stage 1 is needed as stage 0."""
    rows = []
    for name, wait_s in (("never rehearsed", ""), ("rehearsed beside its own", "300")):
        rows.append((name, [until_other_role(wait_s) for _ in range(args.repeats)]))
        print(f"{name}: {rows[-1][1]}", file=sys.stderr, flush=True)
    lines = ["| the other stage, compiled | seconds, median | of |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {n} | {statistics.median(s):.2f} | {', '.join(f'{x:.2f}' for x in s)} |" for n, s in rows)])


def until_other_role(wait_s: str) -> float:
    """Seconds from the order until it connects. ``wait_s``: how long roles are waited for; empty, none is known."""
    from cluster import Cluster
    from trials import SCRIPT

    from tmrun import wire

    with tempfile.TemporaryDirectory(prefix="tmrun-standby-") as folder:
        environment = {"TEST_MODE": "pp", "TEST_UNEVEN": "1", "TEST_COMPILE": "1", "TEST_PACE_S": "0.1", "LOCAL_WORLD_SIZE": "1"}
        cluster = Cluster(Path(folder), 2, ["--steps", "3000"], {**environment, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/live"}, SCRIPT)
        more = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/own", **({"TMRUN_RECORD_WAIT_S": wait_s} if wait_s else {})}
        try:
            standby = cluster.standby(1, **more)
            if not wait_s:
                cluster.expect(standby, wire.Warm)
            cluster.start(at_once=True)
            cluster.reach(4)
            told = lambda: [m for m in standby.channel.messages if isinstance(m, wire.Warm)]  # noqa: E731
            cluster.agent.wait(lambda: len(told()) == (2 if wait_s else 1), PATIENCE_S, "warm")
            time.sleep(1)
            return until_entered(cluster, 0, lambda: standby)
        finally:
            cluster.close()


# -- whole launches -----------------------------------------------------------------------------------------------------------------
def pauses(args: argparse.Namespace) -> str:
    """Markdown table: what is left of the pause with each part."""
    rows = []
    cases: tuple[tuple[str, int, dict[str, str], Callable[[Job], None]], ...] = (
        ("kill, no standby: the state is not loaded but sent by a replica, to new processes", 0, {}, kill),
        ("kill, a standby that rehearsed another rank, its script again", 1, {"TEST_ON_ROLE": "none"}, kill),
        ("kill, the same, in place", 1, {}, kill),
        ("drain: communicators too are built while training goes on", 1, {}, drain),
    )
    for name, standby, environment, event in cases:
        found = []
        for _ in range(args.repeats):
            with launched(standby, environment) as job:
                event(job)
                found.append(job.last())
        print(f"{name}: {found}", file=sys.stderr, flush=True)
        rows.append((name, found))
    phases = ("pause_s", "detect_s", "bind_s", "comm_s", "state_s", "redo_s")
    head = ["| | " + " | ".join(p.removesuffix("_s") for p in phases) + " |", "|---" * (len(phases) + 1) + "|"]
    middle = lambda found, p: f"{statistics.median(f[p] for f in found):.2f}"  # noqa: E731
    return "\n".join([*head, *(f"| {n} | " + " | ".join(middle(f, p) for p in phases) + " |" for n, f in rows)])


class Job:
    """A launch of two nodes of two processes."""

    def __init__(self, process: subprocess.Popen[bytes], environment: dict[str, str], output: IO[bytes]) -> None:
        self.process, self.environment, self.output = process, environment, output

    def cli(self, *arguments: str) -> str:
        """Output of a verb; empty when it fails."""
        argv = [sys.executable, "-m", "tmrun", *arguments, "--job", "bench"]
        return subprocess.run(argv, env=self.environment, text=True, capture_output=True, check=False).stdout

    def wait(self, condition: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        """Until the status satisfies."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end and self.process.poll() is None:
            text = self.cli("status", "-o", "json")
            value: dict[str, Any] = json.loads(text) if text else {}
            if value and condition(value):
                return value
            time.sleep(0.2)
        self.output.seek(0)
        raise SystemExit(f"the launch ended, or took too long:\n{self.output.read()[-3000:].decode()}")

    def last(self) -> dict[str, Any]:
        """The newest row of the history, once it is complete."""
        done = self.wait(lambda s: s["epoch"] == 2 and s["last"] and s["last"]["pause_s"] is not None)
        row: dict[str, Any] = done["last"]
        return row


@contextmanager
def launched(standby: int, environment: dict[str, str]) -> Iterator[Job]:
    """A job that trains, its standbys warm."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'agents'}", "TEST_PACE_S": "0.05", **environment}
    shape = ["--local-nodes", str(2 + standby), "--nnodes", "2", "--nproc-per-node", "2", "--standby", str(standby)]
    argv = [sys.executable, "-m", "tmrun", "--job", "bench", *shape, str(PACED), "--steps", "1000000", "--print-every", "1000000"]
    output = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
    process = subprocess.Popen(argv, env=env, stdout=output, stderr=subprocess.STDOUT)
    job = Job(process, env, output)
    try:
        job.wait(lambda s: s["standby"]["warm"] >= standby and s["state"] == "running" and (s["step"] or 0) > 10)
        time.sleep(2)
        yield job
    finally:
        process.terminate()
        process.wait()
        output.close()


def kill(job: Job) -> None:
    """Rank 0, which no standby has rehearsed."""
    node = next(n for n in job.wait(lambda _: True)["nodes"] if 0 in n["ranks"])
    os.kill(node["pids"][0], signal.SIGKILL)


def drain(job: Job) -> None:
    """The same node, in order."""
    job.cli("drain", next(n for n in job.wait(lambda _: True)["nodes"] if 0 in n["ranks"])["name"])


# -- recorded and made-up values ----------------------------------------------------------------------------------------------------
def values(_: argparse.Namespace) -> str:
    """Markdown: loss of the first step, live and rehearsed, and what recording everything takes."""
    from nursery import Nursery

    nursery = Nursery()
    rows = [values_of(mode, world, nursery) for mode, world in (("ddp", 2), ("fsdp2", 2), ("hsdp", 4), ("tp", 2), ("pp", 2))]
    nursery.close()
    head = "| job | loss, live | recorded whole | beginning repeated | nothing recorded | calls replayed | KiB, whole | KiB, beginnings |"
    return "\n".join([head, "|---" * 8 + "|", *(f"| {' | '.join(row)} |" for row in rows)])


def values_of(mode: str, world: int, nursery: Any) -> list[str]:
    """One row; the last rank."""
    live, whole, made_up, calls, size = rehearsals(mode, world, nursery, 1 << 30)
    _, beginning, _, _, small = rehearsals(mode, world, nursery, 256)
    print(f"{mode}: done", file=sys.stderr, flush=True)
    return [mode, *(f"{loss:.6g}" for loss in (live, whole, beginning, made_up)), str(calls), f"{size / 1024:.1f}", f"{small / 1024:.1f}"]


def rehearsals(mode: str, world: int, nursery: Any, largest: int) -> tuple[float, float, float, int, int]:
    """Loss of the first step: live, rehearsed with the tape, without it; calls that the tape answered, its bytes."""
    from cluster import Cluster

    from tmrun import wire

    script = ROOT / "tests" / "worker" / "matrix.py"
    environment = {"TEST_MODE": mode, "TEST_PACE_S": "0", wire.ENV_RECORDS: "1", wire.ENV_RECORD_BYTES: str(largest)}
    with tempfile.TemporaryDirectory(prefix="tmrun-standby-") as folder:
        cluster = Cluster(Path(folder), world, ["--steps", "5"], environment, script)
        cluster.nursery = nursery
        try:
            cluster.start()
            cluster.finish()
            live = float.fromhex((cluster.losses / f"rank{world - 1}.txt").read_text().split()[1].split("/")[0])
            tape = sum(len(v) for k, v in cluster.agent._store.items() if f"/tape/rank{world - 1}/" in k)
            with_tape = cluster.expect(cluster.standby(world - 1), wire.Warm)
            recorded = rehearsed_loss(cluster)
            for key in [k for k in cluster.agent._store if "record/" in k]:
                del cluster.agent._store[key]
            cluster.expect(cluster.standby(world - 1), wire.Warm)
            return live, recorded, rehearsed_loss(cluster), with_tape.rehearsal.replayed, tape
        finally:
            cluster.close()


def rehearsed_loss(cluster: Any) -> float:
    """Of the first step of the newest rehearsal."""
    newest = max(cluster.directory.glob("rehearsal-*.log"), key=lambda p: int(p.stem.split("-")[1]))
    line = next(x for x in newest.read_text().splitlines() if x.startswith("rehearsed 0 "))
    return float.fromhex(line.split()[2])


# -- the job beside it --------------------------------------------------------------------------------------------------------------
def steps(args: argparse.Namespace) -> str:
    """Median step of a rank on core 0 while a standby on core 1 rehearses again and again, and while it does not."""
    from cluster import Cluster

    from tmrun import wire

    with tempfile.TemporaryDirectory(prefix="tmrun-standby-") as folder:
        model = ["--steps", "1000000", "--d-model", "256", "--layers", "4"]
        cluster = Cluster(Path(folder), 1, model, {"TEST_PACE_S": "0", "OMP_NUM_THREADS": "1"}, PACED)
        try:
            cluster.start()
            active = cluster.ranks[0]
            pin(active.pid, 0)
            cluster.reach(20)
            found: dict[str, list[float]] = {"alone": [], "beside a rehearsal": []}
            for number in range(2 * args.repeats):
                name = list(found)[number % 2]
                end = time.monotonic() + args.seconds / args.repeats
                before = len(active.channel.messages)
                while time.monotonic() < end:
                    if name == "alone":
                        time.sleep(0.1)
                        continue
                    standby = cluster.standby(0)
                    pin(standby.pid, 1)
                    cluster.expect(standby, wire.Warm)
                    standby.process.kill()
                messages = [m for m in active.channel.messages[before:] if isinstance(m, wire.Progress)]
                found[name].append(statistics.median(m.step_s for m in messages))
        finally:
            cluster.close()
    ratio = statistics.median(b / a for a, b in zip(*found.values(), strict=True))
    return "\n".join(
        [f"of {args.repeats} turns, beside a rehearsal against alone, the median ratio: {ratio:.3f}", ""]
        + ["| | ms a step, median | of |", "|---|---|---|"]
        + [f"| {n} | {1e3 * statistics.median(s):.1f} | {', '.join(f'{1e3 * x:.1f}' for x in s)} |" for n, s in found.items()]
    )


def pin(pid: int, core: int) -> None:
    """All threads of a process; those to come inherit it."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


if __name__ == "__main__":
    main()
