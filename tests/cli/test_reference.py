"""The page about the command line knows every command, option and exit code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep_trio.cli.commands import cli
from lockstep_trio.cli.exits import Exit

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "cli.md").read_text()


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_option_of_a_command_is_in_its_section(name: str) -> None:
    section = PAGE.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    options = [option for each in cli.commands[name].params for option in (*each.opts, *each.secondary_opts)]
    missing = [
        option for option in options if f"`{option if option.startswith('-') else option.upper()}`" not in section
    ]
    assert missing == []


@pytest.mark.parametrize("code", list(Exit))
def test_every_exit_code_is_on_the_page_and_in_the_help_of_each_command_that_has_it(code: Exit) -> None:
    row = PAGE.partition(f"\n| {code} |")[2].partition("\n")[0]
    assert row
    heads = re.findall(r"`(\w+)`", PAGE.partition("\n| code |")[2].partition("\n")[0])
    cells = [cell.strip() for cell in row.rstrip("|").split("|")]
    for name, meaning in zip(heads, cells, strict=True):
        assert (f"\n  {code}  " in (cli.commands[name].epilog or "")) == bool(meaning), name
