"""Sphinx configuration. Built by `nox -s docs` against the installed wheel, with warnings as errors."""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring

import lockstep_trio

project = "lockstep_trio"
copyright = "the lockstep-trio contributors"
release = version = lockstep_trio.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build", "project/newsfragments"]
# Annotations name classes by the module that defines them, which is private; pages name them by the public one.
nitpicky = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"

html_theme = "furo"
html_title = f"lockstep_trio {release}"

SECTIONS = Config(napoleon_custom_sections=["Cancellation", "Ownership"])


def read_sections(app: Sphinx, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    # The extension napoleon as it comes takes "Its value: ..." under an attribute for a type; hence "method".
    what = "method" if what in {"attribute", "data", "property"} else what
    lines[:] = GoogleDocstring(lines, SECTIONS, app, what, name, obj, options).lines()


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", read_sections)
