"""What only a machine with a GPU can say about tmrun; ``make gpu-check``. One GPU is enough, and at most eight minutes.

    python bench/gpu_check.py [--out DIR] [--budget 460] [--device cuda]

    warm     seconds from "take this rank" to "ready to connect": a cold process, one with torch imported, a rehearsed one; eager and
             compiled; and where a process's age goes until its third step is done
    switch   ``gpu_switch``: NCCL, world size 1: build beside one in use, switch, give memory back; abort while the device is busy
    gloo     two ranks on this GPU, gradients by gloo: a drain, then a kill in the middle of a backward pass; losses and parameters are
             compared bit by bit with those of the same job undisturbed
    nccl     the same by NCCL, if it is 2.30 or later, which allows two ranks on one GPU
    memory   of the processes of the last of these, drawn over time

Written into ``--out`` (or $OUT, or .bench/gpu): ``gpu_check.json`` after every part, ``memory.svg``. A part that fails says so there, and
the others run. Exit code: 0 all that could run is well, 1 something is not, 77 there is no GPU.
``--device cpu`` only tries whether the check itself runs; it says nothing about GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "worker")]
TRAIN = ROOT / "bench" / "gpu_train.py"
NO_GPU = 77
PATIENCE_S = 150.0
STEPS, KILLED_AT = 40, 28
TWO_RANKS = (2, 30)
"""From which NCCL on two ranks may share a GPU."""
MODES = ("cold", "imported", "rehearsed")
COMPILED: tuple[tuple[str, ...], ...] = ((), ("--compile",))


def main() -> None:
    """Run what there is time for; see the module's text."""
    args = arguments()
    if args.device == "cuda" and (why := no_gpu()):
        print(f"gpu-check: no GPU here ({why}); nothing was checked", flush=True)
        sys.exit(NO_GPU)
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ.update(environment())
    report = Check(args).run()
    print(text_of(report), flush=True)
    sys.exit(0 if all(part["ok"] for part in report["parts"].values()) else 1)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / ".bench" / "gpu")))
    parser.add_argument("--budget", type=float, default=460, help="seconds; a part that would begin later is left out")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--parts", default="warm,switch,gloo,nccl,memory")
    return parser.parse_args()


