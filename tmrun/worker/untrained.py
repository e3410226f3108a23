"""Copies of what a module changes outside of its optimizer, as of the start of a step, for a redo: buffers and frozen parameters.

Taken in every step, hence cheap. Which modules have buffers is looked up again only after somebody registered one anywhere in the process.
A large tensor is copied only when it changed, which its version, its place in memory or its object shows. A write through ``.data`` shows
nowhere but in its content: contents are compared after each of the first steps, and now and then later; what was found to change so is
*restless* and copied in every step from then on.

Buffers are copied at first sight. Frozen parameters may be most of a model: they are copied from when they are first seen to change, as the
average of a momentum encoder does. If the very step of that is to be run again, nothing can bring them back, which is an error.
May not know: steps.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from tmrun.core.errors import WorkerError
from tmrun.worker import fixups, values

SMALL = 1 << 16
"""Buffers up to this size are copied in every step, which is cheaper than to look at their content."""
FIRST = 3
EVERY = 128
"""Contents are looked at in the first steps, and in two of this many later."""
Modules = Mapping[str, torch.nn.Module]
Place = tuple[str, str]
"""Module and name in it."""


@dataclass
class _Kept:
    tensor: torch.Tensor
    version: int
    address: int
    content: torch.Tensor | None
    fingerprint: int | None = None

    def touched(self, now: torch.Tensor) -> bool:
        """Whether it changed in a way that shows without looking at its content."""
        return now is not self.tensor or now._version != self.version or now.data_ptr() != self.address


class Untrained:
    """The copies, by module and name."""

    def __init__(self) -> None:
        self._kept: dict[Place, _Kept] = {}
        self._restless: set[Place] = set()
        self._buffers: list[tuple[str, torch.nn.Module]] | None = None
        self._frozen: list[tuple[str, torch.nn.Module, str]] = []
        self._calls = 0
        me = weakref.ref(self)  # torch keeps the hooks for good

        def registered(*_: object) -> None:
            if (untrained := me()) is not None:
                untrained._buffers = None

        register_module_buffer_registration_hook(registered)
        register_module_module_registration_hook(registered)
        register_module_parameter_registration_hook(registered)

    def keep(self, modules: Modules) -> None:
        """Copy what may have changed."""
        look = self._calls < FIRST or self._calls % EVERY < 2
        self._calls += 1
        if look:
            self._find(modules)
        for place, _, now, frozen in self._each(modules):
            kept, large = self._kept.get(place), now.nbytes > SMALL
            if kept is None:
                self._kept[place] = kept = _Kept(
                    now, now._version, now.data_ptr(), None if frozen and place not in self._restless else _copy(now)
                )
            elif kept.touched(now):
                self._kept[place] = kept = _Kept(now, now._version, now.data_ptr(), _copy(now))
            elif (not large and not frozen) or place in self._restless:
                kept.content = _copy(now)
            if look and (large or frozen) and place not in self._restless:
                self._compare(place, kept, now)

    def _compare(self, place: Place, kept: _Kept, now: torch.Tensor) -> None:
        before, kept.fingerprint = kept.fingerprint, _fingerprint(now)
        if before is not None and before != kept.fingerprint:
            self._restless.add(place)
            kept.content = _copy(now)

    def put_back(self, modules: Modules) -> None:
        """Copy back what changed since ``keep``. Raises WorkerError if there is nothing to copy."""
        with torch.no_grad():
            for place, holder, now, _ in self._each(modules):
                kept = self._kept.get(place)  # None: made in the broken step
                if kept is None:
                    continue
                if kept.content is None:
                    if kept.touched(now):
                        raise WorkerError(
                            f"{'.'.join(place)}, which is frozen, changed for the first time in a step that has to be run again; "
                            "what it was before is not known"
                        )
                    continue
                if kept.touched(now) or now.nbytes <= SMALL or place in self._restless:
                    holder[place[1]] = kept.tensor
                    _local(kept.tensor).data.copy_(kept.content)
                    kept.version, kept.address = kept.tensor._version, kept.tensor.data_ptr()

    def renew(self) -> None:
        """Everything is about to be written from elsewhere."""
        self._kept.clear()

    def clear(self) -> None:
        """Forget everything (soft restart)."""
        self._kept.clear()
        self._restless.clear()
        self._buffers, self._calls = None, 0

    @property
    def restless(self) -> list[Place]:
        """For a successor."""
        return sorted(self._restless)

    def adopt(self, restless: Iterable[Place]) -> None:
        """What is restless in the running job."""
        self._restless.update((module, name) for module, name in restless)

    def _find(self, modules: Modules) -> None:
        parts = [(f"{name}.{path}" if path else name, part) for name, module in modules.items() for path, part in module.named_modules()]
        sharded = any(fixups.fsdp_parts(module) for module in modules.values())  # parameters come and go by themselves
        self._buffers = [(path, part) for path, part in parts if part._buffers]
        self._frozen = [
            (path, part, key)
            for path, part in ([] if sharded else parts)
            for key, parameter in part._parameters.items()
            if parameter is not None and not parameter.requires_grad
        ]

    def _each(self, modules: Modules) -> Iterator[tuple[Place, dict[str, torch.Tensor | None], torch.Tensor, bool]]:
        """Place, the dictionary that holds it, the tensor, whether it is a frozen parameter."""
        if self._buffers is None:
            self._find(modules)
        for path, part in self._buffers or ():
            for key, buffer in part._buffers.items():
                if buffer is not None:
                    yield (path, key), part._buffers, buffer, False
        for path, part, key in self._frozen:
            parameter = part._parameters.get(key)
            if parameter is not None and not parameter.requires_grad:
                yield (path, key), part._parameters, parameter, True  # type: ignore[misc]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return _local(tensor).detach().clone()


def _fingerprint(tensor: torch.Tensor) -> int:
    """Of the content."""
    content = _local(tensor).detach()
    try:
        return int(torch.hash_tensor(content).item())
    except (RuntimeError, NotImplementedError):  # not for every type
        return int.from_bytes(hashlib.blake2b(values.tensor_bytes(content), digest_size=8).digest(), "little")
