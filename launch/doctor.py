"""`agentrl doctor CONFIG [key=value …]`: can this login node, and the nodes, carry the run?

--nodes asks the nodes too, in a short job of their own as the run would have it; its answers come
by node. Exit code 1 where something would stop the run.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from agentrl import config as schema
from agentrl.caps import shortages, wanted
from agentrl.config import RunConfig
from agentrl.errors import AgentRLError, LaunchError
from launch import doctor_nodes
from launch.command import add_config, guard, parse, parser
from launch.doctor_node import NAMESPACES, said
from launch.findings import Finding, fail, looked, ok, show, skip, warn
from launch.plan import caps_of, verdict
from launch.run_dir import RunDir, settled

LEAST_SLURM = (20, 11)
"""The first whose steps take --overlap, which the proof of the network needs beside others."""
RUN_LEAST_GB = 20
PROGRAMS = ("sbatch", "srun", "squeue", "scancel", "scontrol")


def main(argv: Sequence[str]) -> int:
    """Print what was found; return 1 where something would stop the run."""
    arguments = parser("doctor", __doc__)
    arguments.add_argument("--json", action="store_true", help="print one JSON object")
    arguments.add_argument("--nodes", action="store_true", help="ask the nodes too, by a short job")
    arguments.add_argument("--wait-s", type=float, default=600.0, help="for that job; default 600")
    add_config(arguments)
    given = parse(arguments, argv)
    config = settled(schema.load(given.config, given.overrides))
    found = findings(config, wait_s=given.wait_s if given.nodes else 0.0)
    return show(found, as_json=given.json, host=socket.gethostname(), cluster=config.cluster.name)


def findings(config: RunConfig, *, wait_s: float) -> Iterator[Finding]:
    """Yield what was found on this machine and, if wait_s, on the nodes."""
    yield from looked("runs_dir", partial(runs_dir, config))
    if config.cluster.is_slurm:
        for name, look in (("slurm", slurm_version), ("features", features)):
            yield from looked(name, partial(_asked, name, look))
    else:
        yield skip("slurm", "cluster=local: no Slurm is used")
    digests: list[str] = []
    yield from looked("image", partial(image, config, digests))
    yield from looked("runtime", partial(runtime, config))
    yield from looked("caps", partial(smallest_cap, config))
    yield from (item for check in LOCAL for item in looked(check.__name__, check))
    if wait_s and config.cluster.is_slurm:
        ask = partial(doctor_nodes.findings, config, wait_s=wait_s, digest="".join(digests))
        yield from looked("nodes", ask)


# -- Slurm --------------------------------------------------------------------------------------


def _asked(name: str, look: Callable[[], Iterator[Finding]]) -> list[Finding]:
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        return [fail(name, f"not on PATH: {', '.join(missing)}", "is this a login node?")]
    return list(look())


def slurm_version() -> Iterator[Finding]:
    text = _said("sinfo", "--version")
    match = re.search(r"(\d+)\.(\d+)", text)
    found = (int(match[1]), int(match[2])) if match else (0, 0)
    if found < LEAST_SLURM:
        yield fail("slurm", text, "needs 20.11 or newer, for srun --overlap")
    else:
        yield ok("slurm", text)


def features() -> Iterator[Finding]:
    """Read slurmctld's own configuration."""
    config = parse_config(_said("scontrol", "show", "config"))
    yield from judged(config)


def parse_config(text: str) -> dict[str, str]:
    """Return `scontrol show config` as names in lower case and their values."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {name.strip().lower(): value.strip() for name, value in pairs}


def judged(config: dict[str, str]) -> Iterator[Finding]:
    """Say what slurmctld's configuration means for a run."""
    if config.get("jobrequeue", "1") == "0":
        yield ok("requeue", "JobRequeue=0: off unless asked, and runs ask (--requeue)")
    else:
        yield ok("requeue", "allowed by slurmctld (a partition or a site filter may still refuse)")
    storage = config.get("accountingstoragetype", "")
    if "slurmdbd" in storage:
        yield ok("accounting", storage)
    else:
        yield ok("accounting", "none: states come from squeue and the run's own files")
    select = config.get("selecttype", "")
    if "linear" in select:
        yield warn("select", select, "whole nodes only: an inference node cannot be shared")
    else:
        yield ok("select", select or "unknown")
    if "backfill" not in config.get("schedulertype", ""):
        yield fail(
            "scheduler",
            config.get("schedulertype", "unknown"),
            "only sched/backfill starts heterogeneous jobs: cluster.layout=homogeneous",
        )
    else:
        yield ok("scheduler", "sched/backfill starts heterogeneous jobs")
    track = config.get("proctracktype", "")
    advice = "processes that leave their session outlive a step; ours are found by a mark"
    yield ok("processes", track) if "cgroup" in track else warn("processes", track, advice)
    kill_s = int((re.findall(r"\d+", config.get("killwait", "30")) or ["30"])[0])
    yield ok("killwait", f"{kill_s} s from TERM to KILL at the limit, or at a preemption")


# -- this machine -------------------------------------------------------------------------------


