"""What ``generate()`` of a compiled model and of its twins have in common: transformers leaves their forwards alone.

For static caches transformers compiles decoding by itself, and on GPUs it swaps the experts' spelling while decoding.
The forwards here are compiled already, and every spelling of the experts becomes the same op.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class OwnDecoding(nn.Module):
    """Mixed into classes that transformers generates with."""

    @contextmanager
    def _optimize_model_for_decode(self) -> Iterator[None]:
        yield


def uncompiled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Arguments of a ``generate()`` that does not compile, and the generation config among them (a copy) or None."""
    kwargs = dict(kwargs)
    if len(args) > 1:  # generate(inputs, generation_config, ...)
        kwargs["generation_config"] = args[1]
    config = copy.copy(kwargs.get("generation_config"))
    if config is None:
        kwargs.setdefault("disable_compile", True)
    else:
        config.disable_compile = True
        kwargs["generation_config"] = config
    if len(args) > 1:
        args = (args[0], kwargs.pop("generation_config"), *args[2:])
    return args, kwargs, config
