"""Module trees that share or copy their tensors.

The rollout twin is a second module tree over the trainer's tensors. ``share_tree`` builds one without copying a
tensor; ``own_tensors`` then gives chosen parts copies of their own, for a twin that must stay behind the trainer (stale
weights).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Container, Mapping
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig

from trace_compile.errors import NonFiniteWeightError, RefitError
from trace_compile.state.sharded import all_finite, is_dtensor, local, plain_class, whole


def subclass(cls: type[nn.Module], mixin: type) -> type[nn.Module]:
    """A subclass of ``cls`` that looks like it from outside and takes ``forward`` and more from ``mixin``.

    Name, module and signature stay those of ``cls``: libraries read them (architecture names, accepted arguments).
    """

    @wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, made):  # a wrapper around this function (autocast) that a twin or a copy took over
            return type(self).forward(self, *args, **kwargs)
        return mixin.forward(self, *args, **kwargs)  # type: ignore[attr-defined]

    # The signature without the function: accelerate unwraps models along __wrapped__ and would find the plain forward.
    forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]
    del forward.__wrapped__
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    made = type(cls.__name__, (mixin, cls), names | {"forward": forward})
    return made


def rebind(module: nn.Module, moved: Mapping[int, nn.Module]) -> None:
    """Bind methods among ``module``'s own attributes (a ``forward`` wrapped by accelerate) to the copies of their
    objects; ``moved`` maps the id of an object to its copy."""
    for name, value in list(module.__dict__.items()):
        if isinstance(value, MethodType) and id(value.__self__) in moved:
            module.__dict__[name] = MethodType(value.__func__, moved[id(value.__self__)])


def share_tree(module: nn.Module, into: nn.Module) -> None:
    """Make ``into`` the root of a new module tree whose parameters and buffers are the same objects as ``module``'s.

    Attributes other than parameters, buffers and submodules are copied by reference; attributes that point at a
    submodule, and methods bound to one, point at the clone's. ``into`` keeps its class.
    """
    memo: dict[int, nn.Module] = {}
    _share(module, memo, into)
    for old_id, new in memo.items():
        for name, value in list(new.__dict__.items()):
            if isinstance(value, nn.Module) and id(value) in memo and id(value) != old_id:
                new.__dict__[name] = memo[id(value)]
        rebind(new, memo)


def _share(module: nn.Module, memo: dict[int, nn.Module], into: nn.Module | None = None) -> nn.Module:
    if id(module) in memo:
        return memo[id(module)]
    cls = plain_class(module.__class__)
    clone = cls.__new__(cls) if into is None else into
    memo[id(module)] = clone
    clone.__dict__.update(module.__dict__)
    for table in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
        clone.__dict__[table] = copy.copy(module.__dict__[table])
    for table in [name for name in module.__dict__ if name.endswith("_hooks") or "_hooks_" in name]:
        clone.__dict__[table] = copy.copy(module.__dict__[table])
    clone.__dict__["_modules"] = {
        name: _share(child, memo) if child is not None else None for name, child in module._modules.items()
    }
    return clone


def same_tree(source: nn.Module, target: nn.Module) -> bool:
    """Whether both have the same modules and tensors by name and class; the roots' own classes may differ."""

    def outline(root: nn.Module) -> list[Any]:
        modules = list(root.named_modules(remove_duplicate=False))[1:]
        found = [(name, plain_class(type(m))) for name, m in modules]
        tensors = [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]
        return [*found, *(name for name, _ in tensors)]

    return outline(source) == outline(target)


def own_configs(module: nn.Module, settings: Mapping[str, Any] | None = None) -> None:
    """Give ``module`` and its parts transformers configurations of their own, shared among them as they were.

    ``settings`` are attributes of the root that it had before: they take the place of the ones it has now.
    """
    memo: dict[int, Any] = {id(module.__dict__[name]): value for name, value in (settings or {}).items()}
    for part in module.modules():
        for name, value in list(part.__dict__.items()):
            if isinstance(value, PreTrainedConfig | GenerationConfig):
                part.__dict__[name] = copy.deepcopy(value, memo)


@torch.inference_mode(False)
@torch.no_grad()
def own_tensors(module: nn.Module, *, skip: Container[str] = ()) -> None:
    """Replace every parameter and buffer of ``module`` by a copy, except the dotted names in ``skip``.

    What is sharded over ranks, which then all have to be here, becomes whole; of sharded tensors in ``skip`` only the
    shape is kept, without memory.
    Tied parameters stay tied. Copies require gradients where the originals do: some kernels are chosen by that flag,
    and a twin's bits shall not depend on whether it shares or copies.
    """
    copies: dict[int, torch.Tensor] = {}
    for prefix, sub in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        for name, p in sub._parameters.items():
            if p is not None and dot + name not in skip:
                if id(p) not in copies:
                    copies[id(p)] = nn.Parameter(whole(p).detach().clone(), p.requires_grad)
                sub._parameters[name] = copies[id(p)]
            elif p is not None and is_dtensor(p):
                shape = local(p).new_empty(()).expand(p.shape)
                sub._parameters[name] = nn.Parameter(shape, p.requires_grad)
        for name, b in sub._buffers.items():
            if b is not None and dot + name not in skip:
                sub._buffers[name] = copies.setdefault(id(b), b.detach().clone())


def share_tensors(source: nn.Module, target: nn.Module) -> None:
    """Give ``target``, a tree of the same shape, the parameters and buffers that ``source`` has now.

    ``load_state_dict(assign=True)`` replaces parameters, and moving a model to a device replaces its buffers.
    """
    for name, own in target.named_modules(remove_duplicate=False):
        current = source.get_submodule(name)
        own._parameters.update(current._parameters)
        own._buffers.update(current._buffers)


@torch.no_grad()
def check_copies(source: nn.Module, target: nn.Module | None, *, skip: Container[str] = ()) -> None:
    """Whether ``source`` can be copied into ``target`` (None: into new tensors), before anything is.

    Raises ``NonFiniteWeightError`` naming the parameters that hold NaN or Inf (buffers may: masks do), ``RefitError``
    naming the first tensor whose shape differs.
    """
    new = _tensors(source)
    for name, tensor in _tensors(target).items() if target is not None else ():
        if name not in skip and tensor.shape != new[name].shape:
            raise RefitError(
                f"{name} is {tuple(new[name].shape)} in the trainer and {tuple(tensor.shape)} in the twin, and nothing "
                "was copied; make a new twin with model.rollout()"
            )
    named = [(n, p) for n, p in source.named_parameters() if n not in skip and p.is_floating_point()]
    fine = all_finite([p for _, p in named])
    bad = [name for (name, _), good in zip(named, fine, strict=True) if not good]
    if bad:
        raise NonFiniteWeightError(f"{', '.join(bad)}: NaN or Inf, and nothing was copied. Restore the weights first")


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    parameters: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    return parameters | dict(module.named_buffers(remove_duplicate=False))


@torch.inference_mode(False)
@torch.no_grad()
def copy_tensors(source: nn.Module, target: nn.Module, *, skip: Container[str] = ()) -> None:
    """Copy parameters and buffers of ``source`` into ``target`` in place (addresses stay), by dotted name."""
    own, new = _tensors(target), _tensors(source)
    for name, tensor in own.items():
        if name not in skip and tensor.data_ptr() != new[name].data_ptr():
            tensor.copy_(whole(new[name]))