def no_gpu() -> str:
    """Why there is none; empty: there is one."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return "" if torch.cuda.is_available() else f"torch {torch.__version__} with CUDA {torch.version.cuda} finds none"


class Check:
    """One run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.began = args, time.monotonic()
        self.small = ["--width", "64", "--layers", "2"] if args.device == "cpu" else []
        self.report: dict[str, Any] = {"about": about(args.device), "parts": {}}
        self.folder = tempfile.TemporaryDirectory(prefix="tmrun-gpu-memory-")
        self.trace = Path(self.folder.name)
        self.events: list[tuple[float, str]] = []
        self.compiler: subprocess.Popen[str] | None = None

    def run(self) -> dict[str, Any]:
        """All parts, each for itself."""
        import cluster

        cluster.DEADLINE_S = PATIENCE_S
        self.compiler = subprocess.Popen(
            [sys.executable, "-m", "tmrun.worker.shim"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
        )
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "warm": self.warm,
            "switch": self.switch,
            "gloo": lambda: self.moved("gloo"),
            "nccl": self.nccl,
            "memory": self.memory,
        }
        with self.folder:
            for name in self.args.parts.split(","):
                self.part(name, parts[name])
        return self.report

    def part(self, name: str, run: Callable[[], dict[str, Any]]) -> None:
        """One part, and write what is known by now."""
        began = time.monotonic()
        if began - self.began > self.args.budget:
            result: dict[str, Any] = {"ok": True, "left out": "no time"}
        else:
            try:
                result = {"ok": True, **run()}
            except Exception as error:
                lines = str(error).splitlines() or [type(error).__name__]
                result = {"ok": False, "error": [*lines[:3], *lines[-12:]], "where": traceback.format_exc().splitlines()[-6:]}
        self.report["parts"][name] = {**result, "took_s": round(time.monotonic() - began, 1)}
        (self.args.out / "gpu_check.json").write_text(json.dumps(self.report, indent=1) + "\n")
        print(f"gpu-check: {name}: {'ok' if result['ok'] else 'FAILED'}, {time.monotonic() - began:.0f} s", flush=True)

    # -- warm -------------------------------------------------------------------------------------------------------------------------
    def warm(self) -> dict[str, Any]:
        """Seconds by mode, eager and compiled. The first compiled process fills the cache that the others find."""
        from nursery import Nursery

        nursery, found = Nursery(), {}
        try:
            with tempfile.TemporaryDirectory(prefix="tmrun-inductor-") as cache:
                for compiled in COMPILED:
                    for mode in MODES:
                        name = f"{mode}, compiled" if compiled else mode
                        try:
                            found[name] = self.until_ready(mode, compiled, nursery, cache)
                        except RuntimeError as error:
                            found[name] = {"error": str(error).splitlines()[-12:]}
                        print(f"  {name}: {found[name].get('ready_s', 'FAILED')}", flush=True)
        finally:
            nursery.close()
        return {"ok": not any("error" in each for each in found.values()), "seconds": found}

    def until_ready(self, mode: str, compiled: tuple[str, ...], nursery: Any, cache: str) -> dict[str, Any]:
        """One process that is told to take a rank."""
        from cluster import Cluster

        from tmrun import wire

        with tempfile.TemporaryDirectory(prefix="tmrun-gpu-") as folder:
            stages = Path(folder) / "stages.json"
            flags = [*self.flags(self.backend), *compiled, "--stages", str(stages)]
            job = Cluster(Path(folder), 2, flags, {**variables(), "TORCHINDUCTOR_CACHE_DIR": cache, "TMRUN_SWITCH": "auto"}, TRAIN)
            job.nursery = nursery if mode == "imported" else None
            try:
                began = time.monotonic()
                worker = job.standby(1)
                if mode == "rehearsed":
                    warm = job.expect(worker, wire.Warm)
                    time.sleep(0.5)
                    began = time.monotonic()
                worker.channel.send(wire.Prepare(1, wire.Kind.FAILURE, 2, (1,), 1, 1))
                job.agent.wait(lambda: "m1/entered" in job.agent._store, PATIENCE_S, f"{mode}: ready")
                result: dict[str, Any] = {"ready_s": time.monotonic() - began, "age_s": json.loads(stages.read_text())}
                if mode == "rehearsed":
                    result |= {"waiting_mb": warm.rehearsal.waiting_mb, "peak_mb": warm.machine.peak_mb}
                    result["health"] = [str(gpu) for gpu in warm.machine.health]
                return result
            except AssertionError as error:
                raise RuntimeError(f"{error}\n{job.rehearsal()[-2000:]}") from error
            finally:
                job.close()

    # -- switch -----------------------------------------------------------------------------------------------------------------------
    def switch(self) -> dict[str, Any]:
        """A process of its own, with the C++ switch if it compiles here."""
        assert self.compiler is not None
        compiled = self.compiler.communicate(timeout=240)[0].strip()
        command = [sys.executable, str(ROOT / "bench" / "gpu_switch.py"), "--device", self.args.device]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment())
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode}\n{done.stderr}")
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return {**result, "compiling": compiled.splitlines()[-1:]}

    # -- two ranks --------------------------------------------------------------------------------------------------------------------
    def nccl(self) -> dict[str, Any]:
        """By NCCL, if two ranks may share a GPU."""
        if self.args.device == "cpu":
            return self.moved("gloo")
        import torch

        version = torch.cuda.nccl.version()
        if version < TWO_RANKS:
            return {"left out": f"NCCL {'.'.join(map(str, version))} does not allow two ranks on one GPU"}
        return self.moved("nccl")

    def moved(self, backend: str) -> dict[str, Any]:
        """The same job twice: undisturbed, and with a drain and a kill."""
        with tempfile.TemporaryDirectory(prefix="tmrun-gpu-") as folder:
            alone, moved = Path(folder) / "alone", Path(folder) / "moved"
            expected = self.undisturbed(alone, backend)
            digest, phases = self.disturbed(moved, backend)
            same = [(moved / "losses" / f"rank{r}.txt").read_text() for r in (0, 1)]
            wanted = [(alone / "losses" / f"rank{r}.txt").read_text() for r in (0, 1)]
            differ = [r for r in (0, 1) if not set(same[r].splitlines()) <= set(wanted[r].splitlines())]
        if digest != expected or differ:
            raise RuntimeError(f"not the same: parameters {digest == expected}, losses of ranks {differ} differ")
        return {"exact": True, "phases_s": phases}

    def undisturbed(self, folder: Path, backend: str) -> str:
        """Hash of the final parameters."""
        with self.job(folder, backend, {}) as job:
            job.start(at_once=True)
            return str(job.finish())

    def disturbed(self, folder: Path, backend: str) -> tuple[str, dict[str, Any]]:
        """The same, and what the parts of both moves took."""
        from tmrun import wire

        for old in self.trace.glob("*.txt"):
            old.unlink()
        with self.job(folder, backend, {"TMRUN_TEST_KILL": f"0:{KILLED_AT}:backward"}, memory=True) as job:
            drained, healed = job.standby(1), job.standby(0)
            job.start()
            job.reach(6)
            self.events = [(time.time(), "drain")]
            job.drain(1, drained)
            self.events.append((time.time(), "drained"))
            job.died(0)
            self.events.append((time.time(), "killed"))
            job.heal({0: healed})
            self.events.append((time.time(), "healed"))
            digest = str(job.finish())
            heard = [m for worker in job.ranks.values() for m in worker.channel.messages]
            phases = {f"epoch {m.epoch}, joiner": {**m.phases, "bytes": m.bytes} for m in heard if isinstance(m, wire.Switched) and m.bytes}
            pauses = {m.epoch: m.pause_s for m in heard if isinstance(m, wire.Resumed) and m.pause_s}
            return digest, {**phases, "pause": pauses}

    @contextmanager
    def job(self, folder: Path, backend: str, more: dict[str, str], *, memory: bool = False) -> Any:
        """Two ranks under the tests' agent."""
        from cluster import Cluster

        folder.mkdir()
        flags = [*self.flags(backend), "--steps", str(STEPS), *(["--memory", str(self.trace)] if memory else [])]
        job = Cluster(folder, 2, flags, {**variables(), **more, "TMRUN_SWITCH": "auto"}, TRAIN)
        try:
            yield job
        except AssertionError as error:
            raise RuntimeError(f"{str(error)[:300]}\n{job.output()[-3000:]}") from error
        finally:
            job.close()

    @property
    def backend(self) -> str:
        """What the script asks for where nobody communicates."""
        return "nccl" if self.args.device == "cuda" else "gloo"

    def flags(self, backend: str) -> list[str]:
        """Of ``gpu_train``."""
        return ["--device", self.args.device, "--backend", backend, *self.small]

    # -- memory -----------------------------------------------------------------------------------------------------------------------
    def memory(self) -> dict[str, Any]:
        """Draw the last moves."""
        traces = {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in sorted(self.trace.glob("*.txt"))}
        traces = {pid: points for pid, points in traces.items() if points}
        if not traces or not self.events:
            return {"left out": "no job was moved"}
        (self.args.out / "memory.svg").write_text(drawing(traces, self.events, self.args.device))
        peaks = {pid: {"tensors_mb": max(p[1] for p in points), "kept_mb": max(p[2] for p in points)} for pid, points in traces.items()}
        before = [p[3] for points in traces.values() for p in points if p[0] < self.events[0][0]]
        during = [p[3] for points in traces.values() for p in points if p[0] >= self.events[0][0]]
        return {"peaks": peaks, "device_mb": {"before": max(before, default=0), "while moving and after": max(during, default=0)}}


