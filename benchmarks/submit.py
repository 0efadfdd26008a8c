"""What submitting costs: `agentrl train` up to sbatch's answer, and from there to a ready engine.

    python -m benchmarks.submit [--rounds 7] [--starts 3] [--work DIR] [--out FILE]

On the small real cluster; each command is a process of its own, in turn, medians count.
`imports`: `import slurm.het`, beside `import submitit`, on which it stands; the project asks for
under 0.3 s.
`submit`: the whole of `agentrl train` less its imports, beside submitit's own SlurmExecutor less
its import; the project asks for under 2 s. Ours asks sbatch twice (--test-only first), runs bash -n
and writes the run's directory. Ratio: submitit's seconds over ours.
`engine`: tiny runs, from sbatch's answer to the first engine that is ready, by stages; what is
beyond the engine's own start is ours and Slurm's, which begins the batch script at the next look of
its backfill (each second in this cluster), and the project asks for under 3 s of it.
`supervisor`: share of a core that the batch script and each role's keeper take beside the last of
these runs, in 20 s; the project asks for under 1 % a node.
Root, as the cluster needs it; a machine that does nothing else. CPU seconds are told too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from agentrl import events
from agentrl.handoff.publish import publish_json
from benchmarks.recovery import OVERRIDES, machine
from benchmarks.tiny_run import model_of, prepared, roles_of
from launch.run_dir import RunDir, launcher_of
from launch.submission import newest
from slurm.lab import Lab
from slurm.lab_process import Process, wait_for

RESULT = Path(__file__).parent / "results" / "submit.json"
LATER = "--begin=now+1hour"
"""What is only submitted never starts."""
LIMIT_S = 180.0
IDLE_S = 20.0
PEER = """\
import sys, submitit
executor = submitit.SlurmExecutor(sys.argv[1])
executor.update_parameters(partition="trainer", additional_parameters={"begin": "now+1hour"})
print(executor.submit(int).job_id)
"""
TARGETS = {"import_s": 0.3, "submit_s": 2.0, "before_engine_s": 3.0, "supervisor_share": 0.01}


class Cost(msgspec.Struct, kw_only=True, frozen=True):
    """Of one process."""

    wall_s: float
    cpu_s: float


def run(words: Sequence[str], env: Mapping[str, str]) -> Cost:
    """Run a command to its end. Raises SystemExit, as it said nothing good."""
    began = time.perf_counter()
    with open(os.devnull, "wb") as nothing:
        actions = [(os.POSIX_SPAWN_DUP2, nothing.fileno(), 1)]
        pid = os.posix_spawnp(words[0], list(words), env, file_actions=actions)
        _, status, used = os.wait4(pid, 0)
    if code := os.waitstatus_to_exitcode(status):
        raise SystemExit(f"{' '.join(words)} exited {code}")
    return Cost(wall_s=time.perf_counter() - began, cpu_s=used.ru_utime + used.ru_stime)


def commands(config: Path, folder: Path, at: int) -> dict[str, list[str]]:
    """Return what is timed, by name; a submission of each kind, and what it has to import first."""
    python = [sys.executable]
    given = [f"name=submit-{time.time():.0f}-{at}", f"model.path={model_of(config)}"]
    later = [f"cluster.{role}.extra=[{LATER}]" for role in ("trainer", "inference")]
    train = ["-m", "launch.cli", "train", str(config), *given, *OVERRIDES, *later]
    return {
        "python": [*python, "-c", "pass"],
        "import submitit": [*python, "-c", "import submitit"],
        "import slurm.het": [*python, "-c", "import slurm.het"],
        "import of train": [*python, "-c", "import launch.cli, launch.command, launch.train"],
        "submitit": [*python, "-c", PEER, str(folder / f"submitit-{at}")],
        "agentrl train": [*python, *train],
    }


def measure_submit(lab: Lab, config: Path, folder: Path, rounds: int) -> dict[str, Cost]:
    """Return the median cost of each command; the first round only warms the disk's cache."""
    found: dict[str, list[Cost]] = {}
    for at in range(rounds + 1):
        for name, words in commands(config, folder, at).items():
            found.setdefault(name, []).append(run(words, lab.environment()))
    lab.run(["scancel", "--user=root"])
    return {name: median(costs[1:]) for name, costs in found.items()}


def median(costs: Iterable[Cost]) -> Cost:
    walls, cpus = zip(*((one.wall_s, one.cpu_s) for one in costs), strict=True)
    return Cost(wall_s=round(statistics.median(walls), 3), cpu_s=round(statistics.median(cpus), 3))


