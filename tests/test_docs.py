"""The pages: links lead somewhere, files that are named exist, and the site is built without network."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

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


def test_the_integration_matrix_names_tests_that_exist() -> None:
    """Each cell is a dash or names tests of the file at the head of its column, or of two processes."""
    page = (ROOT / "docs" / "integration.md").read_text()
    head, _, *rows = re.findall(r"^\|.*(?:\n\|.*)*", page[page.index("| | [Lightning]") :])[0].splitlines()
    folder = ROOT / "tests" / "integrations"
    columns = [(folder / Path(path).name).read_text() for path in re.findall(r"\]\(([^)]+)\)", head)]
    shared = (folder / "test_two_processes.py").read_text()
    assert len(columns) == 5
    assert len(rows) >= 15
    for row in rows:
        name, *cells = [cell.strip() for cell in row.strip("|").split("|")]
        for cell, column in zip(cells, columns, strict=True):
            tests = re.findall(r"`(test_\w+)`", cell)
            assert tests or cell == "–", (name, cell)
            assert all(f"def {test}(" in column + shared for test in tests), (name, cell)


class Links(HTMLParser):
    """What a page of the site links to, what it loads, and the anchors it has."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors = {""}
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attributes if value is not None}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") in ("stylesheet", "icon", "preconnect", "preload"):
            self.loaded.append(given["href"])
        elif "src" in given:
            self.loaded.append(given["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    pytest.importorskip("material", reason='pip install -e ".[docs]"')
    pytest.importorskip("mkdocstrings", reason='pip install -e ".[docs]"')
    folder = tmp_path_factory.mktemp("site")
    # A proxy that nobody serves: whatever asks the network fails.
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_the_site_has_every_page_and_loads_nothing_from_elsewhere(site: Path) -> None:
    names = {page.stem for page in ROOT.glob("docs/*.md")} | {"changelog", "contributing", "security"}
    assert not [name for name in names if not (site / name / "index.html").is_file()]
    for page in site.rglob("*.html"):
        assert not [url for url in Links(page).loaded if urlsplit(url).netloc], page
    for style in site.rglob("*.css"):
        assert not re.findall(r"@import|url\(['\"]?(?:https?:)?//", style.read_text()), style


def test_links_of_the_site_lead_somewhere(site: Path) -> None:
    pages = {page.resolve(): Links(page) for page in site.rglob("*.html")}
    broken = []
    for page, found in pages.items():
        if page.name == "404.html":  # its links begin at the root of a host
            continue
        for link in (*found.links, *found.loaded):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            there = target.is_file() and (target not in pages or unquote(parts.fragment) in pages[target].anchors)
            if not there:
                broken.append(f"{page.relative_to(site)}: {link}")
    assert not broken
