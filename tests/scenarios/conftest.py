"""The scenarios run on the simulated job of ``tests/model``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))
