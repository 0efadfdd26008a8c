"""Apptainer 1.1 or newer, without setuid: a read-only SIF or root folder, an overlay a sandbox.

One `apptainer exec` a sandbox, whose only command is the resident executor, pid 1 inside. All that
is written goes to the scratch folder on node-local disk. Not a boundary against kernel exploits.
Bounded: what `bubblewrap` bounds, but that bytes written in all are watched, not refused by the
file system (see `watch`). Unlike there, the whole tree is writable, as in a container.
"""

from __future__ import annotations

import csv
import functools
import io
import logging
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from agentrl.config import SandboxConfig
from agentrl.errors import SandboxStartError, SandboxUnavailable
from agentrl.sandbox import lease
from agentrl.sandbox.bubblewrap import UNTIL_RLIMITS_PER_NAMESPACE
from agentrl.sandbox.child import Child, Spawn
from agentrl.sandbox.confine import kernel
from agentrl.sandbox.environment import VARIABLES, environment_of, executor_source, first_command
from agentrl.sandbox.layers import restore
from agentrl.sandbox.limits import SPARE_MB, bounds, scratch_folder
from agentrl.sandbox.pull import REGISTRY, ensure, shared_folder
from agentrl.sandbox.resident import ResidentSandbox, in_thread
from agentrl.sandbox.single import SingleFlight
from agentrl.sandbox.watch import written_mb

log = logging.getLogger(__name__)
OLDEST = (1, 1)
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where Apptainer finds its FUSE programs, after its own folder."""
FLAGS = (
    *("--containall", "--no-home", "--cleanenv", "--no-init", "--pwd", "/"),
    *("--no-mount", "sys,bind-paths,hostfs,cwd", "--net", "--network", "none"),
)
PROBE_TIMEOUT_S = 120
SPARE_PROCESSES = 8


class Apptainer:
    """Says what to run for one sandbox; made once, after checking that this host can."""

    name = "apptainer"
    kind = ""
    is_system_writable = True
    measure = staticmethod(written_mb)

    def __init__(self, config: SandboxConfig) -> None:
        found = shutil.which("apptainer")
        if found is None:
            raise SandboxUnavailable(
                "sandbox.kind=apptainer: no apptainer on PATH; load the site's module, or install "
                "Apptainer 1.1 or newer (EPEL and conda-forge have it; root on Debian: "
                "`sh configs/install_apptainer.sh`)"
            )
        self.config = config
        self.program = found
        require_version(found)
        self.code = executor_source()
        self.cgroups: tuple[str, ...] = ()
        self._sifs: SingleFlight[Path] = SingleFlight()
        if config.environment and not config.environment.startswith(REGISTRY):
            probe(found, config.environment)
            total_mb, most = config.total_memory_mb, config.processes
            self.cgroups = cgroup_flags(found, config.environment, total_mb, most)
        if not self.cgroups:
            log.info(
                "sandbox.kind=apptainer: no cgroup limits here; each process is bounded by "
                "rlimits, the sum of memory and the bytes written are watched"
            )

    def scratch(self, claim: lease.Lease) -> str:
        """Return the folder of one sandbox; its name is known before it exists."""
        return str(scratch_folder(self.config) / f"{lease.SCRATCH}{claim.id}")

    async def prepare(self, image: Path) -> None:
        """Have the SIF of a registry's image, whichever node makes it. Raises SandboxStartError."""
        reference = environment_of(image, self.config.environment)
        if not reference.startswith(REGISTRY):
            return
        build = [self.program, "build", "--fakeroot"] if os.geteuid() else [self.program, "build"]
        making = functools.partial(
            ensure,
            reference,
            shared_folder(self.config.images, reference),
            program=build,
            timeout_s=self.config.pull_timeout_s,
            env=environ(self.program, scratch_folder(self.config)),
        )
        await self._sifs.get(reference, making)

    async def create(self, image: Path, claim: lease.Lease) -> ResidentSandbox:
        """Lay its folders and start one; nothing in it is waited for."""
        spawn = await in_thread(self.spawn, image, claim)
        return ResidentSandbox(Child(spawn), code=self.code, places=spawn.places)

    def spawn(self, image: Path, claim: lease.Lease) -> Spawn:
        """Make the folders to write in; return the command that starts one."""
        named = environment_of(image, self.config.environment)
        environment = str(self._sifs.made(named) or named)
        if not Path(environment).exists():
            raise SandboxStartError(
                f"environment {environment} of image {image}: no such SIF or folder on this node"
            )
        scratch, testbed = Path(claim.scratch), image / "testbed"
        for name in ("layer", "testbed/upper", "testbed/work", "work", "home"):
            (scratch / name).mkdir(parents=True)
        restore(image, scratch)
        mounts = mount(scratch / "testbed", "/.scratch")
        if testbed.is_dir():
            mounts += mount(testbed.resolve(), "/.image", is_read_only=True)
        own = (*self.cgroups, "--overlay", str(scratch / "layer"), "--workdir", f"{scratch}/work")
        by_rlimit = int(os.geteuid() != 0 and kernel() >= UNTIL_RLIMITS_PER_NAMESPACE)
        # an overlay lets only the files' owner write, and the namespace maps one uid only
        copy = int(testbed.is_dir() and testbed.stat().st_uid != os.geteuid())
        inside = first_command(by_rlimit, copy, *bounds(self.config), shell=self.config.shell)
        return Spawn(
            argv=[self.program, "exec", *identity(), *FLAGS, *own, *mounts, environment, *inside],
            env=environ(self.program, scratch / "home") | {lease.MARK: claim.id},
            is_monitored=True,
        )


