"""Compressors, one method per file. To add one, write its file and list it here."""

from torchcomp.compressors.base import Compressor
from torchcomp.compressors.cast import Cast
from torchcomp.compressors.identity import Identity
from torchcomp.compressors.quantize import Quantize
from torchcomp.compressors.randk import RandK
from torchcomp.compressors.topk import TopK
from torchcomp.compressors.warmup import Warmup

COMPRESSORS: tuple[type[Compressor], ...] = (Identity, TopK, RandK, Cast, Quantize, Warmup)

__all__ = ["COMPRESSORS", "Cast", "Compressor", "Identity", "Quantize", "RandK", "TopK", "Warmup"]
