"""How long a run on the small real cluster makes no useful step after each fault.

    python -m benchmarks.recovery [--faults trainer_process …] [--work DIR] [--out FILE]

One tiny run (a trainer node, two of three inference nodes, a checkpoint each step) meets the faults
one after another, each once two steps have followed the last. `seconds` go from the fault to the
end of the first step that no earlier one equals, so what was lost has been made again; `attempt_s`
to the beginning of the next launch attempt and `engine_s` to an engine that serves again, where a
fault ends them. Times are those of the run's own events. They hold the site's delays: Slurm's
notice of a dead node (SlurmdTimeout, 15 s in this cluster), the wait of a requeued job (cred_expire
+ 1 s, here 6; 121 by default), GraceTime of a preempted partition (5 s) and, for the trainer's
node, the 5 s after which it is booted again. A fault that the run does not outlive is written down
as such, and the next one meets a new run. Root, as the cluster needs it; a machine that does
nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from agentrl import events
from agentrl.errors import AgentRLError
from agentrl.handoff.publish import publish_json
from benchmarks.tiny_run import model_of, prepared, roles_of
from launch.progress import EventTail
from launch.run_dir import RunDir, launcher_of
from slurm import network
from slurm.lab import Lab
from slurm.lab_process import wait_for

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "recovery.json"
LIMIT_S = 150.0
"""Longest wait for a run's first steps, and for its way out of a fault."""
STEPS_BETWEEN = 2
DOWN_S = 5.0
OVERRIDES = (
    "cluster=lab",
    "cluster.time_min=60",
    "cluster.inference.partition=scavenge",  # for what the partition `urgent` takes
    "cluster.inference.constraint=inference",
    "rollout.nodes=2",
    "training.steps=100000",
    "training.checkpoint_every=1",
)
Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What came of one fault, seconds after it; None where there is no such thing."""

    fault: str
    seconds: float | None = None
    attempt_s: float | None = None
    engine_s: float | None = None
    usual_step_s: float | None = None
    """What a step took before."""
    failed: str = ""
    """Why the run did not come back."""


@dataclass(kw_only=True)
class Victim:
    """A run that faults are to meet, and what its events have told so far."""

    lab: Lab
    run: RunDir
    limit_s: float
    steps: list[events.Step] = field(default_factory=list)
    trajectories: list[events.TrajectoryEvent] = field(default_factory=list)
    ready: list[float] = field(default_factory=list)
    """When engines began to serve."""

    def __post_init__(self) -> None:
        self._tail = EventTail(self.run.path / "events")

    @property
    def job(self) -> str:
        newest = max(self.run.path.glob("submissions/*/submission.json"))
        return str(json.loads(newest.read_bytes())["jobs"][0])

    @property
    def inference_nodes(self) -> list[str]:
        """Slurm's names of those that the newest launch attempt has."""
        plan = network.read(self.run.attempt(self.run.attempts()[-1]))
        return sorted(set(plan.nodes) - {plan.trainer})

    def agentrl(self, *words: str) -> None:
        self.lab.run([sys.executable, "-m", "launch.cli", *words])

    def look(self) -> None:
        """Take in the events that are new."""
        for event in self._tail.read():
            if isinstance(event, events.Step):
                self.steps.append(event)
            elif isinstance(event, events.TrajectoryEvent):
                self.trajectories.append(event)
            elif isinstance(event, events.EngineState) and event.state == "ready":
                self.ready.append(event.end)

    def until(self, claim: Callable[[], Answer | None], what: str) -> Answer:
        """Return the first true answer of `claim`. Raises WaitTimeout."""

        def looked() -> Answer | None:
            self.look()
            return claim()

        return wait_for(looked, self.limit_s, what)

    def began(self, number: int) -> float | None:
        """Return when a launch attempt began; None before."""
        found = launcher_of(self.run, number).get("started")
        return found if isinstance(found, float) else None

    def first_step(self, since: float) -> float | None:
        """Return the end of the first step after `since` that is new; None before."""
        newest = max((one.step for one in self.steps if one.end < since), default=0)
        ends = [one.end for one in self.steps if one.step > newest and one.end > since]
        return min(ends, default=None)

    def first_trajectory(self, since: float) -> float | None:
        """Return the end of the first trajectory that began after `since`; None before."""
        return min((one.end for one in self.trajectories if one.start > since), default=None)

    def first_ready(self, since: float) -> float | None:
        return min((at for at in self.ready if at > since), default=None)

    def kill(self, role: str) -> None:
        """SIGKILL the role, as the kernel does when memory runs out."""
        for one in roles_of(self.run.path, role):
            one.kill()

    def has_left(self) -> bool:
        asked = ["squeue", "--noheader", f"--jobs={self.job}"]
        return not self.lab.run(asked, check=False).stdout.strip()


