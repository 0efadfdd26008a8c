"""`agentrl status [RUN]`: where a run stands, on one screen; without RUN the newest in runs/."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agentrl.errors import ConfigError
from launch.command import guard, parser
from launch.progress import EventTail, Standing
from launch.run_dir import RunDir, is_living, launcher_of
from slurm import ledger


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
    """Return the run's standing from its files."""
    standing = Standing()
    standing.add(EventTail(run.path / "events").read())
    attempts = run.attempts()
    lines = ledger.read(run.path)
    is_running = bool(attempts) and is_living(launcher_of(run, attempts[-1]))
    share = standing.waiting_share()
    return {
        "run": str(run.path),
        "state": "running" if is_running else _ended(attempts, lines),
        "attempts": len(attempts),
        "ended": lines[-1].ended if lines and not is_running else "",
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


def _ended(attempts: list[int], lines: list[ledger.LedgerLine]) -> str:
    if not attempts:
        return "not begun"
    if not lines or lines[-1].attempt != attempts[-1]:
        return "lost: its launcher was killed; resume it"
    last = lines[-1]
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
