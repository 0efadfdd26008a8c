"""A run on the small real cluster, as a person on its login node drives it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from agentrl import events
from agentrl.audit import audit
from agentrl.errors import ClusterError, WaitTimeout
from launch.run_dir import RunDir
from slurm import ledger, states
from slurm.files import publish
from slurm.lab import Lab
from slurm.lab_process import wait_for
from slurm.ledger import LedgerLine

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PATIENCE_S = 240.0
LEAVE_S = 60.0
ROLES_DONE = dict.fromkeys(["trainer-0", "inference-0", "inference-1", "inference-2"], "done")
"""What `causes` returns of a run of 3+1 nodes that went well."""
CONFIG = """\
name: light
cluster: lab
"""


class LabRun:
    """One run directory below `folder`, whose roles are light_roles unless `is_light` is false."""

    def __init__(self, lab: Lab, folder: Path, *, name: str = "light") -> None:
        self.lab = lab
        self.folder = folder
        self.name = name
        self.run = RunDir(folder / "runs" / name)
        self.config = folder / "config.yaml"

    # what a person types

    def command(self) -> list[str]:
        return [sys.executable, "-m", "launch.cli"]

    def agentrl(self, *argv: object, check: bool = True) -> str:
        """Run a command on the login node; return what it said, both streams."""
        done = self.lab.run([*self.command(), *map(str, argv)], check=False, cwd=self.folder)
        said = done.stdout + done.stderr
        assert not (check and done.returncode), said
        return said

    def train(self, *overrides: str, check: bool = True) -> str:
        """Queue the run with light roles; steps take half a second each."""
        model = self.folder / "model"
        model.mkdir(exist_ok=True)
        for name in ("config.json", "tokenizer.json"):
            (model / name).write_text("{}")
        self.config.write_text(CONFIG)
        given = [
            f"name={self.name}",
            f"runs_dir={self.folder / 'runs'}",
            f"model.path={model}",
            "cluster.environment.AGENTRL_ROLES=light_roles",
            f"cluster.environment.PYTHONPATH={HERE}",
            "training.checkpoint_every=2",
            "grace_s=30",
            *overrides,
        ]
        return self.agentrl("train", self.config, *given, check=check)

    def status(self) -> dict[str, Any]:
        said = self.agentrl("status", self.run.path, "--json")
        found = json.loads(said)
        assert isinstance(found, dict)
        return found

    # what has become of it

    @property
    def job(self) -> str:
        return self.jobs[-1]

    @property
    def jobs(self) -> list[str]:
        paths = sorted(self.run.path.glob("submissions/*/submission.json"))
        return [job for path in paths for job in json.loads(path.read_bytes())["jobs"]]

    def state(self, job: str = "") -> str:
        """Return Slurm's word for the job's state."""
        job = job or self.job
        line = [
            "squeue",
            "--noheader",
            "--states=all",
            f"--jobs={job}",
            f"--format={states.SQUEUE}",
        ]
        return states.parse_squeue(self.lab.run(line).stdout)[job].state

    def ledger(self) -> list[LedgerLine]:
        return ledger.read(self.run.path)

    def log(self) -> str:
        found = sorted(self.run.path.glob("submissions/*/host.log"))
        return "".join(path.read_text() for path in found)

    def steps(self) -> list[int]:
        """Return the steps taken, in order."""
        folder = self.run.path / "events"
        found = events.read_folder(folder) if folder.is_dir() else []
        return [one.step for one in found if isinstance(one, events.Step)]

    def causes(self, attempt: int) -> dict[str, str]:
        """Return why each role of an attempt ended, by ROLE-NODE, in its own words."""
        records = (self.run.attempt(attempt) / "exit").glob("*.json")
        return {path.stem: json.loads(path.read_bytes())["cause"] for path in records}

    def skipped(self) -> list[tuple[int, int]]:
        """Return the pairs of steps, one taken after the other, between which one is missing."""
        return [(one, after) for one, after in pairwise([0, *self.steps()]) if after > one + 1]

    def fault(self, task: str, text: str) -> None:
        """Have a light role fail: `3 4` exits 3 at step 4, `kill 0 always` dies at every start."""
        publish(self.run.path / "FAULTS" / task, text.encode())

    def hold(self, step: int) -> None:
        """Have the light trainer of the first attempt wait there, told to save or let go.

        What is to meet the run then meets it, however late it comes on a busy machine.
        """
        publish(self.run.path / "HOLD", str(step).encode())

    def let_go(self) -> None:
        (self.run.path / "HOLD").unlink()

    def pids(self, role: str, node: int = 0) -> list[int]:
        """Return the pids, as this machine sees them, of a role's keeper and of the role."""
        tail = [role, str(self.run.path)]
        return [
            pid
            for pid, line in command_lines().items()
            if "launch.role" in line and line[line.index("launch.role") + 1 :][:2] == tail
            if line[-1] == str(node) and Path(line[0]).name.startswith("python")  # no srun, no bash
        ]

    def kill(self, pids: Sequence[int]) -> None:
        """SIGKILL a role and its keeper."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # the first one's end takes others along
                os.kill(pid, signal.SIGKILL)

    # waiting

    def until(self, claim: Callable[[], object], what: str, limit_s: float = PATIENCE_S) -> None:
        try:
            wait_for(patient(claim), limit_s, what)
        except Exception as error:
            raise AssertionError(f"{error}\n{self.log()[-3000:]}") from error

    def until_step(self, step: int) -> None:
        self.until(lambda: max(self.steps(), default=0) >= step, f"step {step}")

    def until_checkpoint(self, step: int, limit_s: float = PATIENCE_S) -> None:
        self.until(lambda: self.run.checkpoint_step() >= step, f"checkpoint {step}", limit_s)

    def until_up(self, role: str, node: int = 0, *, lives: int = 1) -> list[int]:
        """Wait until a role of the first attempt has begun, for the last of `lives`; its `pids`."""
        log = self.run.attempt(1) / "logs" / f"{role}-{node}.err"
        first = f"{role} on node {node}, attempt 1 of run"
        self.until(
            lambda: log.is_file() and log.read_text().count(first) >= lives, f"{role}-{node} is up"
        )
        return self.pids(role, node)

    def finish(self, limit_s: float = PATIENCE_S) -> LedgerLine:
        """Wait until no job of the run lives; return the last line of the ledger.

        Whatever the run met, nothing of it is left, its audit is clean, and no step is missing.
        """
        self.until(
            lambda: all(self.state(job) in states.ENDED for job in self.jobs), "end", limit_s
        )
        self.until_gone()
        assert self.ledger(), self.log()
        problems = audit(self.run.path).problems
        assert (problems, self.skipped()) == ([], []), f"{problems} {self.skipped()}"
        return self.ledger()[-1]

    def until_gone(self) -> None:
        """Wait until nothing of the run is left on any node."""
        with contextlib.suppress(WaitTimeout):
            wait_for(lambda: not self.leftovers(), LEAVE_S, "the end of all processes")
        left = self.leftovers()
        assert left == [], left

    def leftovers(self) -> list[str]:
        """Return the command lines, on any node, of what still belongs to the run."""
        path = str(self.run.path)
        return [
            " ".join(line)
            for pid, line in command_lines().items()
            if any(path in word for word in line) and pid != os.getpid()
        ]


def patient(claim: Callable[[], object]) -> Callable[[], object]:
    """Take a Slurm that is too busy to answer for a claim that does not hold yet."""

    def held() -> object:
        try:
            return claim()
        except ClusterError as error:
            print(error)
            return None

    return held


def command_lines() -> dict[int, Sequence[str]]:
    """Return the words of every process of this machine, on every node of every cluster, by pid."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            found[int(entry.name)] = [word.decode(errors="replace") for word in words if word]
    return found
