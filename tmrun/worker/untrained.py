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

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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
_TOGETHER = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
}  # fmt: skip
"""What can be copied together on every device."""
Modules = Mapping[str, torch.nn.Module]
Holder = dict[str, torch.Tensor | None]
Place = tuple[str, str]
"""Module and name in it."""


@dataclass(eq=False)
class _Kept:
    """A tensor at the start of a step; None: there was none."""

    place: Place
    holder: Holder
    frozen: bool
    """A parameter; else a buffer."""
    key: str = ""
    tensor: torch.Tensor | None = None
    version: int = 0
    address: int = 0
    size: int = 0
    content: torch.Tensor | None = None
    always: bool = False
    """Whether it is copied in every step: small, or its changes do not show."""
    source: torch.Tensor | None = None
    """The tensor itself, if it can be copied together with others."""
    fingerprint: bytes | None = None
    seen: int = 0
    """The step that it is of."""

    def take(self, now: torch.Tensor | None, *, copied: bool, restless: bool) -> None:
        """As it is now."""
        self.tensor, self.content, self.always, self.source, self.fingerprint = now, None, False, None, None
        self.version = self.address = self.size = 0
        if now is None:
            return
        plain = now.layout == torch.strided and not now.is_quantized
        untold = restless or now.is_inference()  # such a tensor has no version
        self.always = not now.is_meta and (not plain or untold or (copied and not self.frozen and now.nbytes <= SMALL))
        self.content = _copy(now) if (copied and not now.is_meta) or self.always else None
        self.version, self.address, self.size = 0 if untold else now._version, now.data_ptr() if plain else 0, now.numel()
        self.source = values.shard(now).detach() if plain and self.always and now.dtype in _TOGETHER else None

    def same(self, now: torch.Tensor) -> bool:
        """Whether it is the same memory, whatever it holds."""
        return now is self.tensor and (self.address == 0 or (now.data_ptr() == self.address and now.numel() == self.size))

    def touched(self, now: torch.Tensor | None) -> bool:
        """Whether it changed in a way that shows without looking at its content."""
        if now is None:
            return self.tensor is not None
        return not self.same(now) or (not self.always and now._version != self.version)


