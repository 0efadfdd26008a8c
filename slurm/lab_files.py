"""What the daemons and namespaces of slurm.lab read: pure texts of the plan of its nodes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import ConfigError

NETWORK = "10.251.7"
"""First three numbers of every address; the network exists only inside the login node."""
LOGIN = f"{NETWORK}.1"
BRIDGE = "slbr0"
KINDS = {"inference": ("inf", 11, 90), "trainer": ("trn", 101, 99)}
"""kind → prefix of its nodes' names, last number of the first address, most nodes."""
CPUS, MEMORY_MB, MOST_GPUS = 16, 64_000, 64
"""What every node claims, whatever the machine has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A compute node: its name, the partition it is made for, its address on the bridge."""

    name: str
    kind: str
    address: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What the cluster consists of."""

    inference: int = 3
    trainer: int = 1
    gpus: int = 8
    """Of each node; null devices by other names."""
    accounting: bool = False

    def __post_init__(self) -> None:
        for kind, (_, _, most) in KINDS.items():
            if not 0 <= getattr(self, kind) <= most:
                raise ConfigError(f"{kind}={getattr(self, kind)} nodes: must be 0 to {most}")
        if not self.inference + self.trainer:
            raise ConfigError("inference=0 and trainer=0 nodes: a cluster needs at least one")
        if not 0 <= self.gpus <= MOST_GPUS:
            raise ConfigError(f"gpus={self.gpus} of a node: must be 0 to {MOST_GPUS}")

    def nodes(self) -> list[Node]:
        return [
            Node(name=f"{prefix}{index}", kind=kind, address=f"{NETWORK}.{first + index}")
            for kind, (prefix, first, _) in KINDS.items()
            for index in range(getattr(self, kind))
        ]


SLURM_CONF = """\
ClusterName=lab
SlurmctldHost=login({login})
SlurmUser=root
AuthType=auth/munge
# a requeued job waits cred_expire + 1 s (by default 121 s) before it starts again
AuthInfo=socket={dir}/munge/socket,cred_expire=5
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool/%n
SlurmctldPidFile={dir}/state/slurmctld.pid
SlurmdPidFile={dir}/spool/slurmd-%n.pid
SlurmctldDebug=verbose
SlurmdDebug=verbose
# nothing that needs control groups or hardware: believe this file about the size of a node
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=5
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
# without this a job that names no memory takes the whole node
DefMemPerCPU=1000
GresTypes=gpu
# heterogeneous jobs are started by backfill only, which by default looks every 30 s
SchedulerType=sched/backfill
SchedulerParameters={scheduler}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
# faults are noticed soon enough for a test, and a node that comes back is used at once
SlurmdTimeout={slurmd_timeout_s}
KillWait=5
ReturnToService=2
MinJobAge=3600
{accounting}
{nodes}
PartitionName=all Nodes=ALL PriorityTier=10
PartitionName=urgent Nodes=ALL PriorityTier=100 PreemptMode=OFF
PartitionName=scavenge Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=5
"""
SCHEDULER = "bf_interval=1,bf_continue,sched_interval=1,batch_sched_delay=0,sched_min_interval=0"
SLURMD_TIMEOUT_S = 15
WITH_ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={login}
AccountingStorageTRES=gres/gpu
# the link to slurmdbd ignores AuthInfo: this is the MUNGE socket, not a password
AccountingStoragePass={dir}/munge/socket"""
WITHOUT_ACCOUNTING = """\
JobCompType=jobcomp/filetxt
JobCompLoc={dir}/log/jobcomp.log"""

SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={dir}/munge/socket
DbdHost=login
DbdAddr={login}
SlurmUser=root
PidFile={dir}/state/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageUser=root
StorageLoc=slurm_acct_db
"""

LOGIN_SCRIPT = f"""\
# $1 the cluster's directory. Makes the namespaces of `sleep` into the login node
set -e
hostname login
mount --rbind /sys/fs/cgroup "$1/cgroup"
mount -t sysfs sysfs /sys  # else it shows the network of the machine
mount --rbind "$1/cgroup" /sys/fs/cgroup
mount --bind "$1/hosts" /etc/hosts
mount --bind "$1/etc" /etc/slurm
ip link set lo up
ip link add {BRIDGE} type bridge
ip addr add {LOGIN}/24 dev {BRIDGE}
ip link set {BRIDGE} up
"""

NODE_SCRIPT = """\
# $1 the cluster's directory, $2 name, $3 address. Is pid 1 of a node: reaps what is orphaned there,
# and all that runs there dies with it. A line on standard input says that the cable is plugged in.
set -e
hostname "$2"
mount -t tmpfs tmpfs /dev/shm
mount -t sysfs sysfs /sys
mount --rbind "$1/cgroup" /sys/fs/cgroup
read -r _
ip link set lo up
ip addr add "$3/24" dev eth0
ip link set eth0 up
# as Docker leaves it on every machine that runs it: the same address everywhere, and a carrier
ip link add docker0 type bridge
ip addr add 172.17.0.1/16 dev docker0
ip link set docker0 up
ip link add veth0 type veth peer name veth1
ip link set veth0 master docker0 up
ip link set veth1 up
slurmd -D -N "$2" -f "$1/etc/slurm.conf" &
while kill -0 $! 2>/dev/null; do wait $! || :; done
echo "slurmd has ended, and so has $2" >&2
"""

SHIM = """\
#!/bin/sh
# {program} on the login node of the cluster in {dir}
is_up() {{
    read -r stat 2>/dev/null </proc/{pid}/stat || return 1
    set -f -- $stat
    [ "${{22}}" = {started} ] && [ "$3" != Z ]
}}
if ! is_up; then
    echo {down} >&2
    exit 1