def runs_dir(config: RunConfig) -> Iterator[Finding]:
    """Write, rename and list a file where runs will be, and look at the space there."""
    folder = Path(config.runs_dir)
    folder.mkdir(parents=True, exist_ok=True)
    draft, name = folder / f".doctor-{uuid.uuid4().hex}", f".doctor-{uuid.uuid4().hex}"
    began = time.monotonic()
    try:
        draft.write_text("x")
        skew_s = draft.stat().st_mtime - time.time()
        draft.rename(folder / name)
        is_listed = name in os.listdir(folder)
    finally:
        draft.unlink(missing_ok=True)
        (folder / name).unlink(missing_ok=True)
    took_ms = 1000 * (time.monotonic() - began)
    if not is_listed:
        yield fail("runs_dir", f"{folder}: a renamed file is not listed", "use another file system")
    free = shutil.disk_usage(folder).free / 2**30
    text = f"{folder}: renamed and listed in {took_ms:.0f} ms, {free:.0f} GiB free"
    yield ok("runs_dir", text) if free > RUN_LEAST_GB else warn("runs_dir", text, "make room")
    if abs(skew_s) > 5:
        text = f"the file server's clock is {skew_s:+.0f} s from this one"
        yield warn("clock", text, "leases tolerate seconds, not minutes: synchronise them")
    else:
        yield ok("clock", f"{skew_s:+.1f} s between the file server and here")


def image(config: RunConfig, digests: list[str]) -> Iterator[Finding]:
    """Read, hash and try the run's image; its digest is added to `digests`."""
    from launch import image_run

    if not config.image:
        yield skip("image", "none: roles run in this Python, which every node must see")
        return
    if not config.cluster.is_slurm:
        yield fail("image", config.image, "cluster=local runs in no image")
        return
    try:
        found = image_run.checked(config, RunDir(config.run_dir))
    except AgentRLError as error:
        yield fail("image", str(error), "see docs/containers.md")
        return
    if found:
        digests.append(found.digest)
        told = "its roles' imports work" if found.is_proved else "not tried: no runtime here"
        text = f"{found.size / 2**20:.0f} MiB, {found.digest[:19]}…, {told}"
        yield ok("image", text) if found.is_proved else warn("image", text, "--nodes tries it")


def runtime(config: RunConfig) -> Iterator[Finding]:
    """Look at what an ordinary user needs to run and to build images."""
    program = shutil.which(config.cluster.runtime)
    if program is None:
        text = f"no {config.cluster.runtime} on PATH"
        state = fail if config.image else warn
        yield state("runtime", text, "needed on the nodes for image=…; a module may bring it")
    else:
        yield ok("runtime", _said(program, "--version"))
    if said(NAMESPACES)[0] == 0:
        yield ok("user namespaces", "work")
    else:
        advice = "sandboxes and unprivileged Apptainer need them: user.max_user_namespaces"
        yield warn("user namespaces", "refused here", advice)
    name = _own_name()
    ranges = [path for path in ("/etc/subuid", "/etc/subgid") if _has_range(path, name)]
    if os.geteuid() == 0 or len(ranges) == 2:
        yield ok("subuid", "root builds without" if os.geteuid() == 0 else f"a range for {name}")
    else:
        advice = "images are built where you have one; to run one none is needed"
        yield warn("subuid", f"no range for {name} in /etc/subuid and /etc/subgid", advice)


def cgroup() -> Finding:
    kind = "v2" if Path("/sys/fs/cgroup/cgroup.controllers").is_file() else "v1"
    return ok("cgroup", f"version {kind}")


def ports() -> Finding:
    """Tell which ports the kernel gives away by itself; engines stay out of them."""
    text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    low, high = int(text[0]), int(text[1])
    if low <= 20000 <= high:
        advice = "engines take ports from 20000: they move below the range"
        return warn("ports", f"ephemeral {low}–{high}", advice)
    return ok("ports", f"ephemeral {low}–{high}")


def smallest_cap(config: RunConfig) -> Iterator[Finding]:
    """Say what bounds trajectories at once; `agentrl plan` has all caps."""
    caps, number = caps_of(config, is_here=not config.cluster.is_slurm), wanted(config)
    if short := shortages(caps, number):
        least = short[0]
        advice = f"{least.fix}, or lower rollout.concurrency"
        yield fail("caps", f"{least.name} allow {least.at_once} of {number} trajectories", advice)
    else:
        yield ok("caps", verdict(caps, number))


LOCAL = (cgroup, ports)


def _said(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise LaunchError(f"{' '.join(words)} exited {done.returncode}: {done.stderr.strip()}")
    return done.stdout.strip()


def _own_name() -> str:
    """Return the user's name as the system has it: $USER may be of the shell that `su` left."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _has_range(path: str, name: str) -> bool:
    if not Path(path).is_file():
        return False
    owners = {line.split(":")[0] for line in Path(path).read_text().splitlines()}
    return bool({name, str(os.getuid())} & owners)


if __name__ == "__main__":
    sys.exit(guard(main))