class Untrained:
    """The copies, by module and name."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        self._together: list[tuple[list[torch.Tensor], list[torch.Tensor]]] | None = None
        """Where to and from where what is copied in every step, by kind; None: to be found out."""
        self._alone: list[_Kept] = []
        """What is copied in every step by itself."""
        self._restless: set[Place] = set()
        self._moving: set[Place] = set()
        self._parts: set[int] = set()
        self._calls = 0
        me = weakref.ref(self)  # torch keeps the hooks for good

        def registered(module: torch.nn.Module, *_: object) -> None:
            if (untrained := me()) is not None and id(module) in untrained._parts:
                untrained._parts.clear()  # look again

        register_module_buffer_registration_hook(registered)
        register_module_module_registration_hook(registered)
        register_module_parameter_registration_hook(registered)

    # -- at the start of a step -----------------------------------------------------------------------------------------------------
    def keep(self, modules: Modules) -> None:
        """Copy what may have changed."""
        self._calls += 1
        look = self._calls <= FIRST or self._calls % EVERY < 2
        if not self._parts or look:
            self._find(modules)
        for kept in self._kept:
            now = kept.holder.get(kept.key)
            if kept.always and now is not None and kept.same(now) and not kept.frozen:
                continue
            if not kept.frozen:
                self._keep_buffer(kept, now)
            elif now is not None and not now.requires_grad:
                self._keep_frozen(kept, now)
            else:
                continue
            if look and now is not None and not kept.always:
                self._compare(kept, now)
        self._copy_together()

    def _keep_buffer(self, kept: _Kept, now: torch.Tensor | None) -> None:
        if not kept.seen or kept.touched(now):
            self._take(kept, now, copied=True)

    def _keep_frozen(self, kept: _Kept, now: torch.Tensor) -> None:
        if not kept.seen or kept.seen != self._calls - 1:  # it was trained meanwhile
            self._take(kept, now, copied=kept.place in self._moving)
        elif kept.touched(now):
            self._moving.add(kept.place)
            self._take(kept, now, copied=True)
        kept.seen = self._calls

    def _take(self, kept: _Kept, now: torch.Tensor | None, *, copied: bool) -> None:
        kept.take(now, copied=copied, restless=kept.place in self._restless)
        kept.seen = self._calls
        self._together = None

    def _compare(self, kept: _Kept, now: torch.Tensor) -> None:
        if now.is_meta:
            return
        before, kept.fingerprint = kept.fingerprint, values.fingerprint(values.shard(now))
        if before is not None and before != kept.fingerprint:
            self._restless.add(kept.place)
            self._moving.add(kept.place)
            self._take(kept, now, copied=True)

    def _copy_together(self) -> None:
        """On a device a kernel for all, instead of one each."""
        if self._together is None:
            kinds: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = defaultdict(lambda: ([], []))
            for kept in self._kept:
                if kept.source is not None and kept.content is not None:
                    contents, sources = kinds[kept.source.dtype, kept.source.device]
                    contents.append(kept.content)
                    sources.append(kept.source)
            self._together = list(kinds.values())
            self._alone = [k for k in self._kept if k.always and k.source is None]
        for contents, sources in self._together:
            torch._foreach_copy_(contents, sources)
        for kept in self._alone:
            kept.content = _copy(kept.tensor)

    # -- back to it -----------------------------------------------------------------------------------------------------------------
    def put_back(self) -> None:
        """Copy back what changed since ``keep``. Raises WorkerError if there is nothing to copy."""
        with torch.no_grad():
            for kept in self._kept:
                if kept.seen == self._calls or (kept.seen and not kept.frozen):
                    self._put_back(kept)

    def _put_back(self, kept: _Kept) -> None:
        if not kept.always and not kept.touched(kept.holder.get(kept.key)):
            return
        if kept.content is None and kept.tensor is not None:
            raise WorkerError(
                f"{'.'.join(kept.place)}, which is frozen, changed for the first time in a step that has to be run again; "
                "what it was before is not known"
            )
        kept.holder[kept.key] = kept.tensor
        if kept.tensor is not None and kept.content is not None:
            _write(kept.tensor, kept.content)
            self._take(kept, kept.tensor, copied=True)

    # -- others' --------------------------------------------------------------------------------------------------------------------
    def renew(self) -> None:
        """Everything is about to be written from elsewhere."""
        self._kept = []
        self._parts.clear()

    def clear(self) -> None:
        """Forget everything (soft restart)."""
        self.renew()
        self._calls = 0
        self._restless.clear()
        self._moving.clear()

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
        sharded = {name for name, module in modules.items() if fixups.fsdp_parts(module)}  # there parameters come and go by themselves
        known = {kept.place: kept for kept in self._kept}
        self._kept, self._together = [], None
        for name, path, part in parts:
            places = [((path, key), part._buffers, False) for key in part._buffers]
            if name not in sharded:
                places += [((path, key), part._parameters, True) for key in part._parameters]  # type: ignore[misc]  # invariant
            for place, holder, frozen in places:
                kept = known.get(place)
                self._kept.append(kept if kept is not None and kept.holder is holder else _Kept(place, holder, frozen, place[1]))


def _parts(modules: Modules) -> Iterator[tuple[str, str, torch.nn.Module]]:
    for name, module in modules.items():
        for path, part in module.named_modules():
            yield name, f"{name}.{path}" if path else name, part


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else values.shard(tensor).detach().clone()


def _write(tensor: torch.Tensor, content: torch.Tensor) -> None:
    local = values.shard(tensor)
    with torch.inference_mode(local.is_inference()):
        if local.shape == content.shape and local.layout == torch.strided:
            local.data.copy_(content)
        else:
            local.data = content.clone()
