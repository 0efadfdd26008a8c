"""The login node of slurm.lab, seen from outside: its environment, and how a command gets there."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrl.errors import ClusterError
from slurm import lab_host
from slurm.lab_daemons import Daemons
from slurm.lab_files import SHIM_MARK, shim
from slurm.lab_process import Process

SHIMS = (
    *("sbatch", "srun", "salloc", "sattach", "scancel", "sbcast"),
    *("squeue", "sinfo", "scontrol", "sacct", "sacctmgr", "sdiag", "sstat", "sprio", "sreport"),
)
SCRUBBED = ("SLURM_", "SBATCH_", "SALLOC_", "SRUN_")
"""What a job of another cluster, or a shell within it, has in its environment."""


class Login:
    """Where the cluster's daemons and its users' commands run."""

    def __init__(self, daemons: Daemons) -> None:
        self.daemons = daemons
        self.directory = daemons.directory
        self.shims = self.directory / "bin"

    def enter(self, cwd: Path | None = None) -> list[str]:
        """Return the words that make the command after them run on the login node, in `cwd`.

        Raises ClusterError unless the cluster is up.
        """
        login = self.daemons.living().get("login")
        if login is None:
            raise ClusterError(
                f"no cluster is up in {self.directory}; agentrl cluster up boots one"
            )
        flags = ["--net", "--uts", "--mount", f"--wdns={cwd or Path.cwd()}"]
        return ["nsenter", "--target", str(login.pid), *flags]

    def environment(self) -> dict[str, str]:
        """Return this process's environment as it is there: no shims, no other Slurm's words."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(SCRUBBED)}
        path = [
            entry
            for entry in lab_host.search_path().split(":")
            if not (Path(entry) / SHIM_MARK).exists()
        ]
        return {**kept, "PATH": ":".join(path), "SLURM_CONF": f"{self.directory}/etc/slurm.conf"}

    def run(
        self,
        argv: Sequence[str],
        *,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: str = "",
    ) -> subprocess.CompletedProcess[str]:
        """Run a command there, its output captured. env: added to its environment.

        Raises ClusterError, if `check`, in the command's own words.
        """
        done = subprocess.run(
            [*self.enter(cwd), *argv],
            env={**self.environment(), **(env or {})},
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )
        if check and done.returncode:
            said = (done.stderr or done.stdout).strip()
            raise ClusterError(
                f"{' '.join(argv)} exited {done.returncode} on the login node: {said}"
            )
        return done

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: int | None = None,
    ) -> Process:
        """Start a daemon there. env: added to its environment."""
        words = [*self.enter(self.directory), *command]
        return self.daemons.start(name, words, {**self.environment(), **(env or {})}, stdin=stdin)

    def write_shims(self) -> None:
        """Write the programs that enter the login node from outside."""
        login = self.daemons.living()["login"]
        (self.shims / SHIM_MARK).touch()
        for name in SHIMS:
            if program := lab_host.which(name):
                text = shim(self.directory, program, pid=login.pid, started=login.started)
                (self.shims / name).write_text(text)
                (self.shims / name).chmod(0o755)
