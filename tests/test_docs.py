"""The code in the pages runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGES = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_rule_of_ones_own_on_the_page_about_the_wake_rule_is_found_wanting(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (block,) = BLOCK.findall((PAGES / "explanation" / "wake-rule.md").read_text())
    names: dict[str, Any] = {}
    exec(compile(block, "wake-rule.md", "exec"), names)
    assert "stuck" in capsys.readouterr().out
    assert names["result"].found is not None
