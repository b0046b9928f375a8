"""The text: Python's own language reference, as the standard library ships it for ``help()``."""

import platform
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import Tensor

_HELD_OUT = 10
_CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
VOCABULARY = len(_CHARACTERS)


@dataclass(frozen=True)
class Corpus:
    """Character codes of a text, 1-D int64."""

    train: Tensor  # nine of ten paragraphs
    validation: Tensor  # every tenth paragraph
    name: str  # the source, and a checksum

    @classmethod
    def of(cls, text: str, source: str) -> "Corpus":
        """Divide a text, without repeated paragraphs and what is not printable ASCII."""
        known = "".join(character for character in text if character in _CHARACTERS)
        # A repeated paragraph could be in both parts.
        texts = list(dict.fromkeys(paragraph.strip("\n") for paragraph in known.split("\n\n")))
        held_out = texts[::_HELD_OUT]
        kept = [text for index, text in enumerate(texts) if index % _HELD_OUT]
        checksum = zlib.crc32("\n\n".join(texts).encode())
        return cls(_codes(kept), _codes(held_out), f"{source}, crc32 {checksum:08x}")


@lru_cache(maxsize=1)
def open_corpus() -> Corpus:
    """Return the text. It differs between versions of Python."""
    text = "\n\n".join(topic for _, topic in sorted(topics.items()))
    return Corpus.of(text, f"pydoc_data.topics of Python {platform.python_version()}")


def _codes(paragraphs: list[str]) -> Tensor:
    code_of = {character: code for code, character in enumerate(_CHARACTERS)}
    text = "\n\n".join(paragraphs)
    return torch.from_numpy(np.fromiter((code_of[c] for c in text), np.int64, len(text)))


def windows(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, the characters that follow them: (len(starts), length) each."""
    index = starts[:, None] + torch.arange(length)
    return text[index], text[index + 1]
