"""How each system is launched, at its defaults and tuned: one module a family, found by the trial's system name."""

from __future__ import annotations

from bench.compare.systems.base import System
from bench.compare.systems.elastic import FtLauncher, Torchrun
from bench.compare.systems.inprocess import InProcess
from bench.compare.systems.movable import Tmrun, TmrunCold
from bench.compare.systems.torchft import TorchFt

FAMILIES: dict[str, type[System]] = {
    "torchrun": Torchrun,
    "ft_launcher": FtLauncher,
    "inprocess": InProcess,
    "torchft": TorchFt,
    "tmrun-cold": TmrunCold,
    "tmrun": Tmrun,
}

__all__ = ["FAMILIES", "System"]
