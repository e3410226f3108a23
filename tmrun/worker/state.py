"""What was registered with ``tmrun.join``: how to read it, put it back, and write it in place.

Three kinds: modules (parameters and all buffers), optimizers (tensors of their state; the rest as plain values), and anything else with
``state_dict`` and ``load_state_dict`` (scheduler, data position). Tensors are only ever copied *into*: DDP, FSDP and compiled code hold
references to them. May not know: who sends, when, over what.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from tmrun.core.errors import WorkerError
from tmrun.worker import fixups, rng, values
from tmrun.worker.gradients import Gradients, parameters_of
from tmrun.worker.untrained import Untrained

Needs = dict[str, bytes]
"""Named parts, encoded: random generators and objects."""
_RNG, _OBJECT = "random/", "object/"

Layout = dict[str, list[tuple[str, tuple[int, ...], torch.dtype, str]]]
"""Per object: key, local shape, dtype and device type of every tensor, in sending order."""


@dataclass
class Snapshot:
    """A rank at the start of a step, as far as a redo needs it."""

    rng: rng.Captured
    objects: dict[str, bytes]
    groups: dict[str, list[dict[str, Any]]]


@dataclass
class State:
    """The registered objects by name, and every DDP instance that user code made."""

    modules: dict[str, torch.nn.Module] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    ddps: list[DistributedDataParallel] = field(default_factory=list)
    untrained: Untrained = field(default_factory=Untrained)
    gradients: Gradients = field(init=False)

    def __post_init__(self) -> None:
        self.gradients = Gradients(self.all_optimizers, self.modules)

    def register(self, registered: Mapping[str, Any]) -> None:
        """Sort the objects by kind."""
        for name, value in registered.items():
            if isinstance(value, torch.nn.Module):
                fixups.check_fsdp(value)
                self.modules[name] = value
            elif isinstance(value, torch.optim.Optimizer):
                self.optimizers[name] = value
            else:
                self.objects[name] = rng.stateful(value)

    def clear(self) -> None:
        """Forget everything (soft restart)."""
        for kind in (self.modules, self.optimizers, self.objects):
            kind.clear()
        self.untrained.clear()
        self.gradients.clear()
        self.ddps.clear()

    # -- tensors --------------------------------------------------------------------------------------------------------------------
    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Local tensors per object, by key."""
        found = {name: _module_tensors(module) for name, module in self.modules.items()}
        return {**found, **{name: _optimizer_tensors(optimizer) for name, optimizer in self.optimizers.items()}}

    def all_optimizers(self) -> list[torch.optim.Optimizer]:
        """Those inside registered wrappers included; each once, though a scheduler holds its own too."""
        found = [*self.optimizers.values(), *(o for each in self.objects.values() for o in _optimizers(each))]
        return [*{id(optimizer): optimizer for optimizer in found}.values()]

    def trained(self) -> list[torch.Tensor]:
        """Parameters of all optimizers."""
        return [parameter for optimizer in self.all_optimizers() for parameter in parameters_of(optimizer)]

    def shared(self, name: str) -> set[str]:
        """Keys whose tensors are the same on replicas: parameters' and optimizers'; buffers may differ until DDP next broadcasts them."""
        if name in self.modules:
            return {key for key, _ in self.modules[name].named_parameters()}
        return set(_optimizer_tensors(self.optimizers[name]))

    def layout(self) -> Layout:
        """What ``tensors`` looks like."""
        return {n: [(k, tuple(t.shape), t.dtype, t.device.type) for k, t in owned.items()] for n, owned in self.tensors().items()}

    def adopt(self, layout: Layout) -> None:
        """Make our tensors look like ``layout`` as far as optimizers may differ. Raises WorkerError naming what does not fit."""
        self.untrained.renew()
        mine = self.tensors()
        if set(mine) != set(layout):
            raise WorkerError(f"registered objects differ: {sorted(layout)} in the running job, {sorted(mine)} here")
        for name, wanted in layout.items():
            if name in self.optimizers:
                _shape_optimizer(name, self.optimizers[name], wanted)
            _compare(name, self.tensors()[name], wanted)

    def signature(self) -> bytes:
        """Identity of this rank's shard: equal on two ranks = each holds a replica of the other's parameters (and optimizer).

        Content counts for parameters only; buffers (a batch norm's) may differ between replicas until DDP next broadcasts them.
        """
        digest = hashlib.blake2b(digest_size=16)
        for name, module in sorted(self.modules.items()):
            for key, tensor in _module_tensors(module).items():
                digest.update(f"{name}.{key} {tuple(tensor.shape)} {tensor.dtype};".encode())
            for _, parameter in module.named_parameters():
                digest.update(values.tensor_bytes(local(parameter)))
        return digest.digest()

    # -- everything else ------------------------------------------------------------------------------------------------------------
    def rest(self) -> dict[str, Any]:
        """The optimizers' part that is not in ``tensors``."""
        return {name: _optimizer_rest(optimizer) for name, optimizer in self.optimizers.items()}

    def put_rest(self, rest: Mapping[str, Any]) -> None:
        """The inverse of ``rest``."""
        for name, optimizer in self.optimizers.items():
            _put_optimizer_rest(optimizer, rest[name])

    def encoded_objects(self) -> dict[str, bytes]:
        """state_dict of every other object, encoded."""
        return {name: values.encode(value.state_dict(), f"{name}.state_dict()") for name, value in self.objects.items()}

    def put_objects(self, encoded: Mapping[str, bytes]) -> None:
        """The inverse of ``encoded_objects``."""
        for name, value in self.objects.items():
            value.load_state_dict(values.decode(encoded[name]))

    def needs(self) -> Needs:
        """What a successor of this rank needs and no replica can give."""
        random = {f"{_RNG}{name}": part for name, part in rng.encode(rng.capture()).items()}
        return {**random, **{f"{_OBJECT}{name}": part for name, part in self.encoded_objects().items()}}

    # -- redo -----------------------------------------------------------------------------------------------------------------------
    def snapshot(self) -> Snapshot:
        """Taken at the start of a step."""
        self.untrained.keep(self.modules)
        self.gradients.begin()
        return Snapshot(rng.capture(), self.encoded_objects(), {n: _groups_of(o) for n, o in self.optimizers.items()})

    def forget_step(self) -> None:
        """Drop what a broken step left behind, in modules (FSDP's unsharded parameters) and in gradients."""
        self.forget_gathers()
        fixups.reset_pipelines()
        fixups.reset_scalers(self.objects.values(), self.optimizers.values())
        self.gradients.put_back()

    def forget_gathers(self) -> None:
        """FSDP gathers parameters again, on all ranks alike; an evaluation leaves those of the root gathered.

        Before state is read or written, for these stand in the way of the shards, and before the next step, for they may be garbage.
        """
        for module in self.modules.values():
            fixups.reset_fsdp(module)

    def rollback(self, snapshot: Snapshot) -> None:
        """Back to the start of the step."""
        self.forget_step()
        self.untrained.put_back()
        for name, groups in snapshot.groups.items():
            for group, kept_group in zip(self.optimizers[name].param_groups, groups, strict=True):
                group.update(kept_group)
        self.put_objects(snapshot.objects)
        rng.restore(snapshot.rng)


