"""What the site needs beyond the pages of this folder.

Pages are read on a code host too, so they link to files of the checkout by relative paths: `../src/gossamer/budget.py`,
`../results/…/final.svg`. Here each such file becomes part of the site, and README.md, its neighbours and the notebooks
become pages.
"""

import re
from pathlib import Path
from posixpath import normpath
from typing import Any

from _notebooks import notebooks, page_of
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
NOTEBOOKS = {f"docs/notebooks/{path.name}": path for path in notebooks()}
PAGES = {
    **{source: f"notebook-{path.stem}.md" for source, path in NOTEBOOKS.items()},
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
LINK = re.compile(r"(\]\(|<img src=\")([^)\s\"#:]+)(?=[#)\"])")
LINK_OF_TEXT = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s#:]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside of docs/, and every file of the checkout that a page links to."""
    for source, page in PAGES.items():
        if files.get_file_from_path(page) is None:
            text = page_of(NOTEBOOKS[source]) if source in NOTEBOOKS else (ROOT / source).read_text()
            files.append(File.generated(config, page, content=relocated(source, text)))
    pages = [file for file in files if file.src_uri.endswith(".md")]
    for page in pages:
        for _, target in LINK.findall(relocated(f"docs/{page.src_uri}", page.content_string)):
            path = ROOT / target
            if files.get_file_from_path(target) is None and path.is_file() and not (ROOT / "docs" / target).exists():
                files.append(File.generated(config, target, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as they are on the site, and Markdown inside <details>, as code hosts read it."""
    inside = markdown if page.file.src_uri in PAGES.values() else relocated(f"docs/{page.file.src_uri}", markdown)
    return inside.replace("<details>", '<details markdown="1">')


def relocated(source: str, markdown: str) -> str:
    """The text of a page of the checkout with its links as they are on the site, where all pages lie in one folder."""

    def in_checkout(link: re.Match[str]) -> str:
        return normpath(f"{source.rpartition('/')[0] or '.'}/{link[2]}")

    def text_of_folder(link: re.Match[str]) -> str:
        """A folder has no page on the site."""
        return link[1] if (ROOT / in_checkout(link)).is_dir() else link[0]

    def moved(link: re.Match[str]) -> str:
        target = in_checkout(link)
        return link[1] + PAGES.get(target, target.removeprefix("docs/"))

    return LINK.sub(moved, LINK_OF_TEXT.sub(text_of_folder, markdown))
