"""Commands on this host with NO isolation, for where bubblewrap cannot run and one says so.

The testbed is a copy in a temporary folder and commands start in it; the paths /testbed and /tmp
mean folders of the sandbox to `put` and `get` only, not to commands, which have TMPDIR. Bounds on
memory, CPU time, file size and the number of processes hold as in a sandbox; bytes written in its
folder are watched.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from pathlib import Path

from agentrl.config import SandboxConfig
from agentrl.errors import SandboxStartError
from agentrl.sandbox import lease
from agentrl.sandbox.base import TESTBED
from agentrl.sandbox.bubblewrap import ENVIRONMENT
from agentrl.sandbox.child import Child, Spawn, compile_executor
from agentrl.sandbox.limits import bounds, scratch_folder
from agentrl.sandbox.resident import LOADER, ResidentSandbox, in_thread
from agentrl.sandbox.watch import written_mb

log = logging.getLogger(__name__)


class HostProcess:
    """Says what to run for one sandbox that is none."""

    name = "process (no isolation)"
    kind = ""
    is_system_writable = False
    measure = staticmethod(written_mb)

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self.python = os.path.realpath(sys.executable)
        self.code = compile_executor(self.python)
        log.warning(
            "sandbox.kind=process: commands of the model run on this host as uid %d with NO "
            "isolation: they can read and change every file, environment and process of that user, "
            "and use the network; the disk limit (sandbox.disk_mb) is only watched",
            os.geteuid(),
        )

    def scratch(self, claim: lease.Lease) -> str:
        """Return the folder of one sandbox; its name is known before it exists."""
        return str(scratch_folder(self.config) / f"{lease.SCRATCH}{claim.id}")

    async def create(self, image: Path, claim: lease.Lease) -> ResidentSandbox:
        """Lay its folders and start one; nothing in it is waited for."""
        spawn = await in_thread(self.spawn, image, claim)
        return ResidentSandbox(Child(spawn), code=self.code, places=spawn.places)

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
        numbers = (0, 1, *bounds(self.config))
        return Spawn(
            argv=[
                *(self.python, "-I", "-S", "-c", LOADER),
                *("host", self.config.shell, *map(str, numbers), str(testbed)),
            ],
            env={
                **ENVIRONMENT,
                "PATH": f"{scratch / 'bin'}:{ENVIRONMENT['PATH'].partition(':')[2]}",
                "HOME": str(scratch / "home"),
                "TMPDIR": str(scratch / "tmp"),
                lease.MARK: claim.id,
            },
            places={TESTBED: str(testbed), "/tmp": str(scratch / "tmp")},
        )