def random_of(needs: Needs) -> dict[str, bytes]:
    """Its random generators, for ``rng.decode``."""
    return {name.removeprefix(_RNG): part for name, part in needs.items() if name.startswith(_RNG)}


def objects_of(needs: Needs) -> dict[str, bytes]:
    """Its objects, for ``State.put_objects``."""
    return {name.removeprefix(_OBJECT): part for name, part in needs.items() if name.startswith(_OBJECT)}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a (possibly distributed) tensor that lives here."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _module_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: local(t) for name, t in [*module.named_parameters(), *module.named_buffers()]}


def _optimizers(owner: Any) -> list[torch.optim.Optimizer]:
    """Those that an object holds."""
    return [value for value in vars(owner).values() if isinstance(value, torch.optim.Optimizer)] if hasattr(owner, "__dict__") else []


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{index}.{key}": local(value)
        for index, parameter in enumerate(parameters_of(optimizer))
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }


def _groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def _optimizer_rest(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    scalars = {
        (index, key): value
        for index, parameter in enumerate(parameters_of(optimizer))
        for key, value in optimizer.state.get(parameter, {}).items()
        if not isinstance(value, torch.Tensor)
    }
    return {"groups": _groups_of(optimizer), "scalars": scalars}


def _put_optimizer_rest(optimizer: torch.optim.Optimizer, rest: dict[str, Any]) -> None:
    for group, wanted in zip(optimizer.param_groups, rest["groups"], strict=True):
        for key, value in wanted.items():
            if isinstance(group.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
                group[key].copy_(value)
            else:
                group[key] = value
    parameters = parameters_of(optimizer)
    for (index, key), value in rest["scalars"].items():
        optimizer.state[parameters[index]][key] = value


def _shape_optimizer(name: str, optimizer: torch.optim.Optimizer, wanted: list[tuple[str, tuple[int, ...], torch.dtype, str]]) -> None:
    """Drop state that the source does not have, make (empty) what only the source has."""
    parameters = parameters_of(optimizer)
    entries = {key: (shape, dtype, device) for key, shape, dtype, device in wanted}
    for index, parameter in enumerate(parameters):
        held = optimizer.state.get(parameter, {})
        for key in [k for k, v in held.items() if isinstance(v, torch.Tensor) and f"{index}.{k}" not in entries]:
            del held[key]
        if not held:
            optimizer.state.pop(parameter, None)
    for key, (shape, dtype, device) in entries.items():
        place, entry = key.split(".", 1)
        if int(place) >= len(parameters):
            raise WorkerError(f"{name} has {len(parameters)} parameters here, at least {int(place) + 1} in the running job")
        parameter = parameters[int(place)]
        if not isinstance(optimizer.state[parameter].get(entry), torch.Tensor):  # LBFGS begins with a plain number
            fits = tuple(local(parameter).shape) == shape and parameter.dtype == dtype and device == parameter.device.type
            optimizer.state[parameter][entry] = (
                torch.zeros_like(parameter.detach()) if fits else torch.zeros(shape, dtype=dtype, device=device)
            )


def _compare(name: str, mine: dict[str, torch.Tensor], wanted: list[tuple[str, tuple[int, ...], torch.dtype, str]]) -> None:
    if strange := sorted({k for k, *_ in wanted} ^ set(mine)):
        raise WorkerError(
            f"{name}.{strange[0]} exists only {'here' if strange[0] in mine else 'in the running job'}; same script, same flags?"
        )
    for key, shape, dtype, _ in wanted:
        tensor = mine[key]
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise WorkerError(f"{name}.{key} is {tuple(tensor.shape)} {tensor.dtype} here, {shape} {dtype} in the running job")
