"""GPUs: what is read of them, from outputs as nvidia-smi and the kernel write them, and what is thought of it."""

from __future__ import annotations

import subprocess
import threading
from dataclasses import replace

import pytest

from tmrun.core import gpus
from tmrun.core.admission import Fit, judge, weakest
from tmrun.core.codec import decode, encode
from tmrun.core.model import Gpu, Machine
from tmrun.worker import gpu_health

GOOD = Gpu("GPU-1", "H200", links_up=18, temperature_c=45, slowdown_c=87, tflops=700.0, copy_gb_s=4000.0)

REPORT = """<?xml version="1.0" ?>
<nvidia_smi_log><driver_version>580.1</driver_version><attached_gpus>1</attached_gpus>
<gpu id="00000000:3B:00.0"><product_name>NVIDIA H200</product_name><uuid>GPU-1</uuid>
  <clocks_event_reasons>
    <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
    <clocks_event_reason_sw_power_cap>Active</clocks_event_reason_sw_power_cap>
    <clocks_event_reason_hw_slowdown>Not Active</clocks_event_reason_hw_slowdown>
    <clocks_event_reason_hw_thermal_slowdown>{heat}</clocks_event_reason_hw_thermal_slowdown>
  </clocks_event_reasons>
  <ecc_errors>
    <volatile><sram_correctable>9</sram_correctable><sram_uncorrectable_parity>0</sram_uncorrectable_parity>
      <sram_uncorrectable_secded>1</sram_uncorrectable_secded><dram_uncorrectable>{dram}</dram_uncorrectable></volatile>
    <aggregate><dram_uncorrectable>77</dram_uncorrectable></aggregate>
  </ecc_errors>
  <remapped_rows><remapped_row_pending>{pending}</remapped_row_pending><remapped_row_failure>No</remapped_row_failure></remapped_rows>
  <temperature><gpu_temp>45 C</gpu_temp>{limit}</temperature>
</gpu></nvidia_smi_log>"""
NEAR = "<gpu_temp_tlimit>40 C</gpu_temp_tlimit><gpu_temp_slow_tlimit_threshold>-2 C</gpu_temp_slow_tlimit_threshold>"
FIXED = "<gpu_temp_slow_threshold>92 C</gpu_temp_slow_threshold>"
LINKS = "GPU 0: NVIDIA H200 (UUID: GPU-1)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n\t Link 2: 26.562 GB/s\n"
LOG = [
    "6,1,5,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=17, name=python, GPU has fallen off the bus.",
    "6,2,6,-;NVRM: Xid (PCI:0000:3b:00): 13, pid=18, name=python, Graphics Exception",
    "6,3,7,-;NVRM: Xid (PCI:0000:af:00): 48, pid=19, name=python, DBE",
    "6,4,8,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=20, name=python",
    "6,5,9,-;usb 1-1: new device",
]


def say(command: list[str]) -> str:
    return LINKS if "nvlink" in command else REPORT.format(heat="Active", dram="2", pending="Yes", limit=NEAR)


def test_what_is_read() -> None:
    found = gpu_health.read(Gpu("GPU-1", "H200"), say, LOG)
    assert found == Gpu("GPU-1", "H200", 3, True, False, ("hw_thermal_slowdown",), 45, 87, 2, (13, 79))
    assert gpu_health.from_report(GOOD, REPORT.format(heat="Not Active", dram="N/A", pending="No", limit=FIXED))[0].slowdown_c == 92


def test_a_container_without_nvidia_smi_and_a_log_for_root_only() -> None:
    def missing(command: list[str]) -> str:
        raise FileNotFoundError(command[0])

    def failing(command: list[str]) -> str:
        raise subprocess.CalledProcessError(6, command)

    for run in (missing, failing, lambda _: "no xml"):
        assert gpu_health.read(Gpu("3"), run, LOG) == replace(Gpu("3"), links_up=-1)


