"""The command ``lockstep-trio``. Needs the extra ``cli``; importing this module does not."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: The arguments without the program's name. None takes those of the process.

    Returns:
        0 if all went well; 2 for wrong usage and for a missing extra.
    """
    missing = [name for name in ("click", "rich") if find_spec(name) is None]
    if missing:
        print(
            f"lockstep-trio: {' and '.join(missing)} not installed; "
            "the command line needs the extra 'cli': python -m pip install 'lockstep-trio[cli]'",
            file=sys.stderr,
        )
        return 2
    from lockstep_trio.cli.commands import run

    return run(sys.argv[1:] if argv is None else list(argv))
