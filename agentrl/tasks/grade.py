"""The verdict on what an agent left behind, by the task's own tests, in the agent's own sandbox."""

from __future__ import annotations

import re
import secrets
import shlex
from pathlib import Path

from agentrl.errors import GradingError, SandboxLost
from agentrl.sandbox.base import TESTBED, ExecResult, Sandbox
from agentrl.tasks import runner
from agentrl.tasks.task import Task, Verdict

CHECK_COMMAND = "python check.py"
_LOG_BYTES = 200_000
_PICK_PYTHON = "python=python3; command -v python3 >/dev/null || python=python"
"""Without a fork: some images have only one of the two names."""
_LINE = re.compile(r"^(\S+::.*?|\S+) (PASSED|FAILED|ERROR)(?:\s+\[ *\d+%\])?\s*$", re.MULTILINE)


async def grade(task: Task, sandbox: Sandbox, *, image: Path, timeout_s: float) -> Verdict:
    """Run the tests of `task` on the sandbox's repository, after restoring the test files.

    image: the task's untouched folder. A test that is not reported has failed; so have all when
    the tests run out of time or cannot be put in place (a full disk, a folder closed to writing),
    which is the policy's doing. Raises GradingError when they could not
    start, SandboxLost.
    """
    await sandbox.stop_processes()
    run = _run_own if task.test_command == CHECK_COMMAND else _run_foreign
    results, log = await run(task, sandbox, image, timeout_s)
    wanted = (*task.fail_to_pass, *task.pass_to_pass)
    passed = tuple(name for name in wanted if results.get(name) == "PASSED")
    failed = tuple(name for name in wanted if results.get(name) != "PASSED")
    return Verdict(resolved=bool(wanted) and not failed, passed=passed, failed=failed, log=log)


async def _run_own(
    task: Task, sandbox: Sandbox, image: Path, timeout_s: float
) -> tuple[dict[str, str], str]:
    """Run our runner: see its docstring for what it defends against."""
    files = {name: _untouched(image, name).decode() for name in task.test_files}
    tests = list(dict.fromkeys(n.partition("::")[0] for n in task.fail_to_pass + task.pass_to_pass))
    missing = [name for name in tests if name not in files]
    if missing:
        raise GradingError(f"task {task.instance_id}: test file {missing[0]} is not in test_files")
    nonce = secrets.token_hex(16)
    path = f"/tmp/grade-{secrets.token_hex(8)}/run.py"
    if refused := await _put(sandbox, path, runner.render(files, tests, nonce).encode()):
        return {}, refused
    done = await sandbox.exec(
        f"{_PICK_PYTHON}; exec $python -I -S -B -X pycache_prefix=/tmp/none {path}",
        timeout_s=timeout_s,
        max_bytes=_LOG_BYTES,
    )
    lines = [line.removeprefix(f"{nonce} ") for line in done.output.splitlines() if nonce in line]
    log = done.output.replace(nonce, "")
    if lines[:1] != ["started"]:
        _refuse_unstarted(task, done)
    if lines[-1:] != ["finished"]:
        return {}, f"{log}\nthe tests did not finish (exit {done.exit_code})"
    return dict(line.rsplit(" ", 1) for line in lines[1:-1]), log


async def _run_foreign(
    task: Task, sandbox: Sandbox, image: Path, timeout_s: float
) -> tuple[dict[str, str], str]:
    """Run the row's own command. Its output is believed, as SWE-smith's harness does."""
    for name in task.test_files:
        await sandbox.exec(f"rm -rf -- {shlex.quote(name)}", timeout_s=timeout_s)
        if refused := await _put(sandbox, name, _untouched(image, name)):
            return {}, refused
    done = await sandbox.exec(
        f"cd {TESTBED} && {task.test_command}", timeout_s=timeout_s, max_bytes=_LOG_BYTES
    )
    if done.exit_code in (126, 127):
        _refuse_unstarted(task, done)
    return ({} if done.timed_out else parse_log(done.output)), done.output


async def _put(sandbox: Sandbox, path: str, data: bytes) -> str:
    """Write a file; return why the sandbox's own file system refused it, else ''."""
    try:
        await sandbox.put(path, data)
    except SandboxLost:
        raise
    except OSError as error:
        return f"cannot put the tests in place: {error}"
    return ""


def parse_log(log: str) -> dict[str, str]:
    """Read `ID PASSED|FAILED|ERROR` lines; of several on one test the worst counts."""
    found: dict[str, str] = {}
    for name, result in _LINE.findall(log):
        if found.get(name, "PASSED") == "PASSED":
            found[name] = result
    return found


def _untouched(image: Path, name: str) -> bytes:
    path = image / "testbed" / name
    try:
        return path.read_bytes()
    except OSError as error:
        raise GradingError(f"test file {path}: {error.strerror}; is the image whole?") from error


def _refuse_unstarted(task: Task, done: ExecResult) -> None:
    if done.timed_out:
        raise GradingError(f"task {task.instance_id}: the tests did not start in time")
    raise GradingError(
        f"task {task.instance_id}: the tests did not start (exit {done.exit_code}): "
        f"{done.output[-300:].strip()!r}; is there a python in the sandbox?"
    )
