"""``python -m lockstep_trio`` is the command ``lockstep-trio``."""

from __future__ import annotations

import sys

from lockstep_trio.cli import main

if __name__ == "__main__":
    sys.exit(main())
