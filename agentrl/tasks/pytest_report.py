"""Results from inside pytest, not from its log: a plugin for one grading, sent into the sandbox.

`-p` loads it before any file of the repository. It reads a nonce, removes the file that held it,
and appends each result to a report, a line that carries the nonce; other lines do not count. So
what the code under test prints is never taken for a result, and a run that breaks off leaves its
tests without one, which is failed.

What a determined attacker can still do: code under test shares the interpreter with pytest. It can
search its memory for the nonce, or replace pytest's own functions.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from agentrl.sandbox.base import Sandbox
from agentrl.tasks.frameworks import names_of
from agentrl.tasks.restore import TMP, put

NAME = "agentrl_report"
MAX_BYTES = 16 << 20
PLUGIN = r"""
import os


def _open():
    folder = os.path.dirname(os.path.abspath(__file__))
    try:
        with open(os.path.join(folder, "nonce")) as file:
            nonce = file.read()
        os.unlink(os.path.join(folder, "nonce"))
        kind = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        report = os.open(os.path.join(folder, "report"), kind, 0o600)
    except OSError:  # another pytest inside of this one: a worker of xdist, a test of a plugin
        return lambda *words: None
    write = os.write

    def tell(*words):
        line = " ".join((nonce,) + words).replace("\n", "\\n")
        write(report, (line + "\n").encode("utf-8", "replace"))

    return tell


_tell = _open()
_tell("started")


def _result(report):
    expected = hasattr(report, "wasxfail")
    if report.outcome == "failed":
        return "FAILED" if report.when == "call" else "ERROR"
    if report.outcome == "skipped":
        return "XFAIL" if expected else "SKIPPED"
    if report.outcome == "passed" and report.when == "call":
        return "XPASS" if expected else "PASSED"
    return ""


def pytest_runtest_logreport(report):
    result = _result(report)
    if result:
        _tell(result, report.nodeid)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One grading's plugin, in a folder that nobody could know before."""

    folder: str
    """Below the sandbox's /tmp."""
    nonce: str

    def command(self, command: str) -> str:
        """Return `command` with the plugin loaded, also where it sets a Python path of its own."""
        path = f"{TMP}/{self.folder}"
        own = command.replace("PYTHONPATH=", f"PYTHONPATH={path}:")
        return f"export PYTHONPATH={path} PYTEST_ADDOPTS='-p {NAME}'; {own}"

    async def install(self, sandbox: Sandbox) -> str:
        """Put the plugin in place; return why the sandbox refused it, else ''."""
        return await put(sandbox, f"/tmp/{self.folder}/{NAME}.py", PLUGIN.encode()) or await put(
            sandbox, f"/tmp/{self.folder}/nonce", self.nonce.encode()
        )

    async def read(self, sandbox: Sandbox) -> tuple[bool, list[tuple[str, str]]]:
        """Return whether pytest started, and (name, result) pairs; a test has several names."""
        try:
            data = await sandbox.get(f"/tmp/{self.folder}/report", max_bytes=MAX_BYTES)
        except FileNotFoundError:
            return False, []
        lines = [
            line.removeprefix(f"{self.nonce} ")
            for line in data.decode(errors="replace").splitlines()
            if line.startswith(f"{self.nonce} ")
        ]
        return lines[:1] == ["started"], list(_pairs(lines[1:]))


def new_report() -> Report:
    return Report(folder=f"grade-{secrets.token_hex(8)}", nonce=secrets.token_hex(16))


def _pairs(lines: list[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        result, _, node_id = line.partition(" ")
        yield from ((name, result) for name in names_of(node_id))
