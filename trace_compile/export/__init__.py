"""Checkpoints that serving engines load: ``checkpoint`` writes them, ``verify`` reads them back, ``reload`` loads."""

from trace_compile.export.checkpoint import ExportReport, export_checkpoint
from trace_compile.export.experts import ExpertTensor, ExpertWeights, LinearWeights, RegionWeights
from trace_compile.export.formats import FORMATS
from trace_compile.export.reload import reload
from trace_compile.export.stream import ModelStream
from trace_compile.export.verify import VerifyReport, verify_checkpoint

__all__ = [
    "FORMATS",
    "ExpertTensor",
    "ExpertWeights",
    "ExportReport",
    "LinearWeights",
    "ModelStream",
    "RegionWeights",
    "VerifyReport",
    "export_checkpoint",
    "reload",
    "verify_checkpoint",
]
