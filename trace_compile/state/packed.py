"""The packed weights: 4-bit copies of expert parameters that follow their masters.

One entry per (parameter name, layout, scheme). The training forward asks for it at every step; it is packed again only
when the parameter changed. A rollout is refitted as a whole: everything is packed beside the old weights and checked,
and only then copied over them.

Invariants
- Addresses are stable: an entry's tensors are allocated once and then copied into (CUDA graphs and engines hold them),
  unless shape or device changed.
- An entry is never half-written: packing refuses non-finite weights before anything is copied.
- Nothing but codes and scales is kept: 4.5 bits per weight for NVFP4, plus one float32 per expert.
- A step of any ``torch.optim.Optimizer`` counts as a change of its parameters: fused optimizers write them without
  raising their version counters.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from trace_compile.errors import RefitError
from trace_compile.ops.quads import in_quads
from trace_compile.ops.scheme import OperandScheme
from trace_compile.ops.weights import Master, Packed, WeightLayout, joined, pack_experts
from trace_compile.state.origins import Packer
from trace_compile.state.sharded import local


@dataclass(frozen=True, eq=False)
class Stamp:
    """Which content an entry was packed from: the memory, how the parameter views it, and its version counter.

    The weak reference keeps the storage's identity (not its memory) alive, so that a new parameter in the place of a
    freed one, with the same address and version, is not taken for it.
    """

    storage: StorageWeakRef
    view: tuple[object, ...]

    @classmethod
    def of_all(cls, master: Master) -> tuple[Stamp, ...]:
        return tuple(cls.of(param) for param in (master if isinstance(master, tuple) else (master,)))

    @classmethod
    def of(cls, param: Tensor) -> Stamp:
        param = local(param)
        version = None if param.is_inference() else param._version  # inference tensors have no version counter
        view = (param.data_ptr(), tuple(param.shape), param.stride(), param.dtype, param.device, version)
        return cls(StorageWeakRef(param.untyped_storage()), view)

    def same(self, other: Stamp) -> bool:
        return self.storage.cdata == other.storage.cdata and self.view == other.view


@dataclass
class _Entry:
    packed: Packed
    stamps: tuple[Stamp, ...] | None
    """One per parameter that it was packed from. None: pack again at the next use."""

    def made_from(self, stamps: tuple[Stamp, ...]) -> bool:
        return self.stamps is not None and all(a.same(b) for a, b in zip(self.stamps, stamps, strict=True))


_Key = tuple[str, WeightLayout, OperandScheme]


class PackedWeights:
    """The cache. Not safe for threads that pack the same parameter at the same time."""

    def __init__(self, pack: Packer = pack_experts) -> None:
        """``pack``: called as ``pack_experts`` is; its result is this cache's own."""
        self._pack_experts = pack
        self._entries: dict[_Key, _Entry] = {}
        self.pack_count = 0
        """Parameters packed so far."""
        _watchers.add(self)

    def get(self, name: str, param: Master, layout: WeightLayout, scheme: OperandScheme) -> Packed:
        """The packed form of ``param`` [E, N, K] (in its ``layout``), packed again if it changed since the last call.
        Several parameters are packed as one whose rows are theirs, one parameter's after the other's.

        A change is seen in optimizer steps, the version counter, the storage, the shape or the strides. Writes that
        hide from all of them (through ``.data``, through other tensors on the same memory, in other processes) need
        ``refresh``.
        Raises ``NonFiniteWeightError`` naming the parameter; the entry then keeps its old content.
        """
        key = (name, layout, scheme)
        stamps = Stamp.of_all(param)
        entry = self._entries.get(key)
        if entry is not None and entry.made_from(stamps):
            return entry.packed
        packed = self._pack(key, param)
        if entry is None or not _fits(entry.packed, packed) or entry.packed.codes.device != packed.codes.device:
            entry = self._entries[key] = _Entry(packed, stamps)
        else:
            _write(entry, packed, stamps)
        return entry.packed

    def refresh(self, names: Iterable[str] | None = None) -> None:
        """Has the named parameters (None: all) packed again at their next use. ``RefitError`` for names it lacks."""
        chosen = self.names if names is None else set(names)
        self._check_known(chosen)
        for (name, _, _), entry in self._entries.items():
            if name in chosen:
                entry.stamps = None

    def update_all(self, masters: Mapping[str, Master], *, force: bool = False) -> None:
        """Packs every entry from ``masters`` now, all or nothing.

        Masters may lie on another device than the entries, which stay where they are. Entries whose master did not
        change are skipped unless ``force``. While it runs it takes a second copy of the entries that change.
        Raises ``RefitError`` when the names are not exactly those of the entries or a shape differs, and
        ``NonFiniteWeightError``; in either case no entry changed.
        """
        self._check_known(masters)
        missing = sorted(self.names - masters.keys())
        if missing:
            raise RefitError(f"the refit lacks {missing}: packed weights of different steps must not be mixed")
        staged = []
        for key, entry in self._entries.items():
            param = masters[key[0]]
            stamps = Stamp.of_all(param)
            if force or not entry.made_from(stamps):
                packed = self._pack(key, param)
                if not _fits(entry.packed, packed):
                    raise RefitError(
                        f"{key[0]} was packed from {list(entry.packed.shape)} and is now {list(packed.shape)}; "
                        "build the rollout again for another model"
                    )
                staged.append((entry, packed, stamps))
        for entry, packed, stamps in staged:
            _write(entry, packed, stamps)

    def adopt(self, packed: Mapping[str, Packed]) -> None:
        """Copies packed weights, from any device, into every entry; all or nothing, whatever the masters hold.

        Raises ``RefitError`` when the names are not exactly those of the entries or a shape differs.
        """
        self._check_known(packed)
        missing = sorted(self.names - packed.keys())
        if missing:
            raise RefitError(f"packed weights lack {missing}: those of different steps must not be mixed")
        staged = []
        for (name, _, _), entry in self._entries.items():
            given = packed[name]
            if given.shape == entry.packed.shape:
                given = given.quads if in_quads(entry.packed.codes) else given.linear
            if not _fits(entry.packed, given):
                raise RefitError(f"{name} is {list(packed[name].shape)}, this model's is {list(entry.packed.shape)}")
            staged.append((entry, given))
        for entry, given in staged:
            _write(entry, given, None)

    @property
    def names(self) -> set[str]:
        return {name for name, _, _ in self._entries}

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(entry.packed.nbytes for entry in self._entries.values())

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight over all entries, outer scales included; 0 without entries."""
        weights = sum(math.prod(entry.packed.shape) for entry in self._entries.values())
        return 8 * self.nbytes / max(weights, 1)

    def __len__(self) -> int:
        return len(self._entries)

    def _pack(self, key: _Key, param: Master) -> Packed:
        name, layout, scheme = key
        with torch.inference_mode(False), torch.no_grad():  # a rollout's first use must not make inference tensors
            packed = self._pack_experts(joined(param), layout, scheme, name=name)
        self.pack_count += 1
        return packed

    def _stepped(self, storages: Container[int]) -> None:
        """Has entries packed from one of these memories packed again at their next use."""
        for entry in self._entries.values():
            if entry.stamps is not None and any(stamp.storage.cdata in storages for stamp in entry.stamps):
                entry.stamps = None

    def _check_known(self, names: Iterable[str]) -> None:
        unknown = sorted(set(names) - self.names)
        if unknown:
            raise RefitError(f"no packed weights are named {unknown}; there are {sorted(self.names)}")


def _write(entry: _Entry, packed: Packed, stamps: tuple[Stamp, ...] | None) -> None:
    """Copies ``packed``, from any device, into the entry's tensors."""
    with torch.inference_mode(False), torch.no_grad():
        for part in fields(Packed):
            getattr(entry.packed, part.name).copy_(getattr(packed, part.name))
    entry.stamps = stamps


