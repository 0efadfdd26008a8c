"""Files made from a registry's images (SIFs, names of templates): one pull for all nodes.

The folder is shared. Who makes a file holds a claim beside it, made by O_EXCL and touched as long
as the work lasts; others wait for the file. A claim that is no longer touched is taken over. Ages
are told by the folder's own clock, for those of nodes differ.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import re
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from agentrl.errors import SandboxStartError
from agentrl.handoff.publish import fsync_folder
from agentrl.sandbox.backoff import random_wait_s

log = logging.getLogger(__name__)
TOUCH_S = 5.0
ABANDONED_S = 60.0
LOOK_S = 0.5
REGISTRY = "docker://"
SIF = ".sif"
REFUSALS = ("toomanyrequests", "429", "rate limit")
"""What registries say to those who should come back later."""


def shared_folder(images: str, reference: str) -> Path:
    """Return the folder that sandbox.images names. Raises SandboxStartError where it names none."""
    if not images:
        raise SandboxStartError(
            f"environment {reference}: sandbox.images is empty; name a folder that the nodes "
            "share, where what is made of it is kept"
        )
    return Path(images)


def made_path(folder: Path, reference: str, ending: str = SIF) -> Path:
    """Return where what `docker://…` gives lies; different references give different names."""
    name = re.sub("[^A-Za-z0-9.-]", lambda m: f"_{ord(m[0]):x}", reference)
    return folder / f"{name}{ending}"


def ensure(
    reference: str,
    folder: Path,
    *,
    program: list[str],
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    ending: str = SIF,
) -> Path:
    """Return the file of `reference`, made now if it is not there. Blocking, for a thread.

    program: run, in `env`, with the file to make and the reference added. Raises SandboxStartError
    in its words, or when another node has not finished within `timeout_s`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made, deadline = made_path(folder, reference, ending), time.monotonic() + timeout_s
    attempt = 0
    while made.name not in os.listdir(folder):
        if time.monotonic() > deadline:
            raise SandboxStartError(
                f"{reference}: no {made} within {timeout_s:.0f} s; is a node stuck in making it?"
            )
        if not claim(made):
            time.sleep(LOOK_S)
            continue
        try:
            words = [*program, str(unfinished_path(made)), reference]
            refusal = make(made, words, deadline, env)
        finally:
            claim_path(made).unlink(missing_ok=True)
        if refusal:
            attempt += 1
            log.warning("%s: the registry refuses for now: %s", reference, refusal)
            time.sleep(random_wait_s(attempt))
    return made


def claim(made: Path) -> bool:
    """Take the claim on a file to make; False when a living one has it, or the file is there."""
    path = claim_path(made)
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        if is_abandoned(path):
            log.warning("%s is no longer touched: removed", path)
            mine = path.with_name(f"{path.name}-{uuid.uuid4().hex}")
            with contextlib.suppress(FileNotFoundError):
                path.rename(mine)  # of several who see this, one succeeds
                mine.unlink()
                for left in made.parent.glob(f".{glob.escape(made.name)}.*.tmp"):
                    left.unlink(missing_ok=True)  # gigabytes of one that was killed
        return False
    if made.name in os.listdir(made.parent):  # made between the look and the claim
        path.unlink()
        return False
    return True


def claim_path(made: Path) -> Path:
    return made.with_name(f".{made.name}.claim")


def is_abandoned(path: Path) -> bool:
    clock = path.with_name(f".clock-{uuid.uuid4().hex}")
    try:
        clock.touch()
        return clock.stat().st_mtime - path.stat().st_mtime > ABANDONED_S
    except FileNotFoundError:
        return False
    finally:
        clock.unlink(missing_ok=True)


def unfinished_path(made: Path) -> Path:
    return made.with_name(f".{made.name}.{uuid.uuid4().hex}.tmp")


def make(made: Path, words: list[str], deadline: float, env: Mapping[str, str] | None) -> str:
    """Make the file whole, then give it its name; return the registry's refusal for now, or ''."""
    unfinished, reference = Path(words[-2]), words[-1]
    try:
        code, said = run(words, env, deadline, lambda: touch(claim_path(made)))
        if code:
            if any(word in said.lower() for word in REFUSALS):
                return said[-200:]
            raise SandboxStartError(f"{reference}: {words[0]} exited {code}: {said[-500:]}")
        with open(unfinished, "rb") as file:
            os.fsync(file.fileno())
        unfinished.rename(made)
        fsync_folder(made.parent)
    finally:
        unfinished.unlink(missing_ok=True)
    return ""


def touch(path: Path) -> None:
    """Renew a claim; one that was taken over meanwhile is no longer ours to renew."""
    with contextlib.suppress(FileNotFoundError):
        os.utime(path)


def run(
    words: list[str], env: Mapping[str, str] | None, deadline: float, renew: Callable[[], None]
) -> tuple[int, str]:
    """Run a program, calling `renew` while it runs; return its code and its last words."""
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(
        words, env=env, stdin=null, stdout=pipe, stderr=subprocess.STDOUT, text=True
    ) as process:
        while True:
            try:
                said, _ = process.communicate(timeout=TOUCH_S)
                return process.returncode, said.strip()
            except subprocess.TimeoutExpired:
                renew()
            if time.monotonic() > deadline:
                process.terminate()
