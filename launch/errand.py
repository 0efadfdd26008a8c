"""A command's work in processes of its own, watched with a bar: traces, fine-tuning, evaluation.

The work ends with the command, however that ends. Ctrl-C asks it to save; a second one kills it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from agentrl.errors import AgentRLError, Interrupted, LaunchError
from agentrl.events import EventWriter
from launch.progress import Bar
from launch.signals import StopFlag
from slurm.exit_record import DONE, FAILED, SAVED, classify
from slurm.local import HetLocalExecutor, HetLocalJob

POLL_S = 0.2
Answer = dict[str, str | int]
"""`code` and `message` of one process."""


def errand(
    events: Path, role: str, node: int, body: Callable[[StopFlag, EventWriter], int]
) -> Answer:
    """Run `body` in this process with its events and stop flag.

    Our own errors become an answer, since their message says all; others rise with a traceback.
    """
    writer = EventWriter(events, role, node=str(node))
    stop = StopFlag(events=writer).install()
    try:
        return {"code": body(stop, writer), "message": ""}
    except Interrupted as reason:
        return {"code": SAVED, "message": str(reason)}
    except AgentRLError as error:
        return {"code": classify(error)[0], "message": str(error)}
    finally:
        writer.close()


def submit(
    folder: Path, roles: dict[str, Callable[..., Answer]], *, nodes: dict[str, int], grace_s: float
) -> HetLocalJob:
    """Start the work; its logs are in folder/logs."""
    executor = HetLocalExecutor(folder / "job", logs=folder / "logs")
    executor.update_parameters(nodes=nodes, grace_s=grace_s)
    return executor.submit(roles)


def watch(
    job: HetLocalJob, stop: StopFlag, bar: Bar, update: Callable[[Bar], None], *, grace_s: float
) -> int:
    """Call `update` until the job's end, hand on a request to stop; return the command's code.

    Raises LaunchError with the traceback of a process that failed for a reason not our own.
    """
    asked_at = 0.0
    try:
        with bar:
            while not job.done() and not _has_failed(job):
                update(bar)
                if stop() and not asked_at:
                    asked_at = time.monotonic()
                    stop.count = 1
                    bar.say(f"asked to stop ({stop.cause}); saving. Ctrl-C again kills")
                    for role in job.roles:
                        job.signal(role)
                if asked_at and (stop.count > 1 or time.monotonic() - asked_at > grace_s):
                    break
                time.sleep(POLL_S)
            update(bar)
    finally:
        job.cancel()
    return _code(job, is_asked=bool(asked_at))


def _has_failed(job: HetLocalJob) -> bool:
    """Whether one process failed: it ends the others."""
    return any(
        job.answer(*task).get("code", code) not in (DONE, SAVED)
        for task, code in job.ended().items()
    )


def _code(job: HetLocalJob, *, is_asked: bool) -> int:
    answers = [job.answer(*task) for task in job.tasks]
    for answer in answers:
        if answer.get("code") not in (None, DONE, SAVED):
            sys.stderr.write(f"agentrl: {answer['message']}\n")
            return int(answer["code"])
    if is_asked or any(answer.get("code") == SAVED for answer in answers):
        return SAVED
    for error in job.exceptions().values():
        raise LaunchError(str(error))
    return DONE if all(answer.get("code") == DONE for answer in answers) else FAILED
