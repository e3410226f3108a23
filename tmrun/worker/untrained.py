"""Copies of what a module changes outside of its optimizer, as of the start of a step, for a redo: buffers and frozen parameters.

Taken in every step, hence cheap. Which modules there are is looked up again only after something was registered in one of them. A large
tensor is copied only when it changed, which its version, its place in memory or its object shows. A write through ``.data`` shows
nowhere but in its content: contents are compared after each of the first steps, and now and then later; what was found to change so is
*restless* and copied in every step from then on.

Buffers are copied at first sight. Frozen parameters may be most of a model: they are copied once they were seen to change, as the average
of a momentum encoder does (*moving*). If the very step of that is to be run again, nothing can bring them back, which is an error.
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
Holder = dict[str, torch.Tensor | None]
Place = tuple[str, str]
"""Module and name in it."""


@dataclass
class _Kept:
    """A tensor at the start of a step; None: there was none."""

    holder: Holder
    tensor: torch.Tensor | None
    version: int = 0
    address: int = 0
    content: torch.Tensor | None = None
    always: bool = False
    """Whether its changes may not show."""
    fingerprint: bytes | None = None
    seen: int = 0
    """The step that it is of."""

    def touched(self, now: torch.Tensor | None) -> bool:
        """Whether it changed in a way that shows without looking at its content."""
        if now is None or now is not self.tensor:
            return now is not self.tensor
        return now._version != self.version or (not self.always and now.data_ptr() != self.address)


class Untrained:
    """The copies, by module and name."""

    def __init__(self) -> None:
        self._kept: dict[Place, _Kept] = {}
        self._restless: set[Place] = set()
        self._moving: set[Place] = set()
        self._buffers: list[tuple[str, Holder]] | None = None
        self._parameters: list[tuple[Place, Holder, torch.Tensor]] = []
        self._parts: set[int] = set()
        self._calls = 0
        me = weakref.ref(self)  # torch keeps the hooks for good

        def registered(module: torch.nn.Module, *_: object) -> None:
            if (untrained := me()) is not None and id(module) in untrained._parts:
                untrained._buffers = None

        register_module_buffer_registration_hook(registered)
        register_module_module_registration_hook(registered)
        register_module_parameter_registration_hook(registered)

    # -- at the start of a step -----------------------------------------------------------------------------------------------------
    def keep(self, modules: Modules) -> None:
        """Copy what may have changed."""
        self._calls += 1
        look = self._calls <= FIRST or self._calls % EVERY < 2
        if self._buffers is None or look:
            self._find(modules)
        for path, holder in self._buffers or ():
            for key, buffer in holder.items():
                self._keep_buffer((path, key), holder, buffer, look)
        for place, holder, parameter in self._parameters:
            if not parameter.requires_grad:
                self._keep_frozen(place, holder, parameter, look)

    def _keep_buffer(self, place: Place, holder: Holder, now: torch.Tensor | None, look: bool) -> None:
        kept = self._kept.get(place)
        if kept is None or kept.touched(now):
            kept = self._kept[place] = _kept(holder, now, copied=True)
        elif kept.always or place in self._restless:
            kept.content = _copy(now)
        kept.seen = self._calls
        if look and now is not None and not kept.always:
            self._compare(place, kept, now)

    def _keep_frozen(self, place: Place, holder: Holder, now: torch.Tensor, look: bool) -> None:
        kept = self._kept.get(place)
        if kept is None or kept.seen != self._calls - 1:  # or it was trained meanwhile
            kept = self._kept[place] = _kept(holder, now, copied=place in self._moving)
        elif kept.touched(now):
            self._moving.add(place)
            kept = self._kept[place] = _kept(holder, now, copied=True)
        elif kept.always or place in self._restless:
            kept.content = _copy(now)
        kept.seen = self._calls
        if look and not kept.always:
            self._compare(place, kept, now)

    def _compare(self, place: Place, kept: _Kept, now: torch.Tensor) -> None:
        if place in self._restless or now.is_meta:
            return
        before, kept.fingerprint = kept.fingerprint, _fingerprint(now)
        if before is not None and before != kept.fingerprint:
            self._restless.add(place)
            self._moving.add(place)
            kept.content = _copy(now)

    # -- back to it -----------------------------------------------------------------------------------------------------------------
    def put_back(self) -> None:
        """Copy back what changed since ``keep``. Raises WorkerError if there is nothing to copy."""
        with torch.no_grad():
            for place, kept in self._kept.items():
                if kept.seen == self._calls:
                    self._put_back(place, kept)

    def _put_back(self, place: Place, kept: _Kept) -> None:
        now = kept.holder.get(place[1])
        if kept.content is None and kept.tensor is not None:
            if kept.touched(now):
                raise WorkerError(
                    f"{'.'.join(place)}, which is frozen, changed for the first time in a step that has to be run again; "
                    "what it was before is not known"
                )
            return
        if not (kept.touched(now) or kept.always or place in self._restless):
            return
        kept.holder[place[1]] = kept.tensor
        if kept.tensor is not None and kept.content is not None:
            _write(kept.tensor, kept.content)
            kept.version = kept.tensor._version
            kept.address = 0 if kept.always else kept.tensor.data_ptr()

    # -- others' ---------------------------------------------------------------------------------------------------------------------
    def renew(self) -> None:
        """Everything is about to be written from elsewhere."""
        self._kept.clear()

    def clear(self) -> None:
        """Forget everything (soft restart)."""
        self._kept.clear()
        self._restless.clear()
        self._moving.clear()
        self._buffers, self._calls = None, 0

    @property
    def found(self) -> tuple[list[Place], list[Place]]:
        """For a successor: what changes unseen, and what changes though it is frozen."""
        return sorted(self._restless), sorted(self._moving)

    def adopt(self, found: tuple[Iterable[Place], Iterable[Place]]) -> None:
        """What was ``found`` in the running job."""
        for mine, theirs in zip((self._restless, self._moving), found, strict=True):
            mine.update((module, name) for module, name in theirs)

    # -- where ----------------------------------------------------------------------------------------------------------------------
    def _find(self, modules: Modules) -> None:
        parts = list(_parts(modules))
        self._parts = {id(part) for _, _, part in parts}
        self._buffers = [(path, part._buffers) for _, path, part in parts if part._buffers]
        sharded = {name for name, module in modules.items() if fixups.fsdp_parts(module)}  # there they come and go by themselves
        self._parameters = [
            ((path, key), part._parameters, parameter)  # type: ignore[misc]  # invariant, and only tensors are put in
            for name, path, part in parts
            if name not in sharded
            for key, parameter in part._parameters.items()
            if parameter is not None and not parameter.is_meta
        ]


def _parts(modules: Modules) -> Iterator[tuple[str, str, torch.nn.Module]]:
    for name, module in modules.items():
        for path, part in module.named_modules():
            yield name, f"{name}.{path}" if path else name, part


def _kept(holder: Holder, now: torch.Tensor | None, *, copied: bool) -> _Kept:
    if now is None or now.is_meta:
        return _Kept(holder, now)
    plain = now.layout == torch.strided and not now.is_quantized
    always = not plain or (copied and now.nbytes <= SMALL)
    content = _copy(now) if copied or not plain else None
    return _Kept(holder, now, now._version, now.data_ptr() if plain and not always else 0, content, always)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else _local(tensor).detach().clone()


def _write(tensor: torch.Tensor, content: torch.Tensor) -> None:
    local = _local(tensor)
    if local.shape == content.shape and local.layout == torch.strided:
        local.data.copy_(content)
    else:
        local.data = content.clone()


def _fingerprint(tensor: torch.Tensor) -> bytes:
    """Of the content; what changes places within 8 KiB may not show."""
    content = _local(tensor).detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(values.sums(content), digest_size=16).digest()
