"""The pages: links lead somewhere, and files that are named exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "lab-book.md"], ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    """The lab book also names files that only the history has."""
    named = set(re.findall(r"`((?:src|tests|benchmarks|examples|docs|results)/[\w./-]+\.\w+)`", page.read_text()))
    assert not [path for path in named if not (ROOT / path).exists()]