def measure_engine(
    lab: Lab, config: Path, starts: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Start the tiny run so many times, one after another.

    Returns the median seconds after sbatch's answer at which each stage was reached, and the share
    of a core that each of the last run's supervisors takes.
    """
    found: list[dict[str, float]] = []
    shares: dict[str, float] = {}
    for at in range(starts):
        with begun(lab, config, at) as tiny:
            found.append({"script": script_began(lab, tiny), **stages(tiny)})
            if at == starts - 1:
                shares = idle_shares(lab, tiny)
    medians = {stage: statistics.median(one[stage] for one in found) for stage in found[0]}
    return medians, shares


@contextmanager
def begun(lab: Lab, config: Path, at: int) -> Iterator[RunDir]:
    """Yield a run once an engine of it is ready; its end leaves the cluster idle."""
    name = f"submit-engine-{time.time():.0f}-{at}"
    tiny = RunDir(config.parent / "runs" / name)
    given = [f"name={name}", f"model.path={model_of(config)}", *OVERRIDES]
    lab.run([sys.executable, "-m", "launch.cli", "train", str(config), *given])
    try:
        wait_for(lambda: stages(tiny), LIMIT_S, "a ready engine")
        yield tiny
    finally:
        lab.run(["scancel", "--user=root"])
        wait_for(lambda: set(lab.states().values()) == {"idle"}, LIMIT_S, "idle nodes")


def script_began(lab: Lab, tiny: RunDir) -> float:
    """Return the seconds after sbatch's answer at which Slurm began the batch script."""
    submitted = newest(tiny)
    assert submitted is not None
    up_s, ticks = time.clock_gettime(time.CLOCK_BOOTTIME), os.sysconf("SC_CLK_TCK")
    ages = [up_s - Process.of(one.pid).started / ticks for one in scripts(lab)]
    return round(time.time() - max(ages) - submitted.submitted, 2)


def idle_shares(lab: Lab, tiny: RunDir) -> dict[str, float]:
    """Return the share of a core that the batch script, and the busiest role's keeper, take."""
    keepers = [keeper for one in roles_of(tiny.path) if (keeper := one.parent())]
    kinds = {"batch script": scripts(lab), "keeper": keepers}
    before = {one: _cpu_s(one) for found in kinds.values() for one in found}
    time.sleep(IDLE_S)
    return {
        kind: round(max(_cpu_s(one) - before[one] for one in found) / IDLE_S, 4)
        for kind, found in kinds.items()
    }


def scripts(lab: Lab) -> list[psutil.Process]:
    """Return the processes of the cluster's batch scripts."""
    return [
        one
        for one in psutil.process_iter(["cmdline"])
        if any(_is_script(word, lab.directory) for word in one.info["cmdline"] or ())
    ]


def _is_script(word: str, directory: Path) -> bool:
    return word.startswith(str(directory)) and word.endswith("slurm_script")


def _cpu_s(one: psutil.Process) -> float:
    """Return its CPU seconds, and those of its children that have ended."""
    return float(sum(one.cpu_times()[:4]))


def stages(tiny: RunDir) -> dict[str, float]:
    """Return the stages of the engine that was ready first; nothing before there is one."""
    submitted, started = newest(tiny), launcher_of(tiny, 1).get("started")
    folder = tiny.path / "events"
    files = {path: list(events.read(path)) for path in folder.glob("inference-*.jsonl")}
    ready = {path: at for path, found in files.items() if (at := _first(found, "ready"))}
    if submitted is None or not ready or not isinstance(started, float):
        return {}
    path = min(ready, key=lambda one: ready[one])
    role = min(one.start for one in files[path] if isinstance(one, events.Network))
    engine = _first(files[path], "starting")
    times = {"attempt": started, "role": role, "engine starts": engine, "engine ready": ready[path]}
    return {stage: round(at - submitted.submitted, 2) for stage, at in times.items()}


def _first(found: Iterable[events.AnyEvent], state: str) -> float:
    ends = [one.end for one in found if isinstance(one, events.EngineState) and one.state == state]
    return min(ends, default=0.0)


def figures(
    costs: Mapping[str, Cost], reached: Mapping[str, float], shares: Mapping[str, float]
) -> dict[str, float]:
    """Return what the project asks for, and the ratio to submitit's own way."""
    ours = costs["agentrl train"].wall_s - costs["import of train"].wall_s
    theirs = costs["submitit"].wall_s - costs["import submitit"].wall_s
    return {
        "import_s": costs["import slurm.het"].wall_s,
        "import_ratio": round(
            costs["import submitit"].wall_s / costs["import slurm.het"].wall_s, 2
        ),
        "submit_s": round(ours, 3),
        "submit_ratio": round(theirs / ours, 2),
        "before_engine_s": reached["engine starts"],
        "of_which_slurm_s": reached["script"],
        "engine_s": round(reached["engine ready"] - reached["engine starts"], 2),
        "supervisor_share": max(shares.values()),
    }


def main() -> int:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--starts", type=int, default=3, help="of a run, to a ready engine")
    arguments.add_argument("--work", type=Path, help="folder of a prepared model, kept")
    arguments.add_argument("--out", type=Path, default=RESULT)
    given = arguments.parse_args()
    with ExitStack() as stack:
        made = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="submit")))
        config = prepared(given.work.absolute() if given.work else made)
        lab = Lab(made / "lab")
        lab.up()
        stack.callback(lab.down)
        result = machine("submit", lab)
        costs = measure_submit(lab, config, made, given.rounds)
        reached, shares = measure_engine(lab, config, given.starts)
    found = figures(costs, reached, shares)
    result |= {"targets": TARGETS, "figures": found, "stages_s": reached, "shares": shares}
    result["commands"] = msgspec.to_builtins(costs)
    publish_json(given.out, result)
    show(found, costs, reached)
    print(f"written to {given.out}")
    return 0


def show(
    found: Mapping[str, float], costs: Mapping[str, Cost], reached: Mapping[str, float]
) -> None:
    table = Table("", "seconds", "CPU seconds", title="Medians of processes")
    for name, cost in costs.items():
        table.add_row(name, f"{cost.wall_s:.3f}", f"{cost.cpu_s:.3f}")
    Console().print(table)
    print(json.dumps({"after sbatch's answer": reached, **found}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
