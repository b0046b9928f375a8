"""MkDocs hook: makes the site from the repository's pages as they are.

Pages keep their places in the repository. Their relative links therefore work on a code host, and
MkDocs checks the same links here. The site shows `docs/usage.md` as `usage.html`.
"""

import html
import posixpath
import re
from pathlib import Path

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("docs", "recipes", "benchmarks")
SHOWN = {".md", ".png", ".svg", ".css", ".js"}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`~?([\w.]+)`")
MATH = re.compile(
    r'<(?:span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</(?:span|div)>', re.DOTALL
)


# --- Pages ----------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace patterns in the navigation, and teach Markdown the roles of the docstrings."""
    named = set(re.findall(r"[\w./-]+\.md\b", repr(config.nav)))
    config.nav = [_expanded(entry, named) for entry in config.nav or []]
    config.markdown_extensions.append(Roles())  # type: ignore[arg-type]
    return config


def _expanded(entry: object, named: set[str]) -> object:
    """Return an entry of the navigation with the pages that its patterns match."""
    if isinstance(entry, list):
        return [page for part in entry for page in _pages(part, named)]
    if isinstance(entry, dict):
        return {title: _expanded(part, named) for title, part in entry.items()}
    return entry


def _pages(part: object, named: set[str]) -> list[object]:
    if not isinstance(part, str) or "*" not in part:
        return [_expanded(part, named)]
    found = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(part))
    return [path for path in found if path not in named]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the theme's files, the repository's pages and pictures, and the files they link to."""
    theme = [file for file in files if file.src_dir != config.docs_dir]
    paths = [*ROOT.glob("*.md")]
    paths += [p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.suffix in SHOWN]
    shown = [_file(path, config) for path in sorted(paths)]
    known = {file.src_uri for file in shown}
    linked = {target for file in shown for target in _sources(file, known)}
    listed = {path for target in linked for path in (ROOT / target).glob("*") if path.is_file()}
    raw = [_file(path, config) for path in sorted(listed) if _uri(path) not in known]
    return Files([*theme, *shown, *raw, *(_source_page(target, config) for target in linked)])


def _uri(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _file(path: Path, config: MkDocsConfig) -> File:
    file = File(_uri(path), str(ROOT), config.site_dir, config.use_directory_urls)
    file.dest_uri = file.dest_uri.removeprefix("docs/")
    return file


# --- Links to files that are no pages -------------------------------------------------------------


def _sources(file: File, known: set[str]) -> set[str]:
    """Return the files and folders of the repository that a page links to and the site lacks."""
    if not file.is_documentation_page():
        return set()
    targets = (_target(file.src_uri, link) for link in LINK.findall(file.content_string))
    return {target for target in targets if target not in known and (ROOT / target).exists()}


def _target(page: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def _source_uri(target: str) -> str:
    return f"{target}/README.md" if (ROOT / target).is_dir() else f"{target}.md"


def _source_page(target: str, config: MkDocsConfig) -> File:
    """Return a page that shows a source file, or lists the files of a folder."""
    path = ROOT / target
    if path.is_dir():
        body = "\n".join(f"- [{p.name}]({p.name})" for p in sorted(path.iterdir()) if p.is_file())
    else:
        body = f"````{path.suffix[1:]}\n{path.read_text()}\n````"
    text = f"---\nsearch: {{exclude: true}}\n---\n# {target}\n\n{body}\n"
    inclusion = InclusionLevel.NOT_IN_NAV
    file = File.generated(config, _source_uri(target), content=text, inclusion=inclusion)
    file.dest_uri = file.dest_uri.removeprefix("docs/")
    return file


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to source files and folders lead to the pages that show them."""
    if page.file.generated_by:
        return markdown

    def shown(link: re.Match[str]) -> str:
        target = _target(page.file.src_uri, link[0])
        shows = (ROOT / target).exists() and not files.get_file_from_path(target)
        return (
            posixpath.relpath(_source_uri(target), posixpath.dirname(page.file.src_uri))
            if shows
            else link[0]
        )

    return LINK.sub(shown, markdown)


# --- Formulas and docstrings ----------------------------------------------------------------------


def on_page_content(content: str, **_: object) -> str:
    """Turn formulas into MathML, which browsers draw without scripts."""

    def mathml(formula: re.Match[str]) -> str:
        return convert(
            html.unescape(formula[2]), display="block" if formula[1] == "[" else "inline"
        )

    return MATH.sub(mathml, content)


class Roles(Extension):
    """Sphinx's roles in docstrings, such as :func:`torchcomp.parse`, as links."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(_Roles(md), "roles", 25)


class _Roles(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        return [ROLE.sub(self._link, line) for line in lines]

    @staticmethod
    def _link(role: re.Match[str]) -> str:
        return f'<autoref optional identifier="{role[1]}"><code>{role[1]}</code></autoref>'