# -- the faults -----------------------------------------------------------------------------------


def trainer_process(victim: Victim) -> None:
    victim.kill("trainer")


def inference_process(victim: Victim) -> None:
    """All of them, so that no other node's groups carry the trainer over the gap."""
    victim.kill("inference")


def limit(victim: Victim) -> None:
    """What Slurm sends ahead of the limit."""
    victim.lab.run(["scancel", "--batch", "--signal=USR2", victim.job])


def requeue(victim: Victim) -> None:
    victim.lab.run(["scontrol", "requeue", victim.job])


def preemption(victim: Victim) -> None:
    """A short urgent job takes every inference node."""
    names = sorted(node.name for node in victim.lab.nodes if node.kind == "inference")
    whole = [f"--nodelist={','.join(names)}", f"--nodes={len(names)}", "--exclusive", "--time=1"]
    victim.lab.run(["sbatch", "--output=/dev/null", "--partition=urgent", *whole, "--wrap=true"])


def inference_node(victim: Victim) -> None:
    """The third one takes its place."""
    victim.lab.kill_node(victim.inference_nodes[0])


def trainer_node(victim: Victim) -> None:
    """The batch host: nobody is left to decide, and Slurm requeues."""
    victim.lab.kill_node("trn0")
    time.sleep(DOWN_S)
    victim.lab.start_node("trn0")


def cancel_and_resume(victim: Victim) -> None:
    victim.lab.run(["scancel", victim.job])
    victim.until(victim.has_left, "the end of the cancelled job")
    victim.agentrl("resume", str(victim.run.path))


FAULTS: dict[str, Callable[[Victim], None]] = {
    one.__name__: one
    for one in (
        trainer_process,
        inference_process,
        limit,
        requeue,
        preemption,
        inference_node,
        trainer_node,
        cancel_and_resume,
    )
}
WITHIN_ATTEMPT = ("trainer_process", "inference_process")


def measured(victim: Victim, fault: str) -> Row:
    """Let the fault meet the run, and time the way out of it. Raises AgentRLError if there is none.

    A new attempt's first steps may be made of groups that were finished before: nothing of them is
    lost. After `inference_process` they carry the trainer over the fault, so there a step counts
    once a trajectory that began after it has ended.
    """
    steps = len(victim.steps) + STEPS_BETWEEN
    victim.until(lambda: len(victim.steps) >= steps, f"{STEPS_BETWEEN} steps before {fault}")
    usual = victim.steps[-1].seconds
    attempt = victim.run.attempts()[-1] + 1
    start = time.time()
    FAULTS[fault](victim)
    since = began = start
    if fault not in WITHIN_ATTEMPT:
        since = began = victim.until(lambda: victim.began(attempt), f"an attempt after {fault}")
    elif fault == "inference_process":
        since = victim.until(lambda: victim.first_trajectory(start), f"a trajectory after {fault}")
    end = victim.until(lambda: victim.first_step(since), f"a step after {fault}")
    engine = None
    if fault != "trainer_process":
        engine = victim.until(lambda: victim.first_ready(began), f"an engine after {fault}")
    return Row(
        fault=fault,
        seconds=round(end - start, 1),
        attempt_s=None if fault in WITHIN_ATTEMPT else round(began - start, 1),
        engine_s=None if engine is None else round(engine - start, 1),
        usual_step_s=round(usual, 1),
    )