def drawing(traces: dict[str, list[list[float]]], events: list[tuple[float, str]], device: str) -> str:
    """What every process keeps, and the device, over time."""
    from tmrun.sim.svg import GREY, INK, Canvas, Scale, ticks

    left, right, top, bottom = 70.0, 960.0, 50.0, 420.0
    start = events[0][0] - 5
    end = max(points[-1][0] for points in traces.values())
    high = max(p[3] for points in traces.values() for p in points) or 1.0
    x, y = Scale(0, end - start, left, right), Scale(0, high * 1.05, bottom, top)
    canvas = Canvas(1000, 470)
    canvas.text(left, 24, f"Memory through a drain and a kill ({device}), MB", size=15, bold=True)
    for tick in ticks(0, high):
        canvas.line(left, y(tick), right, y(tick))
        canvas.text(left - 8, y(tick) + 4, f"{tick:,.0f}", anchor="end", fill=GREY)
    for at, what in events:
        canvas.line(x(at - start), top, x(at - start), bottom, GREY, 1, "4 3")
        canvas.text(x(at - start) + 4, top + 10, what, fill=GREY, size=11)
    colours = ("#2563eb", "#d97706", "#059669", "#9333ea")
    for number, (_, points) in enumerate(sorted(traces.items(), key=lambda each: each[1][0][0])):
        shown = [(x(t - start), y(kept)) for t, _, kept, _ in points if t >= start]
        canvas.curve(shown, colours[number % len(colours)])
    whole = sorted((t, used) for points in traces.values() for t, _, _, used in points if t >= start)
    canvas.curve([(x(t - start), y(used)) for t, used in whole], INK, 1.0, "2 2")
    legend = "lines: kept by torch in each process; dotted: in use on the whole device; seconds from left to right"
    canvas.text(left, bottom + 36, legend, fill=GREY)
    return canvas.render()


