"""What a run's batch script asks Python: `python -m launch.host begin|verdict RUN …`.

The script (slurm/templates/run.sh.j2) starts the steps and acts; what is decided is decided here
and in slurm.verdict, from the files of the run. Every answer is one line on standard output.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from agentrl.errors import LaunchError, QueryError, SubmitError
from agentrl.handoff.publish import publish_json
from launch import network, submission
from launch.attempt import ENDING, Attempt
from launch.command import guard, parser
from launch.fence import successor
from launch.jobs import living, states_of
from launch.run_dir import RunDir, launcher_of, settle_lost
from slurm import exit_record, ledger, sbatch
from slurm.exit_record import DONE, ExitRecord
from slurm.files import listed
from slurm.ledger import LedgerLine, attempts_without_progress
from slurm.verdict import Asked, Verdict

OVER = "over"
"""Answer of `begin` when there is nothing left to do, as for the rest of a chain."""
NETWORK = "network"
"""The proof of the network, as a role: it ends before the others start."""
ASKED: dict[str, Asked] = {"limit": "limit", "term": "limit", "person": "person"}
"""What the batch script knows of why the end was asked for."""
ROLES = ("trainer", "inference")
NETWORK_ERROR_BYTES = 2000
RECORD_WAIT_S = 5.0
"""How long another node's exit record may take to show on this one."""
log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    arguments = parser("host", __doc__)
    verbs = arguments.add_subparsers(dest="verb", required=True)
    to_begin = verbs.add_parser("begin", help="lay the launch attempt; prints its number, or over")
    to_begin.add_argument("run")
    to_begin.add_argument("submission", type=int)
    to_begin.add_argument("began", help="why the submission was made: started or resumed")
    for role in ROLES:
        to_begin.add_argument(f"--{role}", nargs="+", required=True, help="its nodes, in order")
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
        hosts = {role: getattr(given, role) for role in ROLES}
        return begin(run, given.submission, given.began, Job.of(os.environ, hosts))
    attempt = Attempt.of(run, given.attempt)
    ended = _ended(attempt, given.role, given.node, given.code)
    print(decided(attempt, ended, asked=given.asked), flush=True)
    return DONE


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The Slurm job that this batch script is, and which of its lives."""

    id: str
    restart: int
    hosts: dict[str, list[str]]
    """Slurm's names of each role's nodes, by the role's own numbers."""

    @classmethod
    def of(cls, environ: Mapping[str, str], hosts: dict[str, list[str]]) -> Job:
        """Read it from the batch script's environment. Raises LaunchError outside a job."""
        if "SLURM_JOB_ID" not in environ:
            raise LaunchError("no SLURM_JOB_ID: only a batch script of Slurm begins an attempt")
        restart = int(environ.get("SLURM_RESTART_COUNT", "0"))  # unset in the first life
        return cls(id=environ["SLURM_JOB_ID"], restart=restart, hosts=hosts)


# -- the beginning ------------------------------------------------------------------------------


def begin(run: RunDir, submitted: int, began: str, job: Job) -> int:
    """Settle what an earlier life left, then lay this attempt's folder and print its number.

    Prints OVER where there is nothing to do. Raises LaunchError where another job runs this run.
    """
    settle_lost(run, own_job=job.id)
    earlier = [
        one for one in run.attempts() if launcher_of(run, one).get("submission") == submitted
    ]
    history = ledger.read(run.path)
    if reason := reason_to_end(run, history, earlier):
        sys.stderr.write(f"{reason}\n")
        print(OVER)
        return DONE
    lost = history[-1].ended if history else ""
    number = max(run.attempts(), default=0) + 1
    folder = run.attempt(number)
    (folder / "logs").mkdir(parents=True)
    (folder / "exit").mkdir()
    reason = lost if earlier else began
    publish_json(
        folder / "launcher.json",
        {
            "job": job.id,
            "restart": job.restart,
            "hosts": job.hosts,
            "submission": submitted,
            "began": reason,
            "is_by_person": not earlier,
            "step_begin": run.checkpoint_step(),
            "started": time.time(),
        },
    )
    script = submission.folder_of(run, submitted) / "script.sbatch"
    if listed(script):
        shutil.copyfile(script, folder / script.name)
    Attempt.of(run, number).tell_begin()
    print(f"{number:04d}")
    return DONE


