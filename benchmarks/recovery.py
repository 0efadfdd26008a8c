"""How long a run on the small real cluster makes no progress after each fault.

    python -m benchmarks.recovery [--faults trainer_process …] [--work DIR]

A fault meets a running tiny run (one trainer node, two of three inference nodes). The time goes
from the fault to the end of the first step that no earlier one equals, so what was lost has been
made again; where the fault ends the launch attempt, to the first such step of the next one. It
holds the site's own delays: Slurm's notice of a dead node (SlurmdTimeout, 15 s in this cluster),
the wait of a requeued job (cred_expire + 1 s, here 6; 121 by default), and, for the trainer's node,
the 5 s after which it is booted again. Root, as the cluster needs it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from agentrl import events
from agentrl.handoff.publish import publish_json
from launch.run_dir import RunDir
from slurm.lab import Lab
from slurm.lab_process import wait_for

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "recovery.json"
LIMIT_S = 600.0
Row = dict[str, str | float | int]
DOWN_S = 5.0
CONFIG = """\
extends: {root}/configs/demo.yaml
name: tiny
runs_dir: {folder}/runs
agent: {{prompts: {root}/configs/agents/repair.yaml}}
tasks: {{folder: {folder}/tasks, train: 4, held_out: 4, unseen_sites: 2, unseen_functions: 2}}
model: {{path: {folder}/model, hidden_size: 64, intermediate_size: 128, layers: 2, heads: 2}}
rollout: {{concurrency: 4, attempts_per_task: 4, nodes: 2}}
sft: {{traces: 48, expert_accuracy: 0.5, epochs: 12}}
training: {{steps: 1000, groups_per_step: 2, checkpoint_every: 1}}
grace_s: 30
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Victim:
    """A run that a fault is to meet."""

    lab: Lab
    run: RunDir

    @property
    def job(self) -> str:
        newest = max(self.run.path.glob("submissions/*/submission.json"))
        return str(json.loads(newest.read_bytes())["jobs"][0])

    def agentrl(self, *words: str) -> None:
        self.lab.run([sys.executable, "-m", "launch.cli", *words])

    def steps(self) -> list[events.Step]:
        folder = self.run.path / "events"
        found = events.read_folder(folder) if folder.is_dir() else []
        return [one for one in found if isinstance(one, events.Step)]

    def trajectory_after(self, start: float) -> float | None:
        """Return when the first trajectory that began after `start` has ended."""
        found = events.read_folder(self.run.path / "events")
        tries = [one for one in found if isinstance(one, events.TrajectoryEvent)]
        return min((one.end for one in tries if one.start > start), default=None)

    def attempts(self) -> int:
        """Return how many launch attempts have begun for good: their launcher.json is there."""
        return len(list(self.run.path.glob("attempts/*/launcher.json")))

    def kill(self, role: str) -> None:
        """SIGKILL the role, as the kernel does when memory runs out."""
        for entry in Path("/proc").iterdir():
            words = _command_line(entry)
            if "launch.role" in words and role in words and str(self.run.path) in words:
                os.kill(int(entry.name), signal.SIGKILL)


def trainer_process(victim: Victim) -> None:
    victim.kill("trainer")


def inference_process(victim: Victim) -> None:
    """All of them, so that no other node's groups carry the trainer over the gap."""
    victim.kill("inference")


def inference_node(victim: Victim) -> None:
    victim.lab.kill_node("inf0")


def trainer_node(victim: Victim) -> None:
    """The batch host: nobody is left to decide, and Slurm requeues."""
    victim.lab.kill_node("trn0")
    time.sleep(DOWN_S)
    victim.lab.start_node("trn0")


def requeue(victim: Victim) -> None:
    victim.lab.run(["scontrol", "requeue", victim.job])


def limit(victim: Victim) -> None:
    """What Slurm sends ahead of the limit."""
    victim.lab.run(["scancel", "--batch", "--signal=USR2", victim.job])


def preemption(victim: Victim) -> None:
    whole = ["--partition=urgent", "--nodelist=trn0", "--exclusive", "--time=1"]
    victim.lab.run(["sbatch", "--output=/dev/null", *whole, "--wrap=true"])


def cancel_and_resume(victim: Victim) -> None:
    victim.lab.run(["scancel", victim.job])
    ended = ["squeue", "--noheader", f"--jobs={victim.job}"]
    wait_for(lambda: not victim.lab.run(ended, check=False).stdout.strip(), LIMIT_S, "its end")
    victim.agentrl("resume", str(victim.run.path))


