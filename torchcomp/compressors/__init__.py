"""Compressors. To add one, write its file and list it here."""

from torchcomp.compressors.base import Compressor
from torchcomp.compressors.dense import Cast, Identity
from torchcomp.compressors.quantize import Quantize
from torchcomp.compressors.randk import RandK
from torchcomp.compressors.topk import TopK
from torchcomp.compressors.warmup import Warmup

COMPRESSORS: tuple[type[Compressor], ...] = (Identity, TopK, RandK, Cast, Quantize, Warmup)

__all__ = ["COMPRESSORS", "Cast", "Compressor", "Identity", "Quantize", "RandK", "TopK", "Warmup"]
