"""The verdict on what an agent left behind, by the task's own tests.

They run in a fresh sandbox that has the agent's changes of the repository and nothing else of it
(see tasks.answer). In the agent's own run only those of generated tasks, where the system is closed
to writing, and of verifiers that are to judge the machine as it was left.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from pathlib import Path

from agentrl.errors import GradingError
from agentrl.sandbox.base import ExecResult, Repeatable, Sandbox
from agentrl.tasks import runner
from agentrl.tasks.answer import NoAnswer, carry
from agentrl.tasks.frameworks import PASSES, REPORTED, doubt, results_of, worst
from agentrl.tasks.pytest_report import new_report
from agentrl.tasks.restore import plan, put, put_back, untouched
from agentrl.tasks.task import Task, Verdict
from agentrl.tasks.verifier import run_verifier

CHECK_COMMAND = "python check.py"
_LOG_BYTES = 200_000
_FOREIGN_LOG_BYTES = 8 << 20
"""Results are read from it, and a suite of ten thousand tests says a line on each."""
_PICK_PYTHON = "python=python3; command -v python3 >/dev/null || python=python"
"""Without a fork: some images have only one of the two names."""


async def grade(task: Task, sandbox: Sandbox, *, image: Path, timeout_s: float) -> Verdict:
    """Judge what an agent left in `sandbox`, which may be closed by that.

    image: the task's untouched folder. Raises GradingError, SandboxStartError, SandboxLost.
    """
    await sandbox.stop_processes()
    if not isinstance(sandbox, Repeatable) or is_judged_in_place(task, sandbox):
        return await judge(task, sandbox, image=image, timeout_s=timeout_s)
    try:
        fresh = await carry(task, sandbox, image)
    except NoAnswer as why:
        return _verdict(task, {}, str(why))
    try:
        return await judge(task, fresh, image=image, timeout_s=timeout_s)
    finally:
        await fresh.close()


def is_judged_in_place(task: Task, sandbox: Repeatable) -> bool:
    """Whether the agent's own sandbox is where the tests run."""
    if task.verifier is not None:
        return not task.verifier.is_fresh
    return task.test_command == CHECK_COMMAND and not sandbox.is_system_writable


async def judge(task: Task, sandbox: Sandbox, *, image: Path, timeout_s: float) -> Verdict:
    """Run the tests of `task` on the sandbox's repository, after restoring the test files.

    A test that is not reported has failed; so have all when the tests run out of time or cannot be
    put in place (a full disk, a folder closed to writing), which is the policy's doing. Raises
    GradingError when they could not start, SandboxLost.
    """
    if task.verifier is not None:
        return await run_verifier(task, task.verifier, sandbox, timeout_s=timeout_s)
    run = _run_own if task.test_command == CHECK_COMMAND else _run_foreign
    results, log = await run(task, sandbox, image, timeout_s)
    return _verdict(task, results, log)


def _verdict(task: Task, results: Mapping[str, str], log: str) -> Verdict:
    wanted = (*task.fail_to_pass, *task.pass_to_pass)
    passed = tuple(name for name in wanted if results.get(name) in PASSES)
    failed = tuple(name for name in wanted if results.get(name) not in PASSES)
    return Verdict(resolved=bool(wanted) and not failed, passed=passed, failed=failed, log=log)


async def _run_own(
    task: Task, sandbox: Sandbox, image: Path, timeout_s: float
) -> tuple[dict[str, str], str]:
    """Run our runner: see its docstring for what it defends against."""
    files = {name: untouched(image, name).decode() for name in task.test_files}
    tests = list(dict.fromkeys(n.partition("::")[0] for n in task.fail_to_pass + task.pass_to_pass))
    missing = [name for name in tests if name not in files]
    if missing:
        raise GradingError(f"task {task.instance_id}: test file {missing[0]} is not in test_files")
    nonce = secrets.token_hex(16)
    path = f"grade-{secrets.token_hex(8)}/run.py"
    if refused := await put(sandbox, f"/tmp/{path}", runner.render(files, tests, nonce).encode()):
        return {}, refused
    done = await sandbox.exec(
        f"{_PICK_PYTHON}; exec $python -I -S -B -X pycache_prefix=/tmp/none "
        f'"${{TMPDIR:-/tmp}}/{path}"',  # a sandbox on the bare host has a /tmp of its own there
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
    """Run the row's own command over restored files; see tasks.frameworks for what is believed."""
    restoration = await asyncio.to_thread(plan, task, image)
    report = new_report() if task.framework in REPORTED else None
    refused = await put_back(sandbox, restoration, task.hidden_files)
    if report and not refused:
        refused = await report.install(sandbox)
    if refused:
        return {}, refused
    done = await sandbox.exec(
        report.command(task.test_command) if report else task.test_command,
        timeout_s=timeout_s,
        max_bytes=_FOREIGN_LOG_BYTES,
    )
    if done.exit_code in (126, 127):
        _refuse_unstarted(task, done)
    log = done.output[-_LOG_BYTES:]
    if done.timed_out:
        return {}, f"{log}\nthe tests ran out of time"
    if report is None:
        why = doubt(task.framework, done.output, done.exit_code)
        results = {} if why else worst(results_of(task.framework, done.output))
        return results, f"{log}\n{why}".rstrip()
    has_started, pairs = await report.read(sandbox)
    if not has_started and done.oom:
        _refuse_unstarted(task, done)
    return worst(pairs), log if has_started else f"{log}\npytest did not start"


def _refuse_unstarted(task: Task, done: ExecResult) -> None:
    if done.timed_out:
        raise GradingError(f"task {task.instance_id}: the tests did not start in time")
    raise GradingError(
        f"task {task.instance_id}: the tests did not start (exit {done.exit_code}): "
        f"{done.output[-300:].strip()!r}; is there a python in the sandbox?"
    )