FAULTS: dict[str, Callable[[Victim], None]] = {
    one.__name__: one
    for one in (
        trainer_process,
        inference_process,
        inference_node,
        trainer_node,
        requeue,
        limit,
        preemption,
        cancel_and_resume,
    )
}
WITHIN_ATTEMPT = ("trainer_process", "inference_process")
OVERRIDES = {
    "preemption": ("cluster.trainer.partition=scavenge", "cluster.trainer.constraint=trainer")
}


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    arguments.add_argument("--work", type=Path, help="folder of a prepared model from before")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="recovery") as made:
        work = given.work or Path(made)
        config = prepared(work)
        lab = Lab(Path(made) / "lab")
        lab.up()
        rows = kept(given.faults)
        try:
            for fault in given.faults:
                rows.append(measured(lab, config, fault))
                machine = {"machine": platform.machine(), "cpus": os.cpu_count()}
                publish_json(RESULT, {**machine, "faults": rows})
        finally:
            left = lab.down()
    Console().print(table(rows))
    print(f"written to {RESULT}")
    return 1 if left else 0


def kept(faults: Sequence[str]) -> list[Row]:
    """Return what was measured before of the other faults."""
    known = json.loads(RESULT.read_bytes())["faults"] if RESULT.is_file() else []
    return [row for row in known if row["fault"] not in faults]


def prepared(work: Path) -> Path:
    """Make the tasks and the tuned model unless they are there; return the config."""
    config = work / "config.yaml"
    if config.is_file():
        return config
    work.mkdir(parents=True, exist_ok=True)
    draft = work / "draft.yaml"
    draft.write_text(CONFIG.format(root=ROOT, folder=work))
    agentrl = [sys.executable, "-m", "launch.cli"]
    subprocess.run([*agentrl, "prepare", str(draft)], check=True)
    two = (work / "tasks" / "sft.jsonl").read_bytes().splitlines(keepends=True)[:2]
    for split in ("sft", "train"):
        (work / "tasks" / f"{split}.jsonl").write_bytes(b"".join(two))
    subprocess.run([*agentrl, "sft", str(draft)], check=True)
    draft.rename(config)
    return config


def measured(lab: Lab, config: Path, fault: str) -> Row:
    """Begin a run, let the fault meet it, and time it."""
    name = f"{fault}-{time.time():.0f}"
    victim = Victim(lab=lab, run=RunDir(config.parent / "runs" / name))
    model = config.parent / "runs" / "tiny" / "sft" / "model"
    began = time.time()
    given = ["cluster=lab", f"name={name}", f"model.path={model}"]
    given += OVERRIDES.get(fault, ())
    victim.agentrl("train", str(config), *given)
    wait_for(lambda: len(victim.steps()) >= 3, LIMIT_S, f"three steps before {fault}")
    usual = [one.seconds for one in victim.steps()[1:]]
    start = time.time()
    FAULTS[fault](victim)
    is_within = fault in WITHIN_ATTEMPT
    wait_for(lambda: is_within or victim.attempts() > 1, LIMIT_S, f"an attempt after {fault}")
    again = start if is_within else (victim.run.attempt(2) / "launcher.json").stat().st_mtime
    if fault == "inference_process":  # groups that were finished carry the trainer for a while
        again = wait_for(lambda: victim.trajectory_after(start), LIMIT_S, "a trajectory after it")

    def goes_on() -> float | None:
        newest = max((one.step for one in victim.steps() if one.end < again), default=0)
        ends = [one.end for one in victim.steps() if one.step > newest and one.end > again]
        return min(ends, default=None)

    end = wait_for(goes_on, LIMIT_S, f"a step after {fault}")
    attempts = victim.attempts()
    victim.agentrl("stop", str(victim.run.path), "--deadline-s", "120")
    row: Row = {
        "fault": fault,
        "seconds": round(end - start, 1),
        "launch_attempts": attempts,
        "usual_step_s": round(sum(usual) / len(usual), 1),
        "submit_to_first_step_s": round(min(one.end for one in victim.steps()) - began, 1),
    }
    print(json.dumps(row), flush=True)
    for node, state in lab.states().items():
        if state.startswith("down"):
            lab.start_node(node)
    return row


def table(rows: list[Row]) -> Table:
    made = Table(title="From the fault to the end of the first step beyond it")
    for column in (
        "fault",
        "seconds",
        "launch attempts",
        "a step takes, s",
        "enter → first step, s",
    ):
        made.add_column(column)
    for row in rows:
        made.add_row(*map(str, row.values()))
    return made


def _command_line(entry: Path) -> list[str]:
    try:
        return (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


if __name__ == "__main__":
    sys.exit(main())
