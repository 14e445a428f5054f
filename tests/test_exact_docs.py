"""The page on exact truth: its blocks are run, its table is what the command prints."""

import doctest
from pathlib import Path

import torch

from pgprog.cli import main

PAGE = Path(__file__).resolve().parent.parent / "docs" / "exact.md"


def test_the_blocks_of_the_page_give_what_they_say():
    torch.set_default_dtype(torch.float32)  # as a reader runs it
    text = PAGE.read_text().replace("```\n", "\n")
    test = doctest.DocTestParser().get_doctest(text, {}, "exact.md", str(PAGE), 0)
    assert len(test.examples) > 25
    said: list[str] = []
    result = doctest.DocTestRunner().run(test, out=said.append)
    assert result.failed == 0, "".join(said)


def test_the_table_is_what_the_command_prints(capsys):
    assert main(["exact", "--resamples", "0"]) == 0
    printed = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    block = PAGE.read_text().split("`pgprog exact --resamples 0`:")[1].split("```text")[1].split("```")[0]
    rows = [" ".join(line.split()) for line in block.splitlines() if line.strip()]
    # The biases of unbiased estimators are rounding, which differs between machines.
    rows = [row for row in rows if "e-18" not in row]
    assert len(rows) > 8
    assert not [row for row in rows if row not in printed]
