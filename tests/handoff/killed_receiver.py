"""A receiver in a process of its own: `killed_receiver.py FOLDER [dies]`, until its stdin ends.

dies: it kills itself as soon as a group is durable, before it can say so.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from socket_toys import receiver

folder = Path(sys.argv[1])
fsync = os.fsync


def fsync_and_die(handle):
    fsync(handle)
    if list(folder.glob("spool/*/*.parquet")):  # this one was the folder's, after the rename
        os.kill(os.getpid(), signal.SIGKILL)


if sys.argv[2:] == ["dies"]:
    os.fsync = fsync_and_die
with receiver(folder):
    print("open", flush=True)
    sys.stdin.read()
