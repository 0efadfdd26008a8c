"""What a run's batch script asks Python: `python -m launch.host begin|verdict RUN …`.

The script (slurm/templates/run.sh.j2) starts the steps and acts; what is decided is decided here
and in slurm.verdict, from the files of the run. Every answer is one line on standard output.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from agentrl.errors import LaunchError
from agentrl.events import EventWriter, LaunchAttempt, now
from agentrl.handoff.publish import publish_json
from launch import submission
from launch.command import guard, parser
from launch.jobs import states_of
from launch.run_dir import RunDir, launcher_of, settle_lost
from slurm import exit_record, ledger
from slurm.exit_record import DONE, ExitRecord
from slurm.files import listed
from slurm.ledger import LedgerLine, attempts_without_progress
from slurm.verdict import Asked, Limits, Situation, Verdict, decide

OVER = "over"
"""Answer of `begin` when there is nothing left to do, as for the rest of a chain."""
NETWORK = "network"
"""The proof of the network, as a role: it ends before the others start."""
ASKED: dict[str, Asked] = {"limit": "limit", "term": "limit", "person": "person"}
"""What the batch script knows of why the end was asked for."""
NETWORK_ERROR_BYTES = 2000
RECORD_WAIT_S = 5.0
"""How long another node's exit record may take to show on this one."""


def main(argv: Sequence[str]) -> int:
    arguments = parser("host", __doc__)
    verbs = arguments.add_subparsers(dest="verb", required=True)
    to_begin = verbs.add_parser("begin", help="lay the launch attempt; prints its number, or over")
    to_begin.add_argument("run")
    to_begin.add_argument("submission", type=int)
    to_begin.add_argument("began", help="why the submission was made: started or resumed")
    to_decide = verbs.add_parser("verdict", help="a step has ended; prints what to do")
    to_decide.add_argument("run")
    to_decide.add_argument("attempt", type=int)
    to_decide.add_argument("role")
    to_decide.add_argument("node", type=int)
    to_decide.add_argument("code", type=int, help="of its srun")
    to_decide.add_argument("--asked", default="", choices=["", *ASKED])
    given = arguments.parse_args(argv)
    run = RunDir.open(given.run)
    if given.verb == "begin":
        return begin(run, given.submission, given.began, Job.of(os.environ))
    ended = _ended(run, given.attempt, (given.role, given.node), given.code)
    print(decided(run, given.attempt, ended, asked=given.asked), flush=True)
    return DONE


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The Slurm job that this batch script is, and which of its lives."""

    id: str
    restart: int
    nodes: dict[str, str]
    """Slurm's node list, by component."""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Job:
        """Read it from the batch script's environment. Raises LaunchError outside a job."""
        if "SLURM_JOB_ID" not in environ:
            raise LaunchError("no SLURM_JOB_ID: only a batch script of Slurm begins an attempt")
        prefix = "SLURM_JOB_NODELIST_HET_GROUP_"
        groups = {
            name.removeprefix(prefix): nodes
            for name, nodes in environ.items()
            if name.startswith(prefix)
        }
        return cls(
            id=environ["SLURM_JOB_ID"],
            restart=int(environ.get("SLURM_RESTART_COUNT", "0")),  # unset in the first life
            nodes=groups or {"0": environ.get("SLURM_JOB_NODELIST", "")},
        )


# -- the beginning ------------------------------------------------------------------------------


def begin(run: RunDir, number: int, began: str, job: Job) -> int:
    """Settle what an earlier life left, then lay this attempt's folder and print its number.

    Prints OVER where there is nothing to do. Raises LaunchError where another job runs this run.
    """
    settle_lost(run, own_job=job.id)
    earlier = [one for one in run.attempts() if launcher_of(run, one).get("submission") == number]
    history = ledger.read(run.path)
    if reason := reason_to_end(run, history, earlier):
        sys.stderr.write(f"{reason}\n")
        print(OVER)
        return DONE
    lost = history[-1].ended if history else ""
    attempt = max(run.attempts(), default=0) + 1
    folder = run.attempt(attempt)
    (folder / "logs").mkdir(parents=True)
    (folder / "exit").mkdir()
    reason = lost if earlier else began
    publish_json(
        folder / "launcher.json",
        {
            "job": job.id,
            "restart": job.restart,
            "nodes": job.nodes,
            "submission": number,
            "began": reason,
            "is_by_person": not earlier,
            "step_begin": run.checkpoint_step(),
            "started": time.time(),
        },
    )
    script = submission.folder_of(run, number) / "script.sbatch"
    if listed(script):
        shutil.copyfile(script, folder / script.name)
    _write_event(run, attempt, "begin", reason)
    print(f"{attempt:04d}")
    return DONE


def reason_to_end(run: RunDir, history: list[LedgerLine], earlier: list[int]) -> str:
    """Return why no attempt should begin, or nothing. `earlier`: attempts of this submission."""
    config = run.config()
    if earlier and run.checkpoint_step() >= config.training.steps:
        return f"{run.name} is done at step {run.checkpoint_step()}"
    if listed(run.stop_file):
        return f"{run.name} was asked to stop"
    last = history[-1] if history else None
    if last and last.attempt in earlier and last.action in ("done", "stop"):
        return f"{run.name} has ended: {last.ended}"
    most = config.max_attempts_without_progress
    if earlier and (count := attempts_without_progress(history)) >= most:
        return (
            f"{run.name} stops: {count} launch attempts in a row made no new checkpoint "
            f"(max_attempts_without_progress={most}), the last one: {last.ended if last else ''}"
        )
    return ""


# -- the end of a step --------------------------------------------------------------------------


