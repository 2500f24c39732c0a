"""The code about logprobs in the how-to guides runs."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep_trio import RequestOutput

PAGE = Path(__file__).parents[1] / "docs" / "howto" / "index.md"
SECTION = re.compile(r"^## Read logprobs\n(.*?)^## ", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LISTS = (((7, 1, 2), (9, 3, 4)), ((-0.5, -1.0, -2.0), (-4.0, -0.25, -0.5)), (1, 12))
OUTPUT = RequestOutput("a", 0, (7, 9), raw=(("a#1", (7, 9), LISTS),))
SILENT = RequestOutput("a", 0, (), raw=(("a#1", ()),))


def names() -> dict[str, Any]:
    [section] = SECTION.findall(PAGE.read_text())
    found: dict[str, Any] = {}
    for block in BLOCK.findall(section):
        exec(compile(block, "howto/index.md", "exec"), found)
    return found


def test_the_rows_are_printed_as_the_page_says() -> None:
    lines = names()["lines"]
    assert lines(OUTPUT, 1) == ["7 -0.50 rank 1 of ((1, -1.0),)", "9 -4.00 rank 12 of ((3, -0.25),)"]
    assert lines(SILENT, 1) == []


def test_the_sum_is_that_of_the_first_column(monkeypatch: pytest.MonkeyPatch) -> None:
    likelihood = names()["likelihood"]
    assert likelihood(SILENT) == 0.0

    class Table:
        def __init__(self, data: memoryview, dtype: str) -> None:
            self.items = data.cast("d").tolist()

        def reshape(self, shape: tuple[int, int]) -> Table:
            self.columns = shape[1]
            return self

        def __getitem__(self, index: tuple[slice, int]) -> Table:
            self.items = self.items[index[1] :: self.columns]
            return self

        def sum(self) -> float:
            return sum(self.items)

    if find_spec("numpy") is None:
        monkeypatch.setitem(sys.modules, "numpy", SimpleNamespace(frombuffer=Table))  # type: ignore[arg-type]
    assert likelihood(OUTPUT) == -4.5
