"""Copies of the modules' buffers as of the start of a step, for a redo.

Taken in every step, hence cheap: which modules have buffers is looked up again only after somebody registered a module or a buffer
anywhere in the process, and a large buffer is copied only when it changed. May not know: steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.nn.modules.module import register_module_buffer_registration_hook, register_module_module_registration_hook

SMALL = 1 << 16
"""Buffers up to this size are always copied: raw writes into a tensor do not raise its version."""
Modules = Mapping[str, torch.nn.Module]


@dataclass
class _Copy:
    version: int
    content: torch.Tensor


class Buffers:
    """The copies, by module and buffer."""

    def __init__(self) -> None:
        self._copies: dict[tuple[str, str], _Copy] = {}
        self._holders: list[tuple[str, torch.nn.Module]] | None = None
        me = weakref.ref(self)  # torch keeps the hooks for good

        def registered(*_: object) -> None:
            if (buffers := me()) is not None:
                buffers._holders = None

        register_module_buffer_registration_hook(registered)
        register_module_module_registration_hook(registered)

    def keep(self, modules: Modules) -> None:
        """Copy what may have changed."""
        for place, buffer in self._each(modules):
            kept = self._copies.get(place)
            if kept is None or kept.version != buffer._version or buffer.nbytes <= SMALL:
                self._copies[place] = _Copy(buffer._version, buffer.detach().clone())

    def put_back(self, modules: Modules) -> None:
        """Copy back what changed since ``keep``."""
        with torch.no_grad():
            for place, buffer in self._each(modules):
                kept = self._copies.get(place)  # None: made in the broken step
                if kept is None:
                    continue
                if kept.version != buffer._version or buffer.nbytes <= SMALL:
                    buffer.copy_(kept.content)
                    kept.version = buffer._version

    def clear(self) -> None:
        """Forget everything (soft restart)."""
        self._copies.clear()
        self._holders = None

    def _each(self, modules: Modules) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
        if self._holders is None:
            parts = ((f"{name}.{path}", part) for name, module in modules.items() for path, part in module.named_modules())
            self._holders = [(path, part) for path, part in parts if part._buffers]
        for path, part in self._holders:
            for key, buffer in part._buffers.items():
                if buffer is not None:
                    yield (path, key), buffer
