"""Stand-ins for what TokenSpeed's wire modules import and do not need for text. Runs in the engine's environment only.

``torch`` is there for its classes' names alone; the package's own ``utils`` pulls in half of the engine.
"""

from __future__ import annotations

import logging
import sys
import types
from typing import Any


class _Flags:
    """Every flag of the engine's, unset."""

    def __getattr__(self, name: str) -> Any:
        return types.SimpleNamespace(get=lambda: False)


def install() -> None:
    """Make the engine's message classes importable. To be called before they are."""
    _module("torch", Tensor=type("Tensor", (), {}), dtype=type("dtype", (), {}))
    logger = logging.getLogger("tokenspeed")
    _module("tokenspeed.runtime.utils", flatten_nested_list=list, logger=logger, get_colorful_logger=lambda _: logger)
    _module("tokenspeed.runtime.utils.env", envs=_Flags())


def _module(name: str, **members: Any) -> None:
    made = types.ModuleType(name)
    vars(made).update(members)
    sys.modules[name] = made
