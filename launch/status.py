"""`agentrl status [RUN]`: where a run stands, on one screen; without RUN the newest in runs/.

For a run on a cluster Slurm is asked once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agentrl.errors import ConfigError, QueryError
from launch import jobs, submission
from launch.command import guard, parser
from launch.progress import EventTail, Standing
from launch.run_dir import RunDir, is_living, launcher_of
from slurm import ledger, states

UNKNOWN = "unknown: Slurm does not answer"


def main(argv: Sequence[str]) -> int:
    """Print the run's standing."""
    arguments = parser("status", __doc__)
    arguments.add_argument("run", metavar="RUN", nargs="?", help="run directory")
    arguments.add_argument("--json", action="store_true", help="print one JSON object")
    given = arguments.parse_args(argv)
    run = RunDir.open(given.run or newest(Path("runs")))
    found = facts(run)
    if given.json:
        print(json.dumps(found))
    else:
        Console().print(table(found))
    return 0


def newest(runs: Path) -> Path:
    """Return the run that was begun or resumed last. Raises ConfigError without any."""
    found = sorted(runs.glob("*/config.yaml"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigError(f"no run in {runs.absolute()}; give a run directory")
    return found[-1].parent


def facts(run: RunDir) -> dict[str, Any]:
    """Return the run's standing from its files, and from Slurm where it has its job."""
    standing = Standing()
    standing.add(EventTail(run.path / "events").read())
    return described(run, standing, place_of(run))


def described(run: RunDir, standing: Standing, place: Place) -> dict[str, Any]:
    """Return the facts as plain values, for a table or for JSON."""
    lines = ledger.read(run.path)
    share = standing.waiting_share()
    return {
        "run": str(run.path),
        "state": place.state or ended(run.attempts(), lines),
        "job": place.job,
        **place.components,
        "attempts": len(run.attempts()),
        "ended": lines[-1].ended if lines and not place.is_living else "",
        "step": standing.step,
        "steps": run.config().training.steps,
        "version": standing.version,
        "checkpoint_step": run.checkpoint_step(),
        "reward": standing.reward,
        "trajectories": standing.trajectories,
        "trajectories_per_hour": round(standing.trajectories_per_hour()),
        "trainer_waiting": None if share is None else round(share, 3),
        "faults": standing.faults,
        "last_fault": standing.last_fault,
        "causes": dict(standing.causes),
        "drops": dict(standing.drops),
        "engines": standing.engines,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a run is now."""

    state: str = ""
    """`running`, `pending`, …; empty where nothing of it lives, and its files say the rest."""
    job: str = ""
    components: dict[str, str] = field(default_factory=dict)
    """What Slurm says of each component."""

    @property
    def is_living(self) -> bool:
        return self.state not in ("", UNKNOWN)


def place_of(run: RunDir) -> Place:
    """Ask Slurm once, or this machine's processes, whether the run lives."""
    attempts = run.attempts()
    launcher = launcher_of(run, attempts[-1]) if attempts else {}
    queued = submission.newest(run)
    if queued is None or (attempts and "job" not in launcher and _is_later(launcher, queued)):
        return Place(state="running" if is_living(launcher) else "")
    try:
        found = states.query(queued.jobs)
    except QueryError as error:
        return Place(state=UNKNOWN, job=queued.jobs[-1], components={"slurm": str(error)})
    job = jobs.chosen(found.values())
    if job is None:
        return Place(job=queued.jobs[-1])
    state = "" if job.is_done else job.state.lower()
    return Place(state=state, job=job.job_id, components=jobs.told(job))


def _is_later(launcher: dict[str, object], queued: submission.Submission) -> bool:
    started = launcher.get("started")
    return isinstance(started, int | float) and started > queued.submitted


def ended(attempts: list[int], lines: list[ledger.LedgerLine]) -> str:
    """Return how a run that does not live has ended."""
    if not attempts:
        return "not begun"
    if not lines or lines[-1].attempt != attempts[-1]:
        return "lost: its launcher ended without a verdict; resume it"
    last = lines[-1]
    if last.action in ("requeue", "gone"):
        return "ended before another attempt began; resume it"
    return {0: "done", 75: "saved"}.get(last.code, "failed") if last.action != "lost" else "lost"


def table(found: dict[str, Any]) -> Table:
    """Lay the facts out for a terminal."""
    rows = Table(show_header=False, box=None, title=found["run"], title_justify="left")
    for key, value in found.items():
        if key == "run" or value in ("", {}, None):
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{name} {count}" for name, count in sorted(value.items()))
        elif isinstance(value, float):
            value = f"{value:.3f}"
        rows.add_row(key.replace("_", " "), str(value))
    return rows


if __name__ == "__main__":
    sys.exit(guard(main))
