"""The nodes' part of `agentrl doctor --nodes`: `python -m launch.doctor_nodes FOLDER` on each.

One srun a role asks for the nodes as the run would. Each node writes what it is to FOLDER, on the
shared file system: that the login node sees the file in time is a finding by itself.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from agentrl.config import RunConfig
from agentrl.config_cluster import ClusterConfig, RoleResources
from agentrl.handoff.publish import publish_bytes
from launch.findings import Finding, fail, ok, warn
from slurm.sbatch import scrubbed_environment

REQUEST = "request.json"
SEEN_S = 30.0
"""How long nodes' files may take to show here once their srun has ended."""
SKEW_S = 2.0
MINUTES = 5


class Request(msgspec.Struct, kw_only=True, frozen=True):
    """What the nodes look at."""

    image: str
    runtime: str
    scratch: str
    flags: list[str] = []


class Node(msgspec.Struct, kw_only=True, frozen=True):
    """What one node is."""

    name: str
    written: float
    """Its clock, just before its file was published."""
    image_bytes: int
    digest: str
    runtime: str
    """Its answer to --version; empty where there is none."""
    enters: str
    """Empty where the image can be entered; else the runtime's words."""
    has_user_namespaces: bool
    cgroup: str
    scratch: str
    scratch_free_gb: float
    open_files: int


def findings(config: RunConfig, *, wait_s: float) -> Iterator[Finding]:
    """Ask every node, by a job for each role; yield what they are and how they differ."""
    folder = Path(config.runs_dir) / f".doctor-{uuid.uuid4().hex[:8]}"
    cluster = config.cluster
    request = Request(
        image=config.image,
        runtime=cluster.runtime,
        scratch=cluster.scratch or "/tmp",
        flags=list(cluster.runtime_flags),
    )
    publish_bytes(folder / REQUEST, msgspec.json.encode(request))
    try:
        for role, count in (("trainer", 1), ("inference", config.rollout.nodes)):
            resources: RoleResources = getattr(cluster, role)
            said = ask(words_of(cluster, resources, count, folder), cluster, wait_s=wait_s)
            if said:
                yield fail(f"{role} nodes", said, "srun's own words; is the partition right?")
        expected = 1 + config.rollout.nodes
        yield from judged(collect(folder, expected), config, expected=expected)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def words_of(
    cluster: ClusterConfig, resources: RoleResources, count: int, folder: Path
) -> list[str]:
    """Return the srun that runs this module once on each of `count` nodes."""
    given = {
        "partition": resources.partition,
        "constraint": resources.constraint,
        "exclude": resources.exclude,
        "gres": resources.gres,
        "gpus-per-node": str(resources.gpus_per_node or ""),
        "account": cluster.account,
        "qos": cluster.qos,
        "reservation": cluster.reservation,
    }
    return [
        *("srun", "--job-name=agentrl-doctor", f"--nodes={count}", f"--ntasks={count}"),
        *("--ntasks-per-node=1", f"--cpus-per-task={resources.cpus_per_task}"),
        *(f"--time={MINUTES}", "--export=ALL", "--input=none"),
        *(f"--{name}={value}" for name, value in given.items() if value),
        *resources.extra,
        *(sys.executable, "-m", "launch.doctor_nodes", str(folder)),
    ]


def ask(words: Sequence[str], cluster: ClusterConfig, *, wait_s: float) -> str:
    """Run one of those; return srun's words if it failed."""
    env = {**scrubbed_environment(os.environ), **cluster.environment}
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, env=env, check=False, timeout=wait_s
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {wait_s:g} s: the nodes are taken, it seems; --wait-s waits longer"
    return (done.stderr or done.stdout).strip()[-400:] if done.returncode else ""


