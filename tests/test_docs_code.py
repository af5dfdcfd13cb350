"""The code of the pages: each block runs, or a comment before it says why not.

The Python blocks of a page run one after the other in one namespace, in an empty folder. Of a block of commands, those
of `gossamer` run; a block with other commands has to say why it does not run.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from gossamer.cli import main

ROOT = Path(__file__).parent.parent
PAGES = [page for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")) if "```" in page.read_text()]
RUN = ("python", "bash")
SHOWN = ("text", "json", "bibtex", "toml")
BLOCK = re.compile(
    r"(?: *<!-- not run: (?P<reason>[^>]+) -->\n+)?"
    r"^(?P<indent> *)```(?P<language>.*)\n(?P<code>(?:.*\n)*?)(?P=indent)```$",
    flags=re.MULTILINE,
)

# What a page takes as given, in a form small enough for a test.
GIVEN = {
    "README.md": """
import gossamer, torch
model, epochs, loss_fn = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)), 2, None
loss_fn = torch.nn.CrossEntropyLoss()
loader = [(torch.randn(16, 64), torch.randint(10, (16,))) for _ in range(20)]
""",
    "deploy.md": """
import gossamer, torch
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)).eval()
example_input = images = torch.randn(1, 64)
""",
    "distributed.md": """
import os
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
""",
    "compaction.md": """
import gossamer, torch
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)).eval()
torch.nn.init.zeros_(model[0].weight[:8])
example_input = torch.randn(1, 64)
""",
}


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    line: int
    reason: str | None  # why it does not run


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            language=found["language"],
            code=re.sub(rf"^{found['indent']}", "", found["code"], flags=re.MULTILINE),
            line=text.count("\n", 0, found.start("code")),
            reason=found["reason"],
        )
        for found in BLOCK.finditer(text)
    ]


def commands(code: str) -> list[list[str]]:
    """The commands of a block, with continued lines joined and comments left out."""
    lines = re.sub(r"\\\n\s*", " ", code).splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_found_and_says_what_it_is(page: Path) -> None:
    found = blocks(page)
    assert 2 * len(found) == len(re.findall(r"^ *```", page.read_text(), flags=re.MULTILINE))
    assert [block.language for block in found if block.language not in (*RUN, *SHOWN)] == []
    running = [block for block in found if block.language == "bash" and block.reason is None]
    assert [words for block in running for words in commands(block.code) if words[0] != "gossamer"] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = [block for block in blocks(page) if block.language in RUN and block.reason is None]
    if not running:
        pytest.skip("nothing to run")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "__main__"}
    exec(GIVEN.get(page.name, ""), names)
    for block in running:
        if block.language == "python":
            exec(compile("\n" * block.line + block.code, str(page), "exec"), names)
            continue
        for _, *arguments in commands(block.code):
            with pytest.raises(SystemExit) as end:
                main(arguments)
            assert end.value.code in (0, None), f"{page.name}, line {block.line}: gossamer {shlex.join(arguments)}"
