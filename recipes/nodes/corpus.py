"""The text: three plays of Shakespeare, in this folder. README.md names the source."""

from functools import lru_cache
from pathlib import Path

from recipes.small_gpt.corpus import Corpus

TEXT = Path(__file__).with_name("shakespeare.txt")


@lru_cache(maxsize=1)
def open_corpus() -> Corpus:
    return Corpus.of(TEXT.read_text(), TEXT.name)
