"""A real small Slurm on this machine, for trying and testing: every node is a set of namespaces.

The login node is a network, UTS and mount namespace with a bridge and no route out. A compute node
(inf0…, trn0…) has, on that bridge, its own network, hostname, mounts, processes and /dev/shm; the
file system is common. Each claims 16 CPUs, 64 GB and GPUs that are null devices, and has a docker0
with the same address. Partitions: inference, trainer, all, urgent (preempts) and scavenge (is
preempted and requeued). The machine's own Slurm and MUNGE are not touched.

Limits: root; Debian's Slurm 22.05; one kernel and its real CPUs; no control groups, no PMIx; a
killed node is noticed after SlurmdTimeout.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from agentrl.errors import ClusterError, ConfigError, WaitTimeout
from slurm import lab_host
from slurm.files import publish
from slurm.lab_files import (
    BRIDGE,
    SHIM_MARK,
    Node,
    Plan,
    database_clear,
    database_install,
    database_server,
    database_socket,
    files,
    shim,
)
from slurm.lab_process import (
    Process,
    ancestry,
    children,
    command_line,
    in_networks,
    spawn,
    wait_for,
)

START_S = 60
"""Longest wait for anything to start; a busy machine is slow, a dead daemon is told at once."""
END_S = 10
TAIL_BYTES = 1000
SHIMS = (
    *("sbatch", "srun", "salloc", "sattach", "scancel", "sbcast"),
    *("squeue", "sinfo", "scontrol", "sacct", "sacctmgr", "sdiag", "sstat", "sprio", "sreport"),
)
SCRUBBED = ("SLURM_", "SBATCH_", "SALLOC_", "SRUN_")
"""What a job of another cluster, or its shell, has in its environment."""
Answer = TypeVar("Answer")


class Lab:
    """One cluster. All that is known of it lies in its directory: any process may steer it."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(os.path.abspath(directory))
        self._plan_file = self.directory / "lab.json"
        self._processes = self.directory / "processes"

    # What there is

    @property
    def plan(self) -> Plan:
        """What `up` was asked for last. Raises ClusterError where it never was."""
        if not self._plan_file.is_file():
            raise ClusterError(f"no cluster in {self.directory}; agentrl cluster up makes one")
        return msgspec.json.decode(self._plan_file.read_bytes(), type=Plan)

    @property
    def nodes(self) -> list[Node]:
        return self.plan.nodes()

    @property
    def shims(self) -> Path:
        """Folder of sbatch, srun, squeue, … that enter the login node from outside."""
        return self.directory / "bin"

    def is_up(self) -> bool:
        return "login" in self._living()

    def states(self) -> dict[str, str]:
        """Return each node's state in Slurm's words, as `idle` or `down*`."""
        answer = self.run(["sinfo", "--noheader", "--Node", "-p", "all", "-o", "%N %T"]).stdout
        return dict(line.split() for line in answer.splitlines())

    def environment(self) -> dict[str, str]:
        """Return this process's environment with the shims first on its PATH."""
        return {**os.environ, "PATH": f"{self.shims}:{os.environ.get('PATH', os.defpath)}"}

    # Beginning and end

    def up(
        self, *, inference: int = 3, trainer: int = 1, gpus: int = 8, accounting: bool = False
    ) -> None:
        """Boot the cluster; return when every node is idle. If that fails, nothing is left.

        It forgets the jobs of an earlier cluster in its directory.
        """
        plan = Plan(inference=inference, trainer=trainer, gpus=gpus, accounting=accounting)
        lab_host.check_root()
        lab_host.check_packages(accounting=accounting)
        lab_host.check_directory(self.directory)
        if living := self._living():
            raise ClusterError(
                f"a cluster is up in {self.directory} ({', '.join(sorted(living))}); "
                "take it down first, or give another --dir"
            )
        lab_host.check_kernel()
        try:
            self._write_files(plan)
            self._boot(plan)
        except BaseException:
            self.down()
            raise

    def down(self) -> list[str]:
        """End all that runs in the cluster; return what is left, a line each: none, one hopes.

        That is a power cut, for the login node's shells and commands too; only the database is
        asked to end. Never ends the calling process or those it descends from.
        """
        spared = set(ancestry(os.getpid()))
        with self._networks() as inodes:
            if database := self._living().get("mariadbd"):
                database.send(signal.SIGTERM)
                with contextlib.suppress(WaitTimeout):
                    wait_for(database.is_dead, END_S, "MariaDB's end")

            def rest() -> list[Process]:
                found = [*in_networks(inodes), *self._living().values()]
                return [process for process in found if process.pid not in spared]

            def is_ended() -> bool:
                for process in rest():
                    process.send(signal.SIGKILL)
                return not rest()

            with contextlib.suppress(WaitTimeout):
                wait_for(is_ended, END_S, "the end of all processes")
            left = [*in_networks(inodes), *self._living().values()]
        self._forget_dead()
        lines = sorted({command_line(process) for process in left if process.pid != os.getpid()})
        return [*(f"process {line}" for line in lines), *self._mounts()]

    # Nodes

    def kill_node(self, name: str) -> None:
        """Cut the power of a node: all that runs there dies at once."""
        self._node(name)
        for part in (f"{name}.init", name):
            if process := self._living().get(part):
                process.send(signal.SIGKILL)
                wait_for(process.is_dead, END_S, f"the end of {name}")
        self._forget_dead()

    def start_node(self, name: str) -> None:
        """Boot a node that was killed; return when Slurm may use it again."""
        node = self._node(name)
        if name in self._living():
            raise ClusterError(f"{name} is running; agentrl cluster kill-node {name} cuts it off")
        self._start_nodes([node])
        self._wait_for(lambda: _is_usable(self.states().get(name, "")), f"{name} to be usable")

    # Commands

    def run(
        self,
        argv: Sequence[str],
        *,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: str = "",
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node, its output captured. env: added to its environment.

        Raises ClusterError, if `check`, in the command's own words.
        """
        done = subprocess.run(
            [*self.enter(cwd), *argv],
            env={**self.inner_environment(), **(env or {})},
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )
        if check and done.returncode:
            said = (done.stderr or done.stdout).strip()
            raise ClusterError(
                f"{' '.join(argv)} exited {done.returncode} on the login node: {said}"
            )
        return done

    def enter(self, cwd: Path | None = None) -> list[str]:
        """Return the words that make the command after them run on the login node, in `cwd`.

        Raises ClusterError unless the cluster is up.
        """
        login = self._living().get("login")
        if login is None:
            raise ClusterError(
                f"no cluster is up in {self.directory}; agentrl cluster up boots one"
            )
        flags = ["--net", "--uts", "--mount", f"--wdns={cwd or Path.cwd()}"]
        return ["nsenter", "--target", str(login.pid), *flags]

    def inner_environment(self) -> dict[str, str]:
        """Return the environment of what runs in the cluster: no shims, no other Slurm's words."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(SCRUBBED)}
        path = [
            entry
            for entry in lab_host.search_path().split(":")
            if not (Path(entry) / SHIM_MARK).exists()
        ]
        return {**kept, "PATH": ":".join(path), "SLURM_CONF": f"{self.directory}/etc/slurm.conf"}

    # How it boots

    def _write_files(self, plan: Plan) -> None:
        for name in ("state", "spool", "munge", "dev", "bin"):
            shutil.rmtree(self.directory / name, ignore_errors=True)
        for name in ("state", "spool", "munge", "dev", "bin", "etc", "cgroup", "log", "processes"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        for log in (self.directory / "log").iterdir():
            log.unlink()
        for name, text in files(self.directory, plan).items():
            (self.directory / name).write_text(text)
        (self.directory / "etc" / "slurmdbd.conf").chmod(0o600)  # slurmdbd insists
        for index in range(plan.gpus):
            (self.directory / "dev" / f"gpu{index}").symlink_to("/dev/null")
        publish(self._plan_file, msgspec.json.encode(plan))

    def _boot(self, plan: Plan) -> None:
        self._start_login()
        self._write_shims()
        self._start_munged()
        if plan.accounting:
            self._start_accounting()
        self._spawn("slurmctld", ["slurmctld", "-D", "-i"])
        self._start_nodes(plan.nodes())
        idle = {node.name: "idle" for node in plan.nodes()}
        self._wait_for(lambda: self._states_or_none() == idle, "all nodes to be idle")
        if plan.accounting:
            self._wait_for(self._is_registered, "slurmctld at slurmdbd")

    def _start_login(self) -> None:
        words = ["unshare", "--net", "--uts", "--mount", "sleep", "infinity"]
        login = self._spawn("login", words, is_inside=False)
        name = Path(f"/proc/{login.pid}/comm")
        self._wait_for(lambda: name.read_text() == "sleep\n", "the login node's namespaces")
        self.run(["sh", f"{self.directory}/login.sh", str(self.directory)])

    def _start_munged(self) -> None:
        """Run a MUNGE daemon with a key and a socket of its own."""
        home = self.directory / "munge"
        home.chmod(0o711)
        key = home / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        flags = [f"--key-file={key}", f"--socket={home}/socket", f"--seed-file={home}/seed"]
        flags += [f"--pid-file={home}/pid", f"--log-file={self.directory}/log/munged.log"]
        self._spawn("munged", ["munged", "--foreground", "--force", *flags])
        self._wait_for((home / "socket").exists, "MUNGE's socket")

    def _start_accounting(self) -> None:
        """Run a MariaDB that is reached by a socket only, and slurmdbd on it."""
        if not (self.directory / "database" / "mysql").is_dir():
            self.run(database_install(self.directory))
        self._spawn("mariadbd", database_server(self.directory))
        clear = database_clear(self.directory)
        self._wait_for(lambda: not self.run(clear, check=False).returncode, "MariaDB")
        socket = str(database_socket(self.directory))
        self._spawn("slurmdbd", ["slurmdbd", "-D"], env={"MYSQL_UNIX_PORT": socket})
        add = ["sacctmgr", "--immediate", "add", "cluster", "lab"]
        self._wait_for(lambda: not self.run(add, check=False).returncode, "slurmdbd")

    def _start_nodes(self, nodes: Sequence[Node]) -> None:
        """Boot nodes: namespaces each, then a cable from each to the login node's bridge."""
        with contextlib.ExitStack() as plugs:
            ends = [self._begin_node(node, plugs) for node in nodes]
            lines = []
            for node in nodes:
                inner = self._inner_process(node.name)
                cable = f"v-{node.name}"
                lines.append(f"link add {cable} type veth peer name eth0 netns {inner.pid}")
                lines.append(f"link set {cable} master {BRIDGE} up")
            self.run(["ip", "-batch", "-"], stdin="\n".join(lines) + "\n")
            for end in ends:
                os.write(end, b"\n")

    def _begin_node(self, node: Node, plugs: contextlib.ExitStack) -> int:
        """Start a node's script, which waits; return where a line lets it go on."""
        reader, writer = os.pipe()
        plugs.callback(os.close, writer)
        flags = "--net --uts --mount --ipc --pid --fork --kill-child --mount-proc"
        script = [f"{self.directory}/node.sh", str(self.directory), node.name, node.address]
        try:
            self._spawn(node.name, ["unshare", *flags.split(), "sh", *script], stdin=reader)
        finally:
            os.close(reader)
        return writer

    def _inner_process(self, name: str) -> Process:
        """Return, once it is there, the process that is pid 1 inside the node."""
        outer = self._living()[name].pid
        inner = self._wait_for(lambda: children(outer), f"the namespaces of {name}")[0]
        return self._remember(f"{name}.init", Process.of(inner))

    def _write_shims(self) -> None:
        login = self._living()["login"]
        (self.shims / SHIM_MARK).touch()
        for name in SHIMS:
            if program := lab_host.which(name):
                text = shim(self.directory, program, pid=login.pid, started=login.started)
                (self.shims / name).write_text(text)
                (self.shims / name).chmod(0o755)

    # Its processes

    def _spawn(
        self,
        name: str,
        command: Sequence[str],
        *,
        is_inside: bool = True,
        env: Mapping[str, str] | None = None,
        stdin: int | None = None,
    ) -> Process:
        """Start a daemon, its output in log/NAME, and remember it."""
        with open(os.devnull) as nothing:
            process = spawn(
                [*(self.enter(self.directory) if is_inside else []), *command],
                {**self.inner_environment(), **(env or {})},
                self.directory / "log" / name,
                stdin=nothing.fileno() if stdin is None else stdin,
            )
        return self._remember(name, process)

    def _remember(self, name: str, process: Process) -> Process:
        publish(self._processes / name, msgspec.json.encode(process))
        return process

    def _known(self) -> dict[str, Process]:
        if not self._processes.is_dir():
            return {}
        found = [path for path in self._processes.iterdir() if path.suffix != ".tmp"]
        return {path.name: msgspec.json.decode(path.read_bytes(), type=Process) for path in found}

    def _living(self) -> dict[str, Process]:
        return {name: process for name, process in self._known().items() if process.is_alive()}

    def _forget_dead(self) -> None:
        for name, process in self._known().items():
            if not process.is_alive():
                (self._processes / name).unlink()

    def _wait_for(self, look: Callable[[], Answer | None], what: str) -> Answer:
        """Return the first true answer; raise at once, with its log, if a daemon has died."""

        def look_at_daemons_too() -> Answer | None:
            for name, process in self._known().items():
                if not process.is_alive():
                    raise ClusterError(f"{name} has ended; {self._tail(name)}")
            return look()

        try:
            return wait_for(look_at_daemons_too, START_S, what)
        except WaitTimeout as error:
            raise ClusterError(f"{error}; {self._tail('slurmctld')}") from error

    def _tail(self, name: str) -> str:
        path = self.directory / "log" / name.removesuffix(".init")
        text = path.read_text(errors="replace") if path.exists() else ""
        return f"the end of {path}:\n{text[-TAIL_BYTES:].strip() or '(nothing)'}"

    @contextlib.contextmanager
    def _networks(self) -> Iterator[list[int]]:
        """Yield the inodes of the cluster's network namespaces, which no other gets meanwhile."""
        with contextlib.ExitStack() as held:
            inodes = []
            for process in self._living().values():
                with contextlib.suppress(OSError):
                    handle = os.open(f"/proc/{process.pid}/ns/net", os.O_RDONLY)
                    held.callback(os.close, handle)
                    inodes.append(os.fstat(handle).st_ino)
            yield inodes

    def _mounts(self) -> list[str]:
        """Return a line for each mount of this process's namespace below the directory."""
        points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        return [f"mount {point}" for point in points if f"{self.directory}/" in f"{point}/"]

    def _node(self, name: str) -> Node:
        found = {node.name: node for node in self.nodes}
        if name not in found:
            raise ConfigError(f"no node {name!r} in {self.directory}; nodes: {', '.join(found)}")
        return found[name]

    def _is_registered(self) -> bool:
        ask = ["sacctmgr", "--noheader", "--parsable2", "list", "cluster", "format=controlhost"]
        return bool(self.run(ask).stdout.strip())

    def _states_or_none(self) -> dict[str, str] | None:
        """Return the nodes' states, or None while slurmctld does not answer yet."""
        try:
            return self.states()
        except ClusterError:
            return None


def _is_usable(state: str) -> bool:
    return state.rstrip("*") in ("idle", "mixed", "allocated") and not state.endswith("*")
