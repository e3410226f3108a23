"""Gradients where one step ends and the next begins: which there are, and in which tensors.

Most scripts have new ones made in every step. Others keep the tensors and set them to zero: views of one flat buffer that is reduced at
once, what a captured graph writes into, what somebody holds in a list. A redone step and a successor have to find such tensors where they
were; new ones would be reduced, or read, by nobody. So every step notes (weakly: two sets of gradients would be too many) which there were
when it began. One that outlived a step *lasts*: it is there again, as zeros. One that steps make anew is gone. While none lasts, most steps
look at a few parameters only (a look at each of 3,000 takes 2 ms).

Zeros are right unless gradients are summed up over several steps. What a lost rank has summed up is nowhere else, so that is refused, by
an optimizer's first updates (on all ranks alike), and by its next ones after a step that made gradients and did not update with it.
May not know: migrations.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from tmrun.core.errors import WorkerError
from tmrun.worker import fixups, graphs, values

_PROVEN = 2
"""Updates of an optimizer after which it is not looked at any more: the first one has no gradients before it."""
_LOOK = 128
"""Steps after which parameters that no optimizer has are looked up again, and two steps note all gradients; sooner in the first ones."""
_FIRST = 8
"""Steps of a set of parameters in which all their gradients are noted."""
_SAMPLE = 64
"""So many gradients of an optimizer are looked at in later ones: others may never update with theirs, or only in turns."""

Reference = weakref.ref[torch.Tensor] | None
Noted = tuple[torch.Tensor, Reference]
"""A parameter and the gradient that it had."""


class Gradients:
    """Of the parameters of ``optimizers()`` and of ``modules``, which may grow."""

    def __init__(self, optimizers: Callable[[], list[torch.optim.Optimizer]], modules: Mapping[str, torch.nn.Module]) -> None:
        self._optimizers, self._modules = optimizers, modules
        self.clear()

    def clear(self) -> None:
        """Forget everything (soft restart)."""
        self._trained: list[list[torch.Tensor]] = []
        """By optimizer."""
        self._owners: list[torch.Tensor] = []
        """The trained ones, then the modules' other parameters."""
        self._noted: list[Reference] = []
        """What they had when the step began; empty: not known."""
        self._before: list[Reference] = []
        """... and the step before."""
        self._due = _FIRST
        """Steps from here on that note all."""
        self._noted_all = True
        self._some_last = False
        self._samples: list[Reference] = []
        self._steps = 0
        self._judged: Counter[int] = Counter()
        """Updates looked at, by optimizer (its first parameter, for a wrapper's are those of the optimizer in it)."""
        self._updated: set[int] = set()
        """Optimizers that have in this step."""
        self._older: list[Noted] = []
        """Owners that still have what an earlier step made, as far as this step's backward passes show."""
        self._summed_unsharded = False
        self._backwards = self._backwards_before = 0
        self._captured = 0
        """Backward passes captured before the step began."""

    # -- a step ---------------------------------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """A step begins."""
        self._steps += 1
        self._find()
        if self._backwards:
            for first in self._judged.keys() - self._updated:
                del self._judged[first]
        self._backwards_before, self._backwards, self._summed_unsharded = self._backwards, 0, False
        self._updated.clear()
        self._captured = graphs.captured_backwards()
        self._note()
        held = [[p for p in mine if p.grad is not None] for mine in self._doubtful()]
        some = [*_flat(mine if self._steps <= _FIRST else mine[:: -(-len(mine) // _SAMPLE) or 1] for mine in held)]
        self._older = [*zip(some, _references(some), strict=True)]

    def _note(self) -> None:
        due = max(self._due, 0 if self._steps % _LOOK else 2)
        self._due = max(due - 1, 0)
        known, self._before = self._noted_all, self._noted
        sampled = self._sampled()
        self._noted_all = due > 0 or self._some_last or self._captured > 0 or sampled
        self._noted = _references(self._owners) if self._noted_all else [None] * len(self._owners)
        if known and self._noted_all and self._before:  # else what lasted may do so still
            self._some_last = _outlived(self._before, self._noted)

    def _sampled(self) -> bool:
        """Whether a few gradients outlived the step before, or are parts of something larger."""
        sample = [p for mine in self._trained for p in (mine[0], mine[len(mine) // 2], mine[-1])]
        before, self._samples = self._samples, _references(sample)
        return _outlived(before, self._samples) or any(p.grad is not None and p.grad._is_view() for p in sample)

    def before_backward(self) -> None:
        """Gradients are about to be made, or added to what is there."""
        self._backwards += 1
        if self._backwards == 1 and self._doubtful():
            self._summed_unsharded = any(fixups.holds_gradients(module) for module in self._modules.values())
        if self._older:
            self._older = _holding(self._older)

    def before_update(self, optimizer: torch.optim.Optimizer, *, closure: bool = False) -> None:
        """``optimizer`` is about to use them, or to make its own in a ``closure``. Raises WorkerError if they are of an earlier step."""
        first = next((id(p) for group in optimizer.param_groups for p in group["params"]), 0)
        self._updated.add(first)
        if closure:
            self._judged[first] = _PROVEN
        if self._judged[first] >= _PROVEN:
            return
        self._judged[first] += 1
        places = {*map(id, parameters_of(optimizer))}
        older = [(o, r) for o, r in self._older if id(o) in places]
        summed = older or self._summed_unsharded if self._backwards else self._backwards_before and _holding(older)
        if summed:
            raise WorkerError(
                f"a {type(optimizer).__name__} updates with gradients to which an earlier step has contributed; they would be lost with a "
                "rank. Set them to zero in every step, and put all micro-batches of an update into one `with step:` block"
            )

    def _doubtful(self) -> list[list[torch.Tensor]]:
        """Parameters of each optimizer that may sum up gradients over steps. What a captured backward pass writes shows nowhere."""
        return [] if graphs.captured_backwards() else [mine for mine in self._trained if self._judged[id(mine[0])] < _PROVEN]

    # -- where the last step left them ----------------------------------------------------------------------------------------------
    def lasting(self) -> bytes:
        """For a successor: 1 for each parameter whose gradient lasts, or is the first one that it ever had, else 0."""
        self._find()
        if not self._noted_all:
            return bytes(len(self._owners))
        before = self._noted or itertools.repeat(None)
        return bytes(o.grad is not None and (r is None or r() is o.grad) for o, r in zip(self._owners, before, strict=False))

    @property
    def _replaced(self) -> bool:
        """Whether the step captured a backward pass: its replays write the gradients that are there now, not those that were noted."""
        return graphs.captured_backwards() != self._captured

    def drop_renewed(self) -> None:
        """Free what the next step would make anew."""
        if self._replaced:
            return
        for owner, noted in zip(self._owners, self._noted, strict=False):
            if noted is None or noted() is not owner.grad:
                owner.grad = None

    def put_back(self) -> None:
        """To where the step began; as they are where that is not known, or a graph writes others now. What they hold is gone."""
        noted = {id(owner): reference for owner, reference in zip(self._owners, self._noted, strict=False)}
        self._find()
        for owner in self._owners:
            reference = noted.get(id(owner))
            known = reference() if reference is not None else None
            stays = id(owner) not in noted or (self._replaced and owner.grad is not None)
            _put(owner, owner.grad if stays else known)
        self._noted, self._before = self._before, []

    def adopt(self, lasting: bytes) -> None:
        """Have gradients where another process, or this one at another step, had ``lasting`` ones. Raises WorkerError."""
        self._find()
        if len(lasting) != len(self._owners):
            raise WorkerError(f"{len(lasting)} parameters in the running job, {len(self._owners)} here; same script, same flags?")
        captured = graphs.captured_backwards() > 0  # after those others' step, or before it here: it will not be captured again
        for owner, lasts in zip(self._owners, lasting, strict=True):
            fresh = torch.zeros_like(owner.detach()) if lasts and owner.grad is None else None
            _put(owner, owner.grad if owner.grad is not None and (lasts or captured) else fresh)
        self._noted = self._before = []
        self._noted_all = True

    def _find(self) -> None:
        trained = [mine for optimizer in self._optimizers() if (mine := parameters_of(optimizer))]
        known = [(len(mine), id(mine[0])) for mine in trained] == [(len(mine), id(mine[0])) for mine in self._trained]
        if known and self._steps > 3 and self._steps % _LOOK:
            return
        owners = {id(p): p for p in _flat(trained)}
        for module in self._modules.values():  # under FSDP2 those that a module has come and go
            owners |= {id(p): p for p in (fixups.shards(module) if fixups.fsdp_parts(module) else module.parameters())}
        if [*owners] != [id(owner) for owner in self._owners]:
            self._noted = self._before = []
            self._due, self._noted_all = _FIRST, True
        self._trained, self._owners = trained, [*owners.values()]


_flat = itertools.chain.from_iterable


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """In the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _references(owners: Iterable[torch.Tensor]) -> list[Reference]:
    return [None if (gradient := owner.grad) is None else weakref.ref(gradient) for owner in owners]


def _outlived(before: Sequence[Reference], now: Sequence[Reference]) -> bool:
    """Whether any gradient of the step before is still where it was. (A living tensor has one weak reference without a callback.)"""
    return any(then is not None and then is here and then() is not None for then, here in zip(before, now, strict=False))


def _put(owner: torch.Tensor, gradient: torch.Tensor | None) -> None:
    if owner.grad is not gradient:
        owner.grad = gradient
    if gradient is not None:
        with torch.no_grad():
            values.shard(gradient).zero_()


def _holding(noted: Iterable[Noted]) -> list[Noted]:
    """Those whose gradient is what it was, and is not zero. While a graph is captured nobody can look."""
    same: dict[torch.device, list[tuple[Noted, torch.Tensor]]] = {}
    for each in noted:
        gradient = each[0].grad
        if gradient is not None and each[1] is not None and each[1]() is gradient and not _capturing(gradient):
            same.setdefault(gradient.device, []).append((each, gradient))
    return [each for mine in same.values() for (each, _), held in zip(mine, _contents(g for _, g in mine), strict=True) if held]


def _contents(gradients: Iterable[torch.Tensor]) -> list[bool]:
    """Whether there are any but zeros in each. They are on one device, which is waited for once."""
    parts = [values.shard(gradient) for gradient in gradients]
    held: list[bool] = torch.stack([(part._values() if part.is_sparse else part).any() for part in parts]).tolist()
    return held


def _capturing(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
