"""How slurm.lab boots: the login node, MUNGE, accounting, slurmctld, then the compute nodes."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from agentrl.errors import ClusterError
from slurm.lab_files import (
    BRIDGE,
    Node,
    Plan,
    database_clear,
    database_install,
    database_server,
    database_socket,
    files,
)
from slurm.lab_login import Login
from slurm.lab_process import Process, children

FRESH = ("state", "spool", "munge", "dev", "bin", "log")
"""Folders that no boot takes over from an earlier one."""
KEPT = ("etc", "cgroup", "processes")


def boot(login: Login, plan: Plan) -> None:
    """Boot everything; return when every node is idle. Raises ClusterError, with a log's end."""
    _write_files(login.directory, plan)
    _start_login(login)
    login.write_shims()
    _start_munged(login)
    if plan.accounting:
        _start_accounting(login)
    login.start("slurmctld", ["slurmctld", "-D", "-i"])
    start_nodes(login, plan.nodes())
    idle = {node.name: "idle" for node in plan.nodes()}
    daemons = ["munged", *idle, "slurmctld"]
    login.daemons.wait_for(
        lambda: _states_or_none(login) == idle, "all nodes to be idle", needed=daemons
    )
    if plan.accounting:
        login.daemons.wait_for(
            lambda: _is_registered(login), "slurmctld at slurmdbd", needed=["slurmctld", "slurmdbd"]
        )


def states(login: Login) -> dict[str, str]:
    """Return each node's state in Slurm's words, as `idle` or `down*`."""
    answer = login.run(["sinfo", "--noheader", "--Node", "-p", "all", "-o", "%N %T"]).stdout
    return dict(line.split() for line in answer.splitlines())


def start_nodes(login: Login, nodes: Sequence[Node]) -> None:
    """Boot nodes: namespaces each, then a cable from each to the login node's bridge."""
    with contextlib.ExitStack() as plugs:
        ends = [_begin_node(login, node, plugs) for node in nodes]
        lines = []
        for node in nodes:
            inner = _inner_process(login, node.name)
            cable = f"v-{node.name}"
            lines.append(f"link add {cable} type veth peer name eth0 netns {inner.pid}")
            lines.append(f"link set {cable} master {BRIDGE} up")
        login.run(["ip", "-batch", "-"], stdin="\n".join(lines) + "\n")
        for end in ends:
            os.write(end, b"\n")


def _begin_node(login: Login, node: Node, plugs: contextlib.ExitStack) -> int:
    """Start a node's script, which waits; return where a line lets it go on."""
    reader, writer = os.pipe()
    plugs.callback(os.close, writer)
    flags = "--net --uts --mount --ipc --pid --fork --kill-child --mount-proc"
    script = [f"{login.directory}/node.sh", str(login.directory), node.name, node.address]
    try:
        login.start(node.name, ["unshare", *flags.split(), "sh", *script], stdin=reader)
    finally:
        os.close(reader)
    return writer


def _inner_process(login: Login, name: str) -> Process:
    """Return, once it is there, the process that is pid 1 inside the node."""
    daemons = login.daemons
    outer = daemons.living()[name].pid
    found = daemons.wait_for(lambda: children(outer), f"the namespaces of {name}", needed=[name])
    return daemons.remember(f"{name}.init", Process.of(found[0]))


def _write_files(directory: Path, plan: Plan) -> None:
    for name in FRESH:
        shutil.rmtree(directory / name, ignore_errors=True)
    for name in (*FRESH, *KEPT):
        (directory / name).mkdir(parents=True, exist_ok=True)
    for name, text in files(directory, plan).items():
        (directory / name).write_text(text)
    (directory / "etc" / "slurmdbd.conf").chmod(0o600)  # slurmdbd insists
    for index in range(plan.gpus):
        (directory / "dev" / f"gpu{index}").symlink_to("/dev/null")


def _start_login(login: Login) -> None:
    keep = ["unshare", "--net", "--uts", "--mount", "sleep", "infinity"]
    process = login.daemons.start("login", keep, login.environment())
    name = Path(f"/proc/{process.pid}/comm")
    login.daemons.wait_for(
        lambda: name.read_text() == "sleep\n", "the login node's namespaces", needed=["login"]
    )
    login.run(["sh", f"{login.directory}/login.sh", str(login.directory)])


def _start_munged(login: Login) -> None:
    """Run a MUNGE daemon with a key and a socket of its own."""
    home = login.directory / "munge"
    home.chmod(0o711)
    key = home / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    flags = [f"--key-file={key}", f"--socket={home}/socket", f"--seed-file={home}/seed"]
    flags += [f"--pid-file={home}/pid", f"--log-file={login.directory}/log/munged.log"]
    login.start("munged", ["munged", "--foreground", "--force", *flags])
    login.daemons.wait_for((home / "socket").exists, "MUNGE's socket", needed=["munged"])


def _start_accounting(login: Login) -> None:
    """Run MariaDB, and slurmdbd on it."""
    directory, wait_for = login.directory, login.daemons.wait_for
    if not (directory / "database" / "mysql").is_dir():
        login.run(database_install(directory))
    login.start("mariadbd", database_server(directory))
    clear = database_clear(directory)
    wait_for(lambda: not login.run(clear, check=False).returncode, "MariaDB", needed=["mariadbd"])
    socket = str(database_socket(directory))
    login.start("slurmdbd", ["slurmdbd", "-D"], env={"MYSQL_UNIX_PORT": socket})
    add = ["sacctmgr", "--immediate", "add", "cluster", "lab"]
    wait_for(lambda: not login.run(add, check=False).returncode, "slurmdbd", needed=["slurmdbd"])


def _is_registered(login: Login) -> bool:
    ask = ["sacctmgr", "--noheader", "--parsable2", "list", "cluster", "format=controlhost"]
    return bool(login.run(ask).stdout.strip())


def _states_or_none(login: Login) -> dict[str, str] | None:
    """Return the nodes' states, or None while slurmctld does not answer yet."""
    try:
        return states(login)
    except ClusterError:
        return None
