"""Ties a process group to its parent: when the parent dies, however it dies, the group dies.

`python -m agentrl.engine.guard COMMAND…` runs COMMAND; its own standard input is the tie.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def watch_stdin() -> None:
    """Kill this process group once standard input closes. Only for the leader of a group."""
    threading.Thread(target=_wait_and_kill, name="stdin-watch", daemon=True).start()


def _wait_and_kill() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> int:
    watch_stdin()
    return subprocess.run(sys.argv[1:], stdin=subprocess.DEVNULL, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
