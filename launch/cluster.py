"""`agentrl cluster ACTION`: a real small Slurm on this machine, to try and to test with.

Each node is a set of namespaces with its own hostname, address, processes and fake GPUs. It needs
root, and Slurm and MUNGE from Debian's packages; your machine's own Slurm is not touched.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from launch.command import guard, parser, say
from slurm import lab_host
from slurm.exit_record import DONE, FAILED
from slurm.lab import Lab

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(argv: Sequence[str]) -> int:
    """Do one action; `up`, `down` and `status` return 1 where the cluster is not as was asked."""
    given = _arguments().parse_args(list(argv))
    lab = Lab(given.dir or default_directory())
    return int(given.act(lab, given))


def default_directory() -> Path:
    """Return where a cluster is that no --dir names: below the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "agentrl" / "cluster"


def _arguments() -> argparse.ArgumentParser:
    arguments = parser("cluster", __doc__ or "")
    actions = arguments.add_subparsers(metavar="ACTION", required=True)

    def add(name: str, act: Any, about: str) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=about, description=about)
        action.set_defaults(act=act)
        action.add_argument(
            "--dir", type=Path, help=f"the cluster's directory (default: {default_directory()})"
        )
        return action

    begin = add("up", up, "boot a cluster, and tell how to use it")
    begin.add_argument("--inference", type=int, default=3, metavar="NODES", help="default: 3")
    begin.add_argument("--trainer", type=int, default=1, metavar="NODES", help="default: 1")
    begin.add_argument("--gpus", type=int, default=8, help="of each node, all fake; default: 8")
    begin.add_argument("--accounting", action="store_true", help="with slurmdbd and MariaDB")
    begin.add_argument("--install", action="store_true", help="apt-get what is missing first")
    add("down", down, "end it, and all that runs there")
    add("env", env, 'print the line for eval "$(agentrl cluster env)": sbatch, srun, … go there')
    inside = add("exec", execute, "run a command, else a shell, on the login node")
    inside.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND …")
    show = add("status", status, "show nodes, jobs, and daemons that have died")
    show.add_argument("--json", action="store_true", help="print one JSON object")
    for name, act, about in (
        ("kill-node", kill_nodes, "cut the power of nodes: all that runs there dies at once"),
        ("start-node", start_nodes, "boot nodes that were killed"),
    ):
        add(name, act, about).add_argument("nodes", nargs="+", metavar="NODE", help="as inf0, trn0")
    return arguments


def up(lab: Lab, given: argparse.Namespace) -> int:
    """Boot; Ctrl-C or SIGTERM meanwhile take down what there is."""
    if given.install:
        _install(accounting=given.accounting)
    start = time.monotonic()
    with _ended_in_order():
        lab.up(
            inference=given.inference,
            trainer=given.trainer,
            gpus=given.gpus,
            accounting=given.accounting,
        )
    names = " ".join(node.name for node in lab.nodes)
    say(f"up in {time.monotonic() - start:.1f} s: {names}, each with {given.gpus} fake GPUs")
    said = shlex.join(["--dir", str(lab.directory)]) if given.dir else ""
    for what, words in (
        ("use it from this shell:", f'eval "$(agentrl cluster env {said})"'),
        ("or run one command there:", f"agentrl cluster exec {said} -- sinfo"),
        ("and in the end:", f"agentrl cluster down {said}"),
    ):
        say(f"  {what:<26}{_squeeze(words)}")
    return DONE


def _squeeze(words: str) -> str:
    return " ".join(words.split()).replace(' )"', ')"')


def _install(*, accounting: bool) -> None:
    if missing := lab_host.missing_packages(accounting=accounting):
        say(f"installing {' '.join(missing)} with apt-get")
        lab_host.install(accounting=accounting)


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Make the first of Ctrl-C, SIGTERM and SIGHUP a KeyboardInterrupt; more change nothing."""

    def end(number: int, frame: FrameType | None) -> None:
        del number, frame
        for other in ENDING:
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def down(lab: Lab, given: argparse.Namespace) -> int:
    """Say what is left, if anything."""
    del given
    if not lab.daemons.living():
        say(f"no cluster is up in {lab.directory}")
        return DONE
    start = time.monotonic()
    left = lab.down()
    say("\n".join([f"down in {time.monotonic() - start:.1f} s; logs are in {lab.daemons.logs}"]))
    for line in left:
        say(f"left: {line}")
    return FAILED if left else DONE


def env(lab: Lab, given: argparse.Namespace) -> int:
    del given
    lab.login.enter()  # says so where it is down
    say(f'export PATH={shlex.quote(str(lab.login.shims))}:"$PATH"')
    return DONE


def execute(lab: Lab, given: argparse.Namespace) -> int:
    """Become the command."""
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    words = [*lab.login.enter(), *(command or [os.environ.get("SHELL", "/bin/sh")])]
    sys.stdout.flush()
    os.execvpe(words[0], words, lab.login.environment())


def kill_nodes(lab: Lab, given: argparse.Namespace) -> int:
    for name in given.nodes:
        lab.kill_node(name)
    return DONE


def start_nodes(lab: Lab, given: argparse.Namespace) -> int:
    for name in given.nodes:
        lab.start_node(name)
    return DONE


def status(lab: Lab, given: argparse.Namespace) -> int:
    """Print where the cluster stands; return 1 unless it is up and whole."""
    found = facts(lab)
    if given.json:
        print(json.dumps(found))
    else:
        say("\n".join(_lines(found)))
    return DONE if found["is_up"] and not found["ended"] else FAILED


def facts(lab: Lab) -> dict[str, Any]:
    """Return what status shows, as JSON has it."""
    found: dict[str, Any] = {"directory": str(lab.directory), "is_up": lab.is_up()}
    found["ended"] = lab.daemons.ended()
    if not found["is_up"]:
        return found
    living = lab.daemons.living()
    states = lab.states() if "slurmctld" in living else {}
    found["accounting"] = lab.plan.accounting
    found["nodes"] = [
        {
            "name": node.name,
            "kind": node.kind,
            "address": node.address,
            "is_on": node.name in living,
            "state": states.get(node.name, "unknown"),
        }
        for node in lab.nodes
    ]
    jobs = lab.run(["squeue", "--noheader", "-o", "%i %T %j"]).stdout if states else ""
    found["jobs"] = jobs.splitlines()
    return found


def _lines(found: dict[str, Any]) -> Iterator[str]:
    if not found["is_up"]:
        yield f"no cluster is up in {found['directory']}"
        return
    accounting = "accounting" if found["accounting"] else "no accounting"
    yield f"up in {found['directory']}, {accounting}"
    for node in found["nodes"]:
        off = "" if node["is_on"] else ", switched off"
        yield f"  {node['name']:<7}{node['kind']:<11}{node['address']:<15}{node['state']}{off}"
    yield from (f"  job {job}" for job in found["jobs"])
    yield from (f"  {name} has died; see its log" for name in found["ended"])


if __name__ == "__main__":
    sys.exit(guard(main))