# -- the run --------------------------------------------------------------------------------------


@contextmanager
def begun(lab: Lab, config: Path, limit_s: float) -> Iterator[tuple[Victim, float]]:
    """Yield a run, and the seconds from `enter` to its first step's end. It ends with the block."""
    name = f"recovery-{time.time():.0f}"
    victim = Victim(lab=lab, run=RunDir(config.parent / "runs" / name), limit_s=limit_s)
    start = time.time()
    given = [f"name={name}", f"model.path={model_of(config)}", *OVERRIDES]
    victim.agentrl("train", str(config), *given)
    try:
        yield victim, victim.until(lambda: victim.first_step(start), "the first step") - start
    finally:
        lab.run(["scancel", "--user=root"])
        victim.until(victim.has_left, "the end of the run")


def measure(lab: Lab, config: Path, faults: Sequence[str], limit_s: float) -> Iterator[Row | float]:
    """Yield each fault's row and, of each run, the seconds from `enter` to its first step's end."""
    left = list(faults)
    while left:
        with begun(lab, config, limit_s) as (victim, first_step_s):
            yield round(first_step_s, 1)
            row = Row(fault="")
            while left and not row.failed:
                fault = left.pop(0)
                try:
                    row = measured(victim, fault)
                except AgentRLError as error:
                    row = Row(fault=fault, failed=str(error))
                yield row
                restored(lab)


def restored(lab: Lab) -> None:
    """Boot what was killed."""
    for name in {node.name for node in lab.nodes} - set(lab.daemons.living()):
        lab.start_node(name)


# -- the result -----------------------------------------------------------------------------------


def main() -> int:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    arguments.add_argument("--work", type=Path, help="folder of a prepared model, kept")
    arguments.add_argument("--limit-s", type=float, default=LIMIT_S, help="longest wait for a step")
    arguments.add_argument("--out", type=Path, default=RESULT)
    given = arguments.parse_args()
    rows: list[Row] = []
    with ExitStack() as stack:
        made = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="recovery")))
        config = prepared(given.work.absolute() if given.work else made)
        lab = Lab(made / "lab")
        lab.up()
        stack.callback(lab.down)
        result = machine("recovery", lab)
        for found in measure(lab, config, given.faults, given.limit_s):
            if isinstance(found, Row):
                rows.append(found)
            else:
                result.setdefault("enter_to_first_step_s", found)
            print(found if isinstance(found, Row) else f"first step after {found} s", flush=True)
            publish_json(given.out, {**result, "faults": kept(given, rows)})
    Console().print(table(rows))
    print(f"written to {given.out}")
    return 1 if any(row.failed for row in rows) else 0


def kept(given: argparse.Namespace, rows: Sequence[Row]) -> list[dict[str, object]]:
    """Return the rows, and those that were measured before of faults that are not asked for."""
    known = json.loads(given.out.read_bytes())["faults"] if given.out.is_file() else []
    by_fault = {row["fault"]: row for row in known if row["fault"] not in given.faults}
    by_fault |= {row.fault: asdict(row) for row in rows}
    return [by_fault[fault] for fault in FAULTS if fault in by_fault]


def machine(benchmark: str, lab: Lab) -> dict[str, object]:
    """Return what the figures depend on."""
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    commit = subprocess.run(git, check=False, capture_output=True, text=True).stdout.strip()
    return {
        "benchmark": benchmark,
        "command": f"python -m benchmarks.{benchmark} {' '.join(sys.argv[1:])}".strip(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "versions": {
            "python": platform.python_version(),
            "slurm": lab.run(["sbatch", "--version"]).stdout.strip(),
            "commit": commit,
        },
    }


def table(rows: Sequence[Row]) -> Table:
    made = Table(title="Seconds from the fault to the end of the first step beyond it")
    for column in ("fault", "seconds", "next attempt", "an engine", "a step takes", ""):
        made.add_column(column)
    for row in rows:
        made.add_row(*("" if value is None else str(value) for value in asdict(row).values()))
    return made


if __name__ == "__main__":
    sys.exit(main())
