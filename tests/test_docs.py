"""The code of the documentation runs, and prints what stands below it."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from pgprog.cli import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("page", [p for p in PAGES if "```python" in p.read_text()], ids=lambda p: p.name)
def test_the_python_of_a_page_runs_and_prints_what_stands_below_it(page):
    scope: dict[str, object] = {"__name__": page.stem}
    blocks = BLOCK.findall(page.read_text())
    for (kind, code), after in zip(blocks, [*blocks[1:], ("", "")], strict=True):
        if kind != "python" or code.startswith(">>>"):  # the latter are run by doctest, in test_exact_docs.py
            continue
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(code, page.name, "exec"), scope)
        if said.getvalue():
            assert said.getvalue() == after[1] and after[0] == ""


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_command_of_a_page_exists_and_every_link_leads_somewhere(page):
    text = page.read_text()
    for command in re.findall(r"(?:^|`)pgprog ([a-z]+)", text, re.MULTILINE):
        assert command in COMMANDS, command
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (page.parent / link).exists(), link
