"""The list of modules that are not quantized, in the two pattern languages that engines read.

An engine quantizes what the list does not name, and loads a bf16 weight that the list forgot without an error and with
NaN results. So every module whose tensors are not packed must be matched, and no packed one may be. Patterns are made
from the names themselves, as general as that allows, and engines that rename a model's prefix still find their modules:

 - ``regex`` (compressed-tensors): an exact name, or ``re:`` and an expression matched from the start of the name.
 - ``wildcard`` (ModelOpt): shell wildcards, and a plain name also matches wherever it is a *substring* (``mlp.gate``
   would hit ``mlp.gate_up_proj``), hence ``*.mlp.gate``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from trace_compile.errors import ExportError


@dataclass(frozen=True)
class IgnoreStyle:
    """``candidates(module)``: lists of patterns for one module, most general first. ``matches(pattern, module)``."""

    candidates: Callable[[str], list[list[str]]]
    matches: Callable[[str, str], bool]


def ignore_list(style: IgnoreStyle, modules: Iterable[str], packed: Iterable[str]) -> list[str]:
    """Patterns that match every name of ``modules`` and none of ``packed`` or of the modules that contain those.

    Raises ExportError if a module can only be named by a pattern that also hits a packed one.
    """
    protected = set(packed) | ancestors(packed)
    safe: dict[str, bool] = {}
    chosen: set[str] = set()
    for module in sorted(modules):
        for patterns in style.candidates(module):
            for pattern in patterns:
                if pattern not in safe:
                    safe[pattern] = not any(style.matches(pattern, name) for name in protected)
            if all(safe[pattern] for pattern in patterns):
                chosen.update(patterns)
                break
        else:
            raise ExportError(f"no ignore pattern names {module} without naming a packed module")
    return sorted(chosen)


def ancestors(modules: Iterable[str]) -> set[str]:
    """Every module that contains one of ``modules``."""
    found: set[str] = set()
    for module in modules:
        parts = module.split(".")
        found.update(".".join(parts[:i]) for i in range(1, len(parts)))
    return found


def _parts(module: str) -> tuple[str, list[str]]:
    """The container of a name's last number, from its first numbered list on (engines rename what comes before), and
    the components after that number: ``layers.1.mlp.experts`` and ``[up_proj]``. No number: empty and all of them."""
    parts = module.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    if not numbers:
        return "", parts
    return ".".join(parts[max(numbers[0] - 1, 0) : numbers[-1]]), parts[numbers[-1] + 1 :]


def _regex_candidates(module: str) -> list[list[str]]:
    container, tail = _parts(module)
    if not container:
        return [[module]]
    general = [[rf"re:.*\.{re.escape('.'.join(tail))}$"]] if tail else []
    return [*general, [rf"re:.*{re.escape(container)}\..*"], [module]]


def _regex_matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return pattern == module


def _wildcard_candidates(module: str) -> list[list[str]]:
    container, tail = _parts(module)
    if not container:
        return [[module]]
    candidates = [[f"*{container}.*", f"*{container}"], [module]]
    if tail:
        # Engines look for the parts of a projection that they fuse (gate_proj and up_proj) by their exact names.
        fused = [module] if tail[-1].endswith("_proj") else []
        candidates.insert(0, [f"*.{'.'.join(tail)}", *fused])
    if len(tail) > 1:
        candidates.insert(0, [f"*.{'.'.join(tail[:-1])}.*"])
    return candidates


def _wildcard_matches(pattern: str, module: str) -> bool:
    return fnmatchcase(module, pattern) or pattern in module


REGEX = IgnoreStyle(_regex_candidates, _regex_matches)
WILDCARD = IgnoreStyle(_wildcard_candidates, _wildcard_matches)