def identity() -> tuple[str, ...]:
    """Return the flags by which the one who asks is root inside, and nobody else is anything."""
    if os.geteuid() == 0:
        return ("--userns",)
    return ("--fakeroot", "--ignore-subuid", "--ignore-fakeroot-command")


def mount(source: Path, target: str, *, is_read_only: bool = False) -> list[str]:
    """Return a bind mount whose source may hold any character."""
    words = io.StringIO()
    fields = ["type=bind", f"source={source}", f"destination={target}"]
    csv.writer(words, lineterminator="").writerow([*fields, *(["ro"] if is_read_only else [])])
    return ["--mount", words.getvalue()]


def environ(program: str, home: Path) -> dict[str, str]:
    """Return Apptainer's own environment; what is for inside goes by its prefix."""
    return {
        "PATH": f"{Path(program).parent}:{PATH}",
        "HOME": str(home),
        "APPTAINER_TMPDIR": str(home),
        "APPTAINER_SILENT": "1",
        **{f"APPTAINERENV_{name}": value for name, value in VARIABLES.items()},
    }


@functools.cache
def require_version(program: str) -> tuple[int, int]:
    """Return the version, asked once a process. Raises SandboxUnavailable."""
    text = run([program, "--version"], home=Path("/")).stdout
    found = re.search(r"(\d+)\.(\d+)", text)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    if version < OLDEST or "apptainer" not in text:
        raise SandboxUnavailable(
            f"sandbox.kind=apptainer: {program} says {text.strip()!r}; Apptainer 1.1 or newer is "
            "needed (SingularityCE has not the flags for root inside without subordinate ids)"
        )
    return version


@functools.cache
def probe(program: str, environment: str) -> None:
    """Raise SandboxUnavailable unless a sandbox starts here; asked once a process."""
    done = try_out(program, environment)
    if done.returncode:
        raise SandboxUnavailable(
            f"sandbox.kind=apptainer: {done.stderr.strip() or done.returncode}; {advice()}"
        )


@functools.cache
def cgroup_flags(program: str, environment: str, total_mb: int, most: int) -> tuple[str, ...]:
    """Return the flags that bound a sandbox by a cgroup, or none where the site forbids them."""
    # the executor's watch is to come first: the kernel might end the executor itself
    flags = ("--memory", f"{total_mb + SPARE_MB}M", "--pids-limit", str(most + SPARE_PROCESSES))
    done = try_out(program, environment, *flags)
    if done.returncode:
        log.info("no cgroups for sandboxes here: %s", done.stderr.strip()[-300:])
        return ()
    return flags


def try_out(program: str, environment: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Start and end an empty sandbox over `environment`."""
    with tempfile.TemporaryDirectory(prefix="agentrl-probe-") as folder:
        (layer := Path(folder, "layer")).mkdir()
        argv = [program, "exec", *identity(), *FLAGS, "--overlay", str(layer), *flags]
        return run([*argv, environment, "true"], home=Path(folder))


def run(argv: list[str], *, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv,
        capture_output=True,
        text=True,
        timeout=PROBE_TIMEOUT_S,
        check=False,
        stdin=subprocess.DEVNULL,
        env=environ(argv[0], home),
    )


def advice() -> str:
    """Say which setting of this host stands in the way, as far as can be seen."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse is not open to this user: ask the site, or use an unpacked root folder"
    if Path("/proc/sys/user/max_user_namespaces").read_text().strip() == "0":
        return "user namespaces are switched off: `sysctl user.max_user_namespaces=15000` as root"
    return "does `apptainer exec` of that environment work by hand?"