def test_a_gpu_that_breaks_while_nobody_uses_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, though it is read many times; a little warmer is no news."""
    found = [GOOD, GOOD, replace(GOOD, temperature_c=50), *[replace(GOOD, xids=(79,))] * 3, replace(GOOD, links_up=17)]
    readings, told, over = iter(found), [], threading.Event()
    monkeypatch.setattr(gpu_health, "_AGAIN_S", 0.001)
    monkeypatch.setattr(gpu_health, "measure", lambda _: (700.0, 4000.0))

    class Played(gpu_health.Probe):
        def _read(self) -> None:
            try:
                self._found = (next(readings),)
            except StopIteration:
                over.set()

    with Played(0).start().watched(lambda health: told.append(health[0])):
        assert over.wait(20)
    assert told == [replace(GOOD, xids=(79,)), replace(GOOD, links_up=17)]


def test_addresses_are_written_in_several_ways() -> None:
    assert gpu_health.xids(LOG, "0000:3B:00.0") == gpu_health.xids(LOG, "3b:00") == (13, 79)
    assert gpu_health.xids(LOG, "00000000:AF:00.0") == (48,)
    assert gpu_health.xids(LOG, "00000001:3B:00.0") == ()


@pytest.mark.parametrize(
    ("gpu", "broken", "why"),
    [
        (GOOD, None, ""),
        (replace(GOOD, xids=(13, 31, 43, 45)), None, ""),
        (replace(GOOD, xids=(79,)), True, "Xid 79 (fell off the bus)"),
        (replace(GOOD, xids=(74,)), False, "Xid 74 (NVLink error)"),
        (replace(GOOD, uncorrected=2), True, "2 uncorrected memory errors since its last reset"),
        (replace(GOOD, remap_failed=True), True, "rows of memory that cannot be replaced"),
        (replace(GOOD, remap_pending=True), False, "rows of memory wait for a reset to be replaced"),
        (replace(GOOD, throttled=("hw_thermal_slowdown",)), False, "slowed down: hw_thermal_slowdown"),
        (replace(GOOD, throttled=("sw_power_cap",)), None, ""),
        (replace(GOOD, temperature_c=87), False, "87 °C, it slows down at 87"),
        (replace(GOOD, links_up=17), False, "17 NVLinks are up, others have 18"),
        (replace(GOOD, links_up=-1), None, ""),
        (replace(GOOD, tflops=590.0), False, "multiplies at 590 TFLOP/s, the job's at 700"),
        (replace(GOOD, tflops=600.0), None, ""),
        (replace(GOOD, copy_gb_s=2000.0), False, "copies at 2000 GB/s, the job's at 4000"),
        (replace(GOOD, kind="A100", tflops=250.0, links_up=12), None, ""),
        (replace(GOOD, remap_pending=True, xids=(95,)), True, "Xid 95 (uncontained memory error)"),
    ],
)
def test_what_speaks_against_one(gpu: Gpu, broken: bool | None, why: str) -> None:
    found = gpus.complaints(gpu, [GOOD, GOOD, replace(GOOD, tflops=0.0)])
    assert (found[0] if found else (None, "")) == (broken, why)


def test_a_broken_one_is_refused_even_before_the_job_is_known() -> None:
    sick = Machine("H200", health=(GOOD, replace(GOOD, name="GPU-2", uncorrected=1)))
    verdict = judge(sick, [])
    assert (verdict.fit, verdict.why) == (Fit.REFUSED, "GPU GPU-2: 1 uncorrected memory errors since its last reset")
    tired = replace(sick, health=(replace(GOOD, tflops=100.0),))
    assert judge(tired, [Machine("H200", health=(GOOD,))]).fit is Fit.LAST
    assert judge(tired, []).fit is Fit.FIT


def test_it_travels_and_a_node_has_all_of_its_workers() -> None:
    one, two = Machine(health=(GOOD,)), Machine(health=(replace(GOOD, name="GPU-2"), GOOD))
    assert [gpu.name for gpu in weakest([one, two]).health] == ["GPU-1", "GPU-2"]
    assert decode(Machine, encode(two)) == two
