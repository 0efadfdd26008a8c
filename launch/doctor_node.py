"""One node's part of `agentrl doctor --nodes`: `python -m launch.doctor_node FOLDER`, by srun.

It publishes what it is as FOLDER/RANK.json, waits until the login node says by RANK.seen that it
has seen that, and publishes as RANK.echo how long it took: the file system, there and back.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import msgspec

from agentrl.handoff.publish import publish_bytes
from containers import sif

REQUEST = "request.json"
ECHO_LIMIT_S = 30.0
COMMAND_LIMIT_S = 600.0
POLL_S = 0.05
NAMESPACES = ("unshare", "--user", "--map-root-user", "--mount", "true")
"""What Apptainer without setuid and bubblewrap ask of the kernel; --user alone may be granted
where a security module keeps the rest."""


class Request(msgspec.Struct, kw_only=True, frozen=True):
    """What the nodes look at."""

    image: str
    runtime: str
    scratch: str
    enter: str = ""
    """Text of bash by which a role's step enters the image."""
    imports: str = ""
    """Python's statement that imports what the roles import."""


class Node(msgspec.Struct, kw_only=True, frozen=True):
    """What one node is."""

    name: str
    written: float
    """Its clock, just before its file was published."""
    image_bytes: int = 0
    digest: str = ""
    digest_s: float = 0.0
    runtime: str = ""
    """Its answer to --version; empty where there is none."""
    refusal: str = ""
    """Why the image cannot be entered, or no role can start in it; empty where all is well."""
    enter_s: float = 0.0
    import_s: float = 0.0
    has_user_namespaces: bool = True
    cgroup: str = ""
    scratch: str = ""
    scratch_free_gb: float = 0.0
    """−1 where it cannot be written."""
    open_files: int = 0


def look(request: Request) -> Node:
    """Return what this node is."""
    runtime = shutil.which(request.runtime)
    image = Path(request.image)
    has_image = bool(request.image) and image.is_file()
    began = time.monotonic()
    digest = sif.digest(image) if has_image else ""
    digest_s = time.monotonic() - began
    refusal, enter_s, import_s = entered(request) if request.image else ("", 0.0, 0.0)
    scratch = expanded(request.scratch)
    return Node(
        name=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        image_bytes=image.stat().st_size if has_image else 0,
        digest=digest,
        digest_s=digest_s,
        runtime=said([runtime, "--version"])[1] if runtime else "",
        refusal=refusal,
        enter_s=enter_s,
        import_s=import_s,
        has_user_namespaces=said(NAMESPACES)[0] == 0,
        cgroup="v2" if Path("/sys/fs/cgroup/cgroup.controllers").is_file() else "v1",
        scratch=scratch,
        scratch_free_gb=free_gb(scratch),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        written=time.time(),
    )


def entered(request: Request) -> tuple[str, float, float]:
    """Enter the image as a role's step does; return why not, and seconds of entering, importing.

    Entering is timed the second time, when the node has the image's head in its memory.
    """
    seconds = []
    for command in (["true"], ["true"], ["python3", "-c", request.imports]):
        began = time.monotonic()
        code, words = said(["bash", "-c", request.enter, "role", *command])
        seconds.append(time.monotonic() - began)
        if code:
            return f"exit code {code}: {words or 'no word'}", 0.0, 0.0
    return "", seconds[1], seconds[2] - seconds[1]


def said(words: Sequence[str]) -> tuple[int, str]:
    """Return a program's exit code and the end of what it said; 127 or 124 where there is none."""
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=COMMAND_LIMIT_S,
        )
    except FileNotFoundError:
        return 127, f"no {words[0]} on this node's PATH"
    except subprocess.TimeoutExpired:
        return 124, f"{words[0]}: no answer in {COMMAND_LIMIT_S:g} s"
    return done.returncode, (done.stderr.strip() or done.stdout.strip())[-400:]


def expanded(text: str) -> str:
    """Expand $NAME as the batch script's bash does, to which $UID is no variable of ours."""
    return os.path.expandvars(text.replace("$UID", str(os.getuid())))


def free_gb(folder: str) -> float:
    """Return the free space, −1 where it cannot be written."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = Path(folder) / f".doctor-{uuid.uuid4().hex}"
        draft.write_text("x")
        draft.unlink()
    except OSError:
        return -1.0
    return shutil.disk_usage(folder).free / 2**30


def echo_s(folder: Path, name: str) -> float:
    """Wait until `name` is listed in the folder; return the seconds, −1 if it does not come."""
    began = time.monotonic()
    while name not in os.listdir(folder):
        if time.monotonic() - began > ECHO_LIMIT_S:
            return -1.0
        time.sleep(POLL_S)
    return time.monotonic() - began


def main(argv: Sequence[str]) -> int:
    """Look at this node, publish it, and wait for the echo."""
    folder, rank = Path(argv[0]), os.environ.get("SLURM_PROCID", "0")
    request = msgspec.json.decode((folder / REQUEST).read_bytes(), type=Request)
    publish_bytes(folder / f"{rank}.json", msgspec.json.encode(look(request)))
    took_s = echo_s(folder, f"{rank}.seen")
    publish_bytes(folder / f"{rank}.echo", msgspec.json.encode(took_s))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