def reason_to_end(run: RunDir, history: list[LedgerLine], earlier: list[int]) -> str:
    """Return why no attempt should begin, or nothing. `earlier`: attempts of this submission."""
    if listed(run.stop_file):
        return f"{run.name} was asked to stop"
    if not earlier:
        return ""
    config = run.config()
    if run.checkpoint_step() >= config.training.steps:
        return f"{run.name} is done at step {run.checkpoint_step()}"
    last = history[-1] if history else None
    if last and last.attempt in earlier and last.action in ("done", "stop"):
        return f"{run.name} has ended: {last.ended}"
    most = config.max_attempts_without_progress
    if (count := attempts_without_progress(history)) >= most:
        return (
            f"{run.name} stops: {count} launch attempts in a row made no new checkpoint "
            f"(max_attempts_without_progress={most}), the last one: {last.ended if last else ''}"
        )
    return ""


# -- the end of a step --------------------------------------------------------------------------


def decided(attempt: Attempt, ended: ExitRecord, *, asked: str) -> str:
    """Return the script's next action: wait, restart ROLE NODE, requeue, gone, done, stop CODE.

    `gone`: Slurm is ending the job already. `requeue` may be followed by the nodes that the next
    life is to stay away from. Where the attempt ends, its ledger line is written. The reason goes
    to standard error, and with it what the role's log says of the network against the plan.
    """
    network.compare(attempt.run, attempt.number, ended.role, ended.node)
    if later := successor(attempt.run, attempt.number):
        sys.stderr.write(f"gone: attempt {later} has begun; Slurm had given this job up\n")
        return "gone"
    verdict = attempt.verdict(ended, who_asked(attempt.run, asked))
    if verdict.action in ENDING:
        if asked == "term":
            verdict = after_term(verdict, states_now(attempt.job))
        attempt.close(verdict)
    sys.stderr.write(f"{verdict.action}: {verdict.reason}\n")
    if verdict.action == "requeue":
        return " ".join(["requeue", *exclusions(attempt.run)])
    return words_of(verdict, ended)


def exclusions(run: RunDir) -> list[str]:
    """Return Slurm's list of nodes that each component of the next life is kept from, if any.

    The waiting jobs of a chain are told at once: they are not this job, and never requeued. Where
    Slurm does not listen they may get such a node, and go on all the same.
    """
    from launch import cluster_run  # not on the way of every start, which `begin` is

    queued = submission.newest(run)
    config = run.config()
    found = cluster_run.exclusions(config, run, queued.number) if queued else []
    if found and queued and config.cluster.requeue == "chain":
        try:
            _tell_chain(queued.jobs, found)
        except (QueryError, SubmitError) as error:
            log.warning("the chain's next job may run on %s: %s", ", ".join(found), error)
    return found


def _tell_chain(jobs: Sequence[str], nodes: Sequence[str]) -> None:
    for job, state in living(jobs).items():
        if state == "PENDING":
            sbatch.exclude(job, nodes)


def who_asked(run: RunDir, asked: str) -> Asked:
    """Tell a person's wish, which ends the run, from the limit or Slurm's TERM, which do not."""
    if listed(run.stop_file):
        return "person"
    return ASKED[asked] if asked else ""


def states_now(job: str) -> list[str]:
    """Return the state of this very job, none where Slurm does not answer: its word then holds."""
    try:
        return list(states_of([job]).values())
    except QueryError as error:
        log.warning("job %s is left to Slurm, whose TERM came: %s", job, error)
        return []


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


def _ended(attempt: Attempt, role: str, node: int, code: int) -> ExitRecord:
    """Return the record of the role that ended, made up from srun's code where it left none."""
    deadline = time.monotonic() + record_wait_s(role, code)
    while exit_record.read(attempt.folder, role, node) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    found = attempt.recorded(role, node, code)
    return _network_refused(attempt, found) if role == NETWORK else found


def record_wait_s(role: str, code: int) -> float:
    """Return how long to look for the record of a step that ended with srun's `code`.

    Who was killed by SIGKILL cannot write. Who ended of its own will has written, on another node;
    so has who was told to by TERM, of which srun makes 143 whatever the role returned.
    """
    return 0.0 if role == NETWORK or code == 128 + signal.SIGKILL else RECORD_WAIT_S


def _network_refused(attempt: Attempt, found: ExitRecord) -> ExitRecord:
    path = attempt.folder / "logs" / "network.err"
    said = path.read_text(errors="replace")[-NETWORK_ERROR_BYTES:].strip() or f"see {path}"
    told = msgspec.structs.replace(
        found,
        cause="usage" if attempt.run.config().cluster.interface_pin else "launch",
        message=f"the network was not proved: {said}",
    )
    exit_record.write(attempt.folder, told)
    return told


if __name__ == "__main__":
    sys.exit(guard(main))
