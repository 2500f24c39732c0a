"""The page of releases says what the code's own tables say."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_the_page_of_releases_is_up_to_date() -> None:
    made = runpy.run_path(str(DOCS / "versions.py"))
    assert made["PAGE"].read_text(encoding="utf-8") == made["page"]() + "\n", "python docs/versions.py"
