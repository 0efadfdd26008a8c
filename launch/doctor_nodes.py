"""`agentrl doctor --nodes` on the login node: a short job of the run's own shape, and its answers.

The job asks for what the run's job would ask for and starts launch.doctor_node on every node. They
answer by files in runs_dir, whose way there and back is a finding by itself.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from agentrl.config import RunConfig
from agentrl.handoff.publish import publish_bytes
from containers.entering import enter_script
from containers.following import interruptible
from launch import cluster_run, image_run
from launch.doctor_node import REQUEST, Node, Request
from launch.findings import Finding, fail, ok, warn
from launch.jobs import states_of
from launch.run_dir import RunDir
from slurm import sbatch
from slurm.render import directives, render, srun_everywhere
from slurm.spec import JobSpec, literal
from slurm.states import ENDED

SEEN_S = 30.0
"""How long nodes' files may take to show here once their job has ended."""
SLOW_ECHO_S = 5.0
SKEW_S = 2.0
MINUTES = 10
GIB_PER_MINUTE = 6
"""At which a slow file system gives the image to be hashed: 100 MB/s."""
OPEN_LEAST = 4096
ASK_S = 3.0
LOG = "job.log"


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """One node's answer, as it came here."""

    node: Node
    at: float
    """This machine's clock when its file was listed here."""
    echo_s: float
    """From the node's file being published to our answer being listed there; −1: never."""


def findings(config: RunConfig, *, wait_s: float, digest: str = "") -> Iterator[Finding]:
    """Ask every node in one job; yield what they are and how they differ.

    digest: of the image as this machine sees it, where it is known.
    """
    folder = Path(config.runs_dir).absolute() / f".doctor-{uuid.uuid4().hex[:8]}"
    spec = job_of(config, folder)
    publish_bytes(folder / REQUEST, msgspec.json.encode(request_of(config, folder)))
    try:
        script = folder / "script.sbatch"
        publish_bytes(script, script_of(spec, folder).encode())
        seen, state = asked(script, spec.nodes, wait_s=wait_s)
        yield from answered(seen, spec.nodes, state, log_of(folder))
        yield from judged(seen, config, digest=digest)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def job_of(config: RunConfig, folder: Path) -> JobSpec:
    """Return the job: the run's own, but short, and with nothing to save or to go on with."""
    image = Path(config.image)
    gib = image.stat().st_size / 2**30 if config.image and image.is_file() else 0.0
    return dataclasses.replace(
        cluster_run.job_spec(config, RunDir(config.run_dir), 1),
        name="agentrl-doctor",
        time_min=MINUTES + math.ceil(gib / GIB_PER_MINUTE),
        signal="",
        requeue=False,
        output=literal(str(folder / LOG)),
    )


def request_of(config: RunConfig, folder: Path) -> Request:
    """Return what nodes are asked: to enter the image as a role does, but that no run is there."""
    cluster, enter = config.cluster, ""
    if made := image_run.container_of(config, RunDir(config.run_dir)):
        binds = [bind for bind in made.binds if bind != made.folder]
        made = dataclasses.replace(made, folder=str(folder), binds=(str(folder), *binds))
        enter = enter_script(made, cluster_run.MARK)
    return Request(
        image=config.image,
        runtime=cluster.runtime,
        scratch=cluster.scratch or "/tmp",
        enter=enter,
        imports=image_run.imports_of(config),
    )


def script_of(spec: JobSpec, folder: Path) -> str:
    """Return the batch script."""
    words = srun_everywhere(spec, [sys.executable, "-m", "launch.doctor_node", str(folder)])
    setup = render("setup.sh.j2", spec)
    lines = ["#!/bin/bash", directives(spec), setup, "export PYTHONSAFEPATH=1"]
    return "\n".join([*lines, f"exec {shlex.join(words)} </dev/null", ""])


def asked(script: Path, expected: int, *, wait_s: float) -> tuple[list[Seen], str]:
    """Run the job; return the answers, and Slurm's word for the job where some are missing.

    Whatever ends this ends the job too.
    """
    with interruptible():
        sbatch.test_only(script)
        job = sbatch.submit(script)
        try:
            seen = collect(script.parent, expected, lambda: _has_ended(job), wait_s=wait_s)
            state = "" if len(seen) == expected else states_of([job]).get(job, "gone")
        finally:
            sbatch.cancel(job)
    return seen, f"job {job} {state}" if state else ""


