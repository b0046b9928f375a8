"""The pages of the documentation: navigation, links, API reference and costs."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch

import torchcomp
from torchcomp.advisor.torchvision_compat import import_torchvision
from torchcomp.exchange.traffic import compared, three_digits
from torchcomp.local_sgd.schedules import Schedule
from torchcomp.specs import spec

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parent.parent
FOLDERS = ("docs", "recipes", "benchmarks")
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [*ROOT.glob("*.md"), *(p for f in FOLDERS for p in (ROOT / f).rglob("*.md"))]
)
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def leaves(entry):
    if isinstance(entry, str):
        yield entry
    else:
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from leaves(part)


def anchors(page):
    """Return the anchors of a page's headings, as code hosts and the site name them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


def test_navigation_contains_every_page_and_no_other():
    entries = list(leaves(CONFIG["nav"]))
    assert [page for page in PAGES if not any(fnmatch(page, entry) for entry in entries)] == []
    assert [entry for entry in entries if "*" not in entry and entry not in PAGES] == []
    assert len(entries) == len(set(entries))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings_that_exist(page):
    broken = []
    for link in re.findall(r"\]\((?![a-z]+:)([^)\s]+)\)", (ROOT / page).read_text()):
        file, _, anchor = link.partition("#")
        target = (ROOT / page).parent / file if file else ROOT / page
        checked = anchor and not anchor.startswith("torchcomp.")  # a docstring's heading
        if not target.exists() or (checked and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_reference_contains_all_public_names_and_components():
    pages = "".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    listed = {
        name.rpartition(".")[2] for name in re.findall(r"^::: ([\w.]+)$", pages, re.MULTILINE)
    }
    named = {name for name in torchcomp.__all__ if not name.startswith("_")}
    assert named | {component.__name__ for component in spec.COMPONENTS.values()} <= listed


def test_costs_on_the_pages_of_methods_are_those_of_explain():
    with torch.device("meta"):
        model = import_torchvision().models.resnet50()
    rows = [
        (page.name, *row)
        for page in sorted((ROOT / "docs" / "methods").glob("*.md"))
        for row in re.findall(r"^\| `(.+)` \| (.+ MB, .+) \| (.+) \|$", page.read_text(), re.M)
    ]
    assert len({page for page, *_ in rows}) == 8
    for page, method, *shown in rows:
        run = {"total_steps": 1000} if isinstance(torchcomp.parse(method), Schedule) else {}
        plans = [torchcomp.explain(method, model=model, world_size=n, **run) for n in (8, 64)]
        assert shown == [
            f"{three_digits(plan.bytes_sent / 1e6)} MB, "
            f"{compared(plan.bytes_sent, plan.dense_bytes_sent)}"
            for plan in plans
        ], (page, method)
