"""Ends a role that its run has left behind.

Slurm may give a node up that only the network has left: its roles run on, on the same shared files,
while the job goes on elsewhere. Two trainers would then write the checkpoints of one run.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import TracebackType

from agentrl.errors import LaunchError
from launch.run_dir import RunDir

POLL_S = 5.0
"""Between two listings of the run's attempts; a later one takes longer than that to do anything.

Each listing opens the folder anew. Of Linux's NFS client that is a question to the server, as the
opening of a file is (close-to-open), so no cache of attributes makes it old; but on a mount with
`nocto` it may be, by up to acdirmax, a minute. Source: fs/nfs/dir.c, nfs_lookup_verify_inode.
"""
log = logging.getLogger(__name__)


class Fence:
    """While it is open, SIGKILLs this process once a later launch attempt of the run has begun.

    Nothing is saved: what the later attempt has begun with is what counts.
    """

    def __init__(self, run: RunDir, attempt: int) -> None:
        self._run, self._attempt = run, attempt
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="fence", daemon=True)

    def __enter__(self) -> Fence:
        """Raise LaunchError if the run has gone on already."""
        if later := successor(self._run, self._attempt):
            raise LaunchError(
                f"attempt {self._attempt} of run {self._run.path}: attempt {later} has begun since"
            )
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_closed.wait(POLL_S):
            try:
                later = successor(self._run, self._attempt)
            except OSError as error:
                log.warning("whether %s has gone on is not known: %s", self._run.path, error)
                continue
            if later:
                log.error("attempt %d of %s has begun: this one ends", later, self._run.path)
                os.kill(os.getpid(), signal.SIGKILL)


def successor(run: RunDir, attempt: int) -> int:
    """Return the newest launch attempt of the run if it is later than `attempt`, else 0."""
    newest = max(run.attempts(), default=0)
    return newest if newest > attempt else 0
