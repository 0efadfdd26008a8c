"""Grading by a program that writes a reward, as Harbor's tasks have it.

Its tests are put in place after the agent's end, below /tmp, as a sandbox's root is closed to
writing. The paths /tests, /logs/verifier and the task's work folder are rewritten in the texts that
name them; a path that is put together at run time is not found then.

What a determined attacker can still do: code under test may leave a process that writes a reward
over the tests' own, just before all of them are ended.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from pathlib import Path

from agentrl.errors import GradingError, SandboxLost
from agentrl.sandbox.base import TESTBED, ExecResult, Sandbox
from agentrl.tasks.paths import within
from agentrl.tasks.restore import put
from agentrl.tasks.task import Task, Verdict, Verifier

SOLVED = 1.0
"""A reward of at least that is a solved task."""
_LOG_BYTES = 200_000
_BY_SIGNAL = 128
"""A shell's exit code beyond which a signal ended it: the code under test may have sent that."""


async def run_verifier(
    task: Task, verifier: Verifier, sandbox: Sandbox, *, timeout_s: float
) -> Verdict:
    """Run `test.sh` and read the reward that it wrote.

    No reward after its time ran out, or after a signal, is the policy's doing: not resolved. No
    reward otherwise, or one that is no number, is the verifier's. Raises GradingError, SandboxLost.
    """
    places = _Places.new(verifier.workdir)
    if refused := await places.copy(sandbox, Path(verifier.folder), places.tests):
        return _verdict(task, 0.0, refused)
    done = await sandbox.exec(
        f"mkdir -p {places.logs} && bash {places.tests}/test.sh",
        timeout_s=min(timeout_s, verifier.timeout_s),
        max_bytes=_LOG_BYTES,
        env=dict(verifier.env),
    )
    await sandbox.stop_processes()
    if done.exit_code in (126, 127):
        raise GradingError(
            f"task {task.instance_id}: its test.sh did not start (exit {done.exit_code}): "
            f"{done.output[-300:].strip()!r}"
        )
    return _verdict(task, await _reward(task, sandbox, places, done), done.output)


async def run_solution(task: Task, sandbox: Sandbox, *, timeout_s: float) -> ExecResult:
    """Run the task's `solve.sh` in the sandbox. Raises GradingError when it cannot be put there."""
    places = _Places.new(task.verifier.workdir if task.verifier else TESTBED)
    if refused := await places.copy(sandbox, Path(task.solution), places.solution):
        raise GradingError(f"task {task.instance_id}: {refused}")
    return await sandbox.exec(
        f"bash {places.solution}/solve.sh",
        timeout_s=timeout_s,
        max_bytes=_LOG_BYTES,
    )


class _Places:
    """Where Harbor's fixed paths are in one grading: a folder that nobody could know before."""

    def __init__(self, folder: str, workdir: str) -> None:
        self.tests, self.logs = f"{folder}/tests", f"{folder}/logs/verifier"
        self.solution = f"{folder}/solution"
        self.moved = {
            "/logs/verifier": self.logs,
            "/tests": self.tests,
            "/solution": self.solution,
            workdir: TESTBED,
        }

    @classmethod
    def new(cls, workdir: str) -> _Places:
        return cls(f"/tmp/grade-{secrets.token_hex(8)}", workdir)

    async def copy(self, sandbox: Sandbox, source: Path, target: str) -> str:
        """Put a folder's files into the sandbox; return why it refused one, else ''."""
        for path in sorted(path for path in source.rglob("*") if path.is_file()):
            data = self.rewritten(within(source, path).read_bytes())
            if refused := await put(sandbox, f"{target}/{path.relative_to(source)}", data):
                return refused
        return ""

    def rewritten(self, data: bytes) -> bytes:
        """Return a text with the fixed paths replaced; what is no UTF-8 stays as it is."""
        try:
            return rewrite(data.decode(), self.moved).encode()
        except UnicodeDecodeError:
            return data


def rewrite(text: str, moved: dict[str, str]) -> str:
    """Replace whole absolute paths: `/app` in `cd /app/x`, and neither in `/apps` nor `a/app`."""
    names = "|".join(map(re.escape, sorted(moved, key=len, reverse=True)))
    return re.sub(rf"(?<![\w.\-/])({names})(?![\w\-])", lambda found: moved[found[1]], text)


async def _reward(task: Task, sandbox: Sandbox, places: _Places, done: ExecResult) -> float:
    if done.timed_out:  # what it wrote before is no verdict, and a hang is the policy's doing
        return 0.0
    for name, read in (("reward.json", _of_json), ("reward.txt", float)):
        try:
            text = (await sandbox.get(f"{places.logs}/{name}")).decode(errors="replace")
        except SandboxLost:
            raise
        except OSError:
            continue
        try:
            reward = read(text)
        except (ValueError, TypeError) as error:
            raise GradingError(
                f"task {task.instance_id}: its {name} holds {text[:80]!r}: {error}"
            ) from error
        if not math.isfinite(reward):
            raise GradingError(f"task {task.instance_id}: its {name} holds {reward}")
        return reward
    if done.oom or done.exit_code > _BY_SIGNAL:
        return 0.0
    raise GradingError(
        f"task {task.instance_id}: its test.sh wrote no reward (exit {done.exit_code}): "
        f"{done.output[-300:].strip()!r}"
    )


def _of_json(text: str) -> float:
    """Return the number named `reward`, or the only one. Raises ValueError."""
    found = json.loads(text)
    if isinstance(found, dict):
        if "reward" not in found and len(found) != 1:
            raise ValueError(f"no `reward` among {', '.join(found) or 'no names'}")
        found = found.get("reward", next(iter(found.values())))
    return float(found)


def _verdict(task: Task, reward: float, log: str) -> Verdict:
    name = (task.instance_id,)
    is_solved = reward >= SOLVED
    return Verdict(
        resolved=is_solved,
        passed=name if is_solved else (),
        failed=() if is_solved else name,
        log=log,
    )
