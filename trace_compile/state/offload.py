"""From the device to pinned memory while the device goes on.

What is taken is copied on the device at once (the caller may overwrite it, as CUDA graphs do with their outputs) and
leaves through a stream of its own. What is under way is bounded: beyond the bound the host waits for the oldest copy,
and counts that. Nothing is ever dropped here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

IN_FLIGHT_BYTES = 256 << 20


@dataclass
class Piece:
    """Tensors on the CPU that are complete after ``wait()``; ``None`` entries stay ``None``."""

    tensors: tuple[Tensor | None, ...]
    nbytes: int
    event: torch.cuda.Event | None = None

    def wait(self) -> tuple[Tensor | None, ...]:
        if self.event is not None:
            self.event.synchronize()
            self.event = None
        return self.tensors


class Offload:
    """Takes tensors of any device; see the module docstring."""

    def __init__(self, in_flight_bytes: int = IN_FLIGHT_BYTES) -> None:
        self._limit = in_flight_bytes
        self._flying: deque[Piece] = deque()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self.waits = 0
        """How often the host waited because too much was under way."""

    def take(self, *tensors: Tensor | None) -> Piece:
        """A copy of ``tensors``, which lie on one device, on its way to the CPU."""
        copies = [None if t is None else t.detach().clone(memory_format=torch.contiguous_format) for t in tensors]
        device = next((t.device for t in copies if t is not None), torch.device("cpu"))
        nbytes = sum(t.numel() * t.element_size() for t in copies if t is not None)
        if device.type != "cuda":
            return Piece(tuple(None if t is None else t.cpu() for t in copies), nbytes)
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_stream(torch.cuda.current_stream(device))
        arrived: list[Tensor | None] = []
        with torch.cuda.stream(stream):
            for copy in copies:
                if copy is None:
                    arrived.append(None)
                    continue
                pinned = torch.empty(copy.shape, dtype=copy.dtype, pin_memory=True)
                arrived.append(pinned.copy_(copy, non_blocking=True))
                copy.record_stream(stream)  # the allocator must not hand it out again before this copy is done
            event = torch.cuda.Event()
            event.record(stream)
        piece = Piece(tuple(arrived), nbytes, event)
        self._flying.append(piece)
        self._make_room()
        return piece

    def _make_room(self) -> None:
        while self._flying and (self._flying[0].event is None or self._flying[0].event.query()):
            self._flying.popleft()
        while sum(piece.nbytes for piece in self._flying) > self._limit and len(self._flying) > 1:
            self.waits += 1
            self._flying.popleft().wait()