def decided(run: RunDir, attempt: int, ended: ExitRecord, *, asked: str) -> str:
    """Return the script's next action: wait, restart ROLE NODE, requeue, gone, done, stop CODE.

    `gone`: Slurm is ending the job already. Where the attempt ends, its ledger line is written.
    The reason goes to standard error.
    """
    launcher = launcher_of(run, attempt)
    folder = run.attempt(attempt)
    situation = Situation(
        records=records_of(folder, ended),
        history=tuple(ledger.read(run.path)),
        step_begin=_int(launcher.get("step_begin")),
        step_now=run.checkpoint_step(),
        is_by_person=launcher.get("is_by_person") is True,
        asked=who_asked(run, asked),
    )
    limits = Limits(max_attempts_without_progress=run.config().max_attempts_without_progress)
    verdict = decide(situation, limits)
    if verdict.action in ("restart_trainer", "restart_inference"):
        exit_record.set_aside(folder, ended.role, ended.node)
    if verdict.action in ("done", "requeue", "stop"):
        if asked == "term":
            verdict = after_term(verdict, states_of([str(launcher.get("job"))]).values())
        _close(run, attempt, verdict, situation)
    sys.stderr.write(f"{verdict.action}: {verdict.reason}\n")
    return words_of(verdict, ended)


def who_asked(run: RunDir, asked: str) -> Asked:
    """Tell a person's wish, which ends the run, from the limit or Slurm's TERM, which do not."""
    if listed(run.stop_file):
        return "person"
    return ASKED[asked] if asked else ""


def after_term(verdict: Verdict, states: Iterable[str]) -> Verdict:
    """Leave the job to Slurm where Slurm is ending it: by scancel, requeue, preemption, the limit.

    Ahead of a preemption with grace the job still runs, and is requeued as ever.
    """
    if verdict.action != "requeue" or "RUNNING" in states:
        return verdict
    reason = f"{verdict.reason}; Slurm ends this life of the job"
    return dataclasses.replace(verdict, action="gone", reason=reason)


def words_of(verdict: Verdict, ended: ExitRecord) -> str:
    """Return what the batch script acts on."""
    if verdict.action in ("restart_trainer", "restart_inference"):
        return f"restart {ended.role} {ended.node}"
    return f"stop {verdict.code}" if verdict.action == "stop" else verdict.action


def records_of(folder: Path, newest: ExitRecord) -> tuple[ExitRecord, ...]:
    """Return every end of a role in this attempt, oldest first, `newest` last."""
    found = []
    for name in sorted(os.listdir(folder / "exit")):
        if name.endswith(".json") and not name.startswith("."):
            data = (folder / "exit" / name).read_bytes()
            found.append(msgspec.json.decode(data, type=ExitRecord))
    others = [one for one in found if one != newest]
    return (*sorted(others, key=lambda one: one.ended), newest)


def _ended(run: RunDir, attempt: int, task: tuple[str, int], code: int) -> ExitRecord:
    """Return the record of the role that ended, made up from srun's code where it left none."""
    folder, (role, node) = run.attempt(attempt), task
    # who was killed cannot write; who ended of its own will has written, but on another node
    deadline = time.monotonic() + (RECORD_WAIT_S if code < 128 and role != NETWORK else 0)
    found = exit_record.read(folder, role, node)
    while found is None and time.monotonic() < deadline:
        time.sleep(0.1)
        found = exit_record.read(folder, role, node)
    if found is None:
        found = _made_up(run, attempt, task, code)
        exit_record.write(folder, found)
    return found


def _made_up(run: RunDir, attempt: int, task: tuple[str, int], code: int) -> ExitRecord:
    role, node = task
    started = _float(launcher_of(run, attempt).get("started"))
    found = exit_record.synthesise(role, node, code, step=run.checkpoint_step(), started=started)
    if role != NETWORK:
        return found
    return msgspec.structs.replace(
        found,
        cause="usage" if run.config().cluster.interface_pin else "launch",
        message=f"the network was not proved: {_network_error(run.attempt(attempt))}",
    )


def _network_error(folder: Path) -> str:
    path = folder / "logs" / "network.err"
    return path.read_text(errors="replace")[-NETWORK_ERROR_BYTES:].strip() or f"see {path}"


def _close(run: RunDir, attempt: int, verdict: Verdict, situation: Situation) -> None:
    launcher = launcher_of(run, attempt)
    known = {line.attempt for line in situation.history}
    if attempt in known:
        raise LaunchError(f"attempt {attempt} of run {run.path} has its ledger line already")
    ledger.append(
        run.path,
        LedgerLine(
            attempt=attempt,
            began=str(launcher.get("began", "")),
            is_by_person=situation.is_by_person,
            ended=verdict.reason,
            action=verdict.action,
            code=verdict.code,
            step_begin=situation.step_begin,
            step_end=situation.step_now,
            job=str(launcher.get("job", "")),
            restarts=_restarts(run.attempt(attempt)),
            started=_float(launcher.get("started")),
            finished=time.time(),
        ),
    )
    _write_event(run, attempt, "end", verdict.reason)


def _restarts(folder: Path) -> int:
    """Count the records that were set aside, ROLE-NODE.TRY.json."""
    return sum(name.count(".") == 2 for name in os.listdir(folder / "exit"))


def _write_event(run: RunDir, attempt: int, phase: str, reason: str) -> None:
    events = EventWriter(run.path / "events", "launch", node="0")
    step = run.checkpoint_step()
    events.write(
        LaunchAttempt(
            attempt=attempt, phase=phase, reason=reason, step=step, start=now(), end=now()
        )
    )
    events.close()


def _int(value: object) -> int:
    return int(value) if isinstance(value, int | float) else 0


def _float(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


if __name__ == "__main__":
    sys.exit(guard(main))
