"""Commands on this host with NO isolation, for where bubblewrap cannot run and one says so.

The testbed is a copy in a temporary folder and commands start in it; the path /testbed means that
copy to `put` and `get` only, not to commands. Bounds on memory, CPU time, file size and the number
of processes hold as in a sandbox; bytes written in all are not bounded.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path

from agentrl.config import SandboxConfig
from agentrl.errors import SandboxStartError
from agentrl.sandbox import lease
from agentrl.sandbox.bubblewrap import ENVIRONMENT
from agentrl.sandbox.resident import LOADER, Spawn, compile_executor

log = logging.getLogger(__name__)


class HostProcess:
    """Says what to run for one sandbox that is none."""

    name = "process (no isolation)"

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self.python = os.path.realpath(sys.executable)
        self.code = compile_executor(self.python)
        log.warning(
            "sandbox.kind=process: commands of the model run on this host as uid %d with NO "
            "isolation: they can read and change every file, environment and process of that user, "
            "and use the network; the disk limit (sandbox.disk_mb) is not enforced",
            os.geteuid(),
        )

    def scratch(self, claim: lease.Lease) -> str:
        """Return the folder of one sandbox; its name is known before it exists."""
        return str(Path(tempfile.gettempdir(), f"{lease.MARK.lower()}-{claim.id}"))

    def spawn(self, image: Path, claim: lease.Lease) -> Spawn:
        """Copy the testbed; return the command that starts one there."""
        if not (image / "testbed").is_dir():
            raise SandboxStartError(f"image {image} has no folder `testbed`; prepare it first")
        scratch = Path(claim.scratch)
        testbed = scratch / "testbed"
        shutil.copytree(image / "testbed", testbed, symlinks=True)
        for name in ("home", "tmp", "bin"):
            (scratch / name).mkdir()
        for name in ("python", "python3"):
            (scratch / "bin" / name).symlink_to(self.python)
        config = self.config
        numbers = (0, 1, config.memory_mb, config.cpu_s, config.processes, config.file_mb)
        return Spawn(
            argv=[
                *(self.python, "-I", "-S", "-c", LOADER),
                *("host", config.shell, *map(str, numbers), str(testbed)),
            ],
            env={
                **ENVIRONMENT,
                "PATH": f"{scratch / 'bin'}:{ENVIRONMENT['PATH'].partition(':')[2]}",
                "HOME": str(scratch / "home"),
                "TMPDIR": str(scratch / "tmp"),
                lease.MARK: claim.id,
            },
            testbed=str(testbed),
        )