fi
# sbatch hands PATH on: with a shim in it, srun in the job would be that shim
set -f
IFS=:
kept=
for entry in $PATH; do
    [ -e "$entry/{mark}" ] || kept=$kept:$entry
done
unset IFS
export PATH="${{kept#:}}" SLURM_CONF={conf}
exec nsenter --target {pid} --net --uts --mount --wdns="$PWD" {path} "$@"
"""
SHIM_MARK = ".agentrl-cluster-shims"
"""File in every folder of shims, of whatever cluster."""


def slurm_conf(directory: Path, plan: Plan) -> str:
    accounting = WITH_ACCOUNTING if plan.accounting else WITHOUT_ACCOUNTING
    return SLURM_CONF.format(
        dir=directory,
        login=LOGIN,
        scheduler=SCHEDULER,
        slurmd_timeout_s=SLURMD_TIMEOUT_S,
        accounting=accounting.format(dir=directory, login=LOGIN),
        nodes="\n".join(_node_lines(plan)),
    )


def _node_lines(plan: Plan) -> Sequence[str]:
    lines = [
        f"NodeName={node.name} NodeAddr={node.address} CPUs={CPUS} RealMemory={MEMORY_MB} "
        f"Feature={node.kind} Gres=gpu:{plan.gpus}"
        for node in plan.nodes()
    ]
    default = "inference" if plan.inference else "trainer"
    for kind in KINDS:
        if members := ",".join(node.name for node in plan.nodes() if node.kind == kind):
            is_default = "YES" if kind == default else "NO"
            lines.append(
                f"PartitionName={kind} Nodes={members} PriorityTier=10 Default={is_default}"
            )
    return lines


def files(directory: Path, plan: Plan) -> dict[str, str]:
    """Return every text that daemons and namespaces read, by its path below `directory`."""
    hosts = ["127.0.0.1 localhost", f"{LOGIN} login"]
    hosts += [f"{node.address} {node.name}" for node in plan.nodes()]
    gpus = f"Name=gpu File={directory}/dev/gpu[0-{plan.gpus - 1}]\n" if plan.gpus else ""
    return {
        "etc/slurm.conf": slurm_conf(directory, plan),
        "etc/slurmdbd.conf": SLURMDBD_CONF.format(dir=directory, login=LOGIN),
        "etc/gres.conf": f"AutoDetect=off\n{gpus}",
        "etc/cgroup.conf": "CgroupAutomount=no\n",
        "hosts": "\n".join(hosts) + "\n",
        "login.sh": LOGIN_SCRIPT,
        "node.sh": NODE_SCRIPT,
    }


def shim(directory: Path, program: Path, *, pid: int, started: int) -> str:
    """Return the script that runs `program` on the login node, kept by process `pid`.

    started: that process's start time, so that a later process of the same number is not entered.
    """
    down = f"{program.name}: no cluster is up in {directory}; agentrl cluster up --dir {directory}"
    return SHIM.format(
        program=program.name,
        dir=directory,
        pid=pid,
        started=started,
        down=shlex.quote(down),
        mark=SHIM_MARK,
        conf=shlex.quote(f"{directory}/etc/slurm.conf"),
        path=shlex.quote(str(program)),
    )


# MariaDB, for accounting: reached by a socket only; what it holds is forgotten by the next boot


def database_socket(directory: Path) -> Path:
    return directory / "state" / "mariadb.socket"


def database_install(directory: Path) -> list[str]:
    """Return the command that makes the data directory, which later boots use again."""
    flags = "--no-defaults --user=root --auth-root-authentication-method=socket --skip-test-db"
    return ["mariadb-install-db", *flags.split(), f"--datadir={directory}/database"]


def database_server(directory: Path) -> list[str]:
    flags = "--no-defaults --user=root --skip-networking --innodb-flush-log-at-trx-commit=0"
    paths = [f"--datadir={directory}/database", f"--socket={database_socket(directory)}"]
    return ["mariadbd", *flags.split(), *paths, f"--pid-file={directory}/state/mariadb.pid"]


def database_clear(directory: Path) -> list[str]:
    """Return the command that leaves Slurm's database there and empty."""
    create = "drop database if exists slurm_acct_db; create database slurm_acct_db"
    return ["mariadb", "--no-defaults", f"--socket={database_socket(directory)}", "-e", create]