def collect(
    folder: Path,
    expected: int,
    has_ended: Callable[[], bool],
    *,
    wait_s: float,
    late_s: float = SEEN_S,
) -> list[Seen]:
    """Answer each node's file and gather its echo, until all have come, or none can come.

    late_s: how long files are waited for once the job has ended.
    """
    nodes: dict[str, tuple[Node, float]] = {}
    echoes: dict[str, float] = {}
    deadline, next_ask = time.monotonic() + wait_s, time.monotonic()
    while len(echoes) < expected and (now := time.monotonic()) < deadline:
        for name in sorted(os.listdir(folder)):
            rank, _, kind = name.partition(".")
            if rank.isdigit() and kind == "json" and rank not in nodes:
                node = msgspec.json.decode((folder / name).read_bytes(), type=Node)
                nodes[rank] = node, time.time()
                publish_bytes(folder / f"{rank}.seen", b"")
            elif rank.isdigit() and kind == "echo" and rank not in echoes:
                echoes[rank] = msgspec.json.decode((folder / name).read_bytes(), type=float)
        if now > next_ask:
            next_ask = now + ASK_S
            if deadline > now + late_s and has_ended():
                deadline = now + late_s
        time.sleep(0.05)
    return [
        Seen(node=node, at=at, echo_s=echoes.get(rank, -1.0))
        for rank, (node, at) in sorted(nodes.items(), key=lambda item: int(item[0]))
    ]


def log_of(folder: Path) -> str:
    """Return the end of what the job itself said."""
    path = folder / LOG
    return path.read_text(errors="replace").strip()[-400:] if path.is_file() else ""


def answered(seen: Sequence[Seen], expected: int, state: str, log: str) -> Iterator[Finding]:
    """Say whether every node has answered, and how fast the shared file system is."""
    names = ", ".join(one.node.name for one in seen) or "none"
    text = f"{len(seen)} of {expected} answered: {names}"
    if len(seen) < expected:
        words = f"; it said: {log}" if log else ""
        advice = "is runs_dir on a file system that all nodes share? --wait-s waits longer"
        yield fail("nodes", f"{text}; {state}{words}", advice)
    else:
        yield ok("nodes", text)
    if not seen:
        return
    slowest = max(seen, key=lambda one: (one.echo_s < 0, one.echo_s))
    text = f"a file of a node and its answer from here took {slowest.echo_s:.1f} s at most"
    if slowest.echo_s < 0:
        found = f"an answer from here never showed on {slowest.node.name}"
        yield fail("shared files", found, "the run's roles speak by files: another file system")
    elif slowest.echo_s > SLOW_ECHO_S:
        yield warn("shared files", f"{text} ({slowest.node.name})", "each update waits that long")
    else:
        yield ok("shared files", text)


def judged(seen: Sequence[Seen], config: RunConfig, *, digest: str = "") -> Iterator[Finding]:
    """Say what the nodes' answers mean for the run."""
    for one in seen:
        yield ok(one.node.name, line_of(one.node))
        yield from troubles(one, has_image=bool(config.image))
    if not config.image or not seen:
        return
    digests = {one.node.digest or "no file" for one in seen} | ({digest} if digest else set())
    if len(digests) > 1:
        yield fail("image digests", ", ".join(sorted(digests)), "nodes see different files")
    else:
        where = "every node and here" if digest else "every node"
        yield ok("image digests", f"{seen[0].node.digest[:19]}… on {where}")


def line_of(node: Node) -> str:
    """Return what is told of a node in any case."""
    parts = [node.runtime or "no runtime", f"cgroup {node.cgroup}", f"{node.open_files} open files"]
    if node.scratch_free_gb >= 0:
        parts.append(f"{node.scratch_free_gb:.0f} GiB free in {node.scratch}")
    if node.image_bytes:
        parts.append(f"image hashed in {node.digest_s:.1f} s")
    if node.enter_s:
        parts.append(f"entered in {node.enter_s:.2f} s, imports {node.import_s:.1f} s")
    return ", ".join(parts)


def troubles(one: Seen, *, has_image: bool) -> Iterator[Finding]:
    """Yield what is wrong with one node."""
    node, behind_s = one.node, one.at - one.node.written
    if behind_s < -SKEW_S or behind_s > max(one.echo_s, 0.0) + SKEW_S:
        text = f"{-behind_s:+.0f} s from this machine's"
        yield warn(f"{node.name} clock", text, "synchronise the clocks: leases compare them")
    if not node.has_user_namespaces:
        advice = "sandbox.kind=bubblewrap and Apptainer without setuid need them"
        yield warn(f"{node.name} namespaces", "refused", advice)
    if node.scratch_free_gb < 0:
        yield fail(f"{node.name} scratch", node.scratch, "cannot be written: cluster.scratch")
    if node.open_files < OPEN_LEAST:
        yield warn(f"{node.name} limits", f"{node.open_files} open files", "raise ulimit -n")
    if has_image and node.refusal:
        yield fail(f"{node.name} image", node.refusal, "see docs/containers.md")


def _has_ended(job: str) -> bool:
    return states_of([job]).get(job, "") in ENDED