def variables() -> dict[str, str]:
    """Of the training processes, on one GPU."""
    return {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def environment() -> dict[str, str]:
    """Of our own children."""
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}


def about(device: str) -> dict[str, Any]:
    """The machine and its software; no names of hosts or people."""
    import torch

    known: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count(), "device": device}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        known |= {"gpu": properties.name, "memory_mb": properties.total_memory >> 20, "cuda": torch.version.cuda}
        known["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return known


def text_of(report: dict[str, Any]) -> str:
    """For people, as a table."""
    about_, parts = report["about"], report["parts"]
    lines = [", ".join(f"{name} {value}" for name, value in about_.items())]
    if about_["device"] == "cpu":
        lines.append("tried on the CPU: this says nothing about GPUs")
    lines += ["", "| part | result |", "|---|---|"]
    for name, part in parts.items():
        what = part.get("left out") or ("; ".join(part["error"]) if "error" in part else summary(name, part))
        what += "" if part["ok"] else " (FAILED in part, see the JSON)"
        lines.append(f"| {name} | {what} |")
    return "\n".join(lines)


def summary(name: str, part: dict[str, Any]) -> str:
    """One line of a part that is well."""
    if name == "warm":
        return ", ".join(f"{mode} {found['ready_s']:.2f} s" for mode, found in part["seconds"].items() if "ready_s" in found)
    if name == "switch":
        times = ", ".join(f"{what} {seconds * 1e3:.1f} ms" for what, seconds in part["seconds"].items())
        lives = "works" if part["abort"]["device works"] else "is lost"
        return f"{part['switch']}: {times}; {part['left_mb']:.0f} MB left behind; after an abort while it was busy the device {lives}"
    if name == "memory":
        return f"device, MB: {part['device_mb']}"
    return f"bitwise the same through a drain and a kill; pauses, s: {part['phases_s']['pause']}"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main()
