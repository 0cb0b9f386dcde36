"""Every error a user can meet, by name.

Each is a ``ValueError`` whose message says what was wrong, the offending value, and what to do. They are raised before
anything is changed: a model in memory, a file, or a run is never left half-way.
"""

from __future__ import annotations


class TraceCompileError(ValueError):
    """Base of all errors raised by this package."""


class NonFiniteWeightError(TraceCompileError):
    """A weight holds NaN or Inf and would be packed, refitted or exported."""


class BlockSizeError(TraceCompileError):
    """The reduction dimension is not a multiple of the format's block size."""


class OperandError(TraceCompileError):
    """A tensor has a dtype or shape that cannot be quantized (or an outer scale that does not fit it)."""


class UnknownFormatError(TraceCompileError):
    """No such numeric format, profile, outer source or export format."""


class UnknownRecipeError(TraceCompileError):
    """No such recipe."""


class NoMoERegionError(TraceCompileError):
    """Nothing (or, in strict mode, not everything expert-shaped) was rewritten."""


class GraphCaptureError(TraceCompileError):
    """The model could not be captured as one graph."""


class PassError(TraceCompileError):
    """A pass left the graph in a state that breaks an invariant."""


class LoweringError(TraceCompileError):
    """An op of the intermediate representation has no provider on this device."""


class DeviceMismatchError(TraceCompileError):
    """Operands of one op live on different devices."""


class FingerprintMismatchError(TraceCompileError):
    """A trace or checkpoint belongs to another model or recipe."""


class TraceFileError(TraceCompileError):
    """A trace file is truncated, corrupted, or of an unknown version."""


class GuidanceError(TraceCompileError):
    """Guidance or recording was asked for where tokens cannot be identified."""


class PruningError(TraceCompileError):
    """A rollout is to keep experts that it does not have, or fewer than its router needs."""


class RefitError(TraceCompileError):
    """A refit does not name exactly the packed weights, or their shapes changed."""


class ExportError(TraceCompileError):
    """A checkpoint would not be loadable as it stands."""


class UnknownActivationError(TraceCompileError):
    """The activation between the expert GEMMs has a step that is not in the table of elementwise operations."""
