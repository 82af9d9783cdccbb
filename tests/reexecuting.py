"""Run the command that is given, which is `python -m MODULE …`; at SIGUSR1 begin it anew in the same process.

What an update does that replaces a program under its own pid: nothing of the old one gets to clean up.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys


def main() -> None:
    python, _, module, *arguments = command = sys.argv[1:]
    signal.signal(signal.SIGUSR1, lambda *_: os.execv(python, command))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main()