def _fits(old: Packed, new: Packed) -> bool:
    return all(getattr(old, part.name).shape == getattr(new, part.name).shape for part in fields(Packed))


class WeightsVersion:
    """Counts the states of a set of parameters, looked at from time to time; the same state has one number.

    A change is seen as ``PackedWeights`` sees it, so hidden writes need ``refresh``.
    """

    def __init__(self) -> None:
        self.number = 0
        self._stamps: dict[str, Stamp] = {}
        self._changed = True
        _watchers.add(self)

    def observe(self, parameters: Mapping[str, Tensor], number: int | None = None) -> int:
        """The version of ``parameters`` now: one more than before if they changed since, or the given ``number``.

        Raises ``RefitError`` for a number below the last one: of two records the one with the higher number is newer.
        """
        self.check(number)
        stamps = {name: Stamp.of(p) for name, p in parameters.items()}
        same = stamps.keys() == self._stamps.keys() and all(s.same(self._stamps[n]) for n, s in stamps.items())
        if number is not None:
            self.number = number
        elif self._changed or not same:
            self.number += 1
        self._stamps, self._changed = stamps, False
        return self.number

    def advance(self, number: int | None = None) -> int:
        """The version of weights that came from elsewhere: the given ``number`` or one more than the last."""
        self.check(number)
        self.number, self._changed = self.number + 1 if number is None else number, True
        return self.number

    def check(self, number: int | None) -> None:
        """Raises ``RefitError`` for a number that ``observe`` would refuse."""
        if number is not None and number < self.number:
            raise RefitError(f"weights version {number} is older than the last one, {self.number}; versions only grow")

    def refresh(self) -> None:
        """The next look finds a change."""
        self._changed = True

    def _stepped(self, storages: Container[int]) -> None:
        self._changed = self._changed or any(s.storage.cdata in storages for s in self._stamps.values())


_watchers: weakref.WeakSet[PackedWeights | WeightsVersion] = weakref.WeakSet()


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not _watchers:
        return
    storages = {local(p).untyped_storage()._cdata for group in optimizer.param_groups for p in group["params"]}
    for watcher in tuple(_watchers):
        watcher._stepped(storages)


register_optimizer_step_post_hook(_after_step)