def collect(folder: Path, expected: int) -> list[tuple[Node, float]]:
    """Return each node's file, and this clock when it was seen; waits for `expected` of them."""
    deadline = time.monotonic() + SEEN_S
    found: dict[str, tuple[Node, float]] = {}
    while True:
        for name in sorted(set(os.listdir(folder)) - set(found)):
            if name.endswith(".json") and name != REQUEST and not name.startswith("."):
                data = (folder / name).read_bytes()
                found[name] = (msgspec.json.decode(data, type=Node), time.time())
        if len(found) >= expected or time.monotonic() > deadline:
            return list(found.values())
        time.sleep(0.2)


def judged(
    found: Sequence[tuple[Node, float]], config: RunConfig, *, expected: int
) -> Iterator[Finding]:
    """Say what the nodes' answers mean for the run."""
    nodes = [node for node, _ in found]
    names = ", ".join(node.name for node in nodes)
    text = f"{len(nodes)} of {expected} seen through {config.runs_dir}: {names or 'none'}"
    advice = "is runs_dir on a file system that all nodes share?"
    yield ok("nodes", text) if len(nodes) == expected else fail("nodes", text, advice)
    for node, seen in found:
        ahead_s = node.written - seen
        if ahead_s > SKEW_S:
            text = f"{ahead_s:.0f} s ahead of this machine"
            yield warn(f"{node.name} clock", text, "synchronise the clocks: leases compare them")
        if not node.has_user_namespaces:
            yield warn(f"{node.name} namespaces", "refused", "sandbox.kind=bubblewrap needs them")
        if node.scratch_free_gb < 0:
            yield fail(f"{node.name} scratch", node.scratch, "cannot be written: cluster.scratch")
        if config.image and node.enters:
            yield fail(f"{node.name} image", node.enters, "see docs/containers.md")
    digests = {node.digest for node in nodes}
    if config.image and len(digests) > 1:
        yield fail("image digests", ", ".join(sorted(digests)), "nodes see different files")
    elif config.image and nodes:
        yield ok("image digests", f"{nodes[0].digest[:19]}… on every node")


def look(request: Request) -> Node:
    """Return what this node is."""
    import resource

    from containers import sif

    runtime = shutil.which(request.runtime)
    image = Path(request.image) if request.image else None
    has_image = image is not None and image.is_file()
    scratch = os.path.expandvars(request.scratch)
    return Node(
        name=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        image_bytes=image.stat().st_size if image and has_image else 0,
        digest=sif.digest(image) if image and has_image else "",
        runtime=_said([runtime, "--version"])[1] if runtime else "",
        enters=_entered(request, runtime) if image else "",
        has_user_namespaces=_said(["unshare", "--user", "true"])[0] == 0,
        cgroup="v2" if Path("/sys/fs/cgroup/cgroup.controllers").is_file() else "v1",
        scratch=scratch,
        scratch_free_gb=_free_gb(scratch),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        written=time.time(),
    )


def _entered(request: Request, runtime: str | None) -> str:
    if runtime is None:
        return f"no {request.runtime} on this node's PATH"
    words = [runtime, "exec", "--cleanenv", *request.flags, "--no-mount=home,cwd", "--pwd=/"]
    code, said = _said([*words, request.image, "python3", "-c", "import launch.role"])
    return f"exit code {code}: {said}" if code else ""


def _free_gb(folder: str) -> float:
    """Return the free space, −1 where it cannot be written."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        draft = Path(folder) / f".doctor-{uuid.uuid4().hex}"
        draft.write_text("x")
        draft.unlink()
    except OSError:
        return -1.0
    return shutil.disk_usage(folder).free / 2**30


def _said(words: list[str]) -> tuple[int, str]:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    return done.returncode, (done.stderr or done.stdout).strip()[-300:]


def main(argv: Sequence[str]) -> int:
    """Look at this node and publish it."""
    folder = Path(argv[0])
    request = msgspec.json.decode((folder / REQUEST).read_bytes(), type=Request)
    node = look(request)
    publish_bytes(folder / f"{node.name}.json", msgspec.json.encode(node))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
