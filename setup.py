"""The long description: README.md, with the links that only the repository has as text."""

import re
from pathlib import Path

from setuptools import setup

README = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")

# A package index shows this one page, where relative links lead nowhere. Name their files instead:
# the source distribution contains them.
setup(
    long_description=re.sub(r"\[([^]\[]+)\]\((?!https?:|#)([^)#]+)[^)]*\)", r"\1 (`\2`)", README),
    long_description_content_type="text/markdown",
)
