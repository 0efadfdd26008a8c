"""The small real Slurm itself: its nodes, its end, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.errors import ClusterError, ConfigError
from slurm import lab_host
from slurm.lab import Lab
from slurm.lab_files import BRIDGE, Plan
from slurm.lab_process import Process, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
NOTICE_S = 120.0
QUIETLY = ("sbatch", "--parsable", "--output=/dev/null")
CLI = (sys.executable, "-m", "launch.cluster")


def agentrl(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `agentrl cluster WORDS`, with more environment."""
    return subprocess.run(
        [*CLI, *words],
        env={**os.environ, **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def on_all_nodes(lab: Lab, script: str) -> dict[str, str]:
    """Run a shell script on every node; return what each printed, on one line."""
    said = lab.run(["srun", "-p", "all", "-N4", "-n4", "-c1", "--label", "sh", "-c", script]).stdout
    names = dict(enumerate(sorted(node.name for node in lab.nodes)))
    lines: dict[str, list[str]] = {name: [] for name in names.values()}
    for line in said.splitlines():
        rank, _, text = line.partition(": ")
        lines[names[int(rank)]].append(text)
    return {name: " ".join(found) for name, found in lines.items()}


def program(folder: Path, name: str, text: str) -> str:
    """Make a program; return a PATH that has it first."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def on_machine(lab: Lab) -> list[str]:
    """Return what the cluster has left on this machine itself: interfaces, mounts.

    By their names, for others make and remove their own meanwhile.
    """
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True)
    names = [line.split()[1].rstrip(":") for line in links.stdout.splitlines()]
    cables = {BRIDGE, *(f"v-{node.name}" for node in lab.nodes)}
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    left = [name for name in names if name.partition("@")[0] in cables]
    return left + [line for line in mounts if str(lab.directory) in line]


def until_idle(lab: Lab, *names: str) -> None:
    """Wait, for a busy machine's nodes do not answer Slurm at once."""
    wait_for(lambda: {lab.states()[name] for name in names} == {"idle"}, NOTICE_S, "idle nodes")


def job_state(lab: Lab, job: str) -> str:
    shown = lab.run(["scontrol", "--oneliner", "show", "job", job]).stdout
    return shown.partition(" JobState=")[2].split()[0]


# Its nodes


def test_every_node_is_a_host_of_its_own(lab: Lab) -> None:
    said = on_all_nodes(lab, 'hostname; cat /proc/1/comm; echo "$(ls /sys/class/net)"; hostname -I')
    for node in lab.nodes:
        words = said[node.name].split()
        assert words[:2] == [node.name, "sh"]
        assert {"lo", "eth0", "docker0"} < set(words)
        assert {node.address, "172.17.0.1"} <= set(words)


def test_shared_memory_is_a_node_s_own_and_files_are_common(lab: Lab, odd_path: Path) -> None:
    said = lab.run(
        [
            "srun",
            "-p",
            "all",
            "-N4",
            "-n4",
            "sh",
            "-c",
            'echo x >"/dev/shm/$(hostname)"; ls /dev/shm',
        ],
        cwd=odd_path,
    )
    assert sorted(said.stdout.split()) == sorted(node.name for node in lab.nodes)
    lab.run(["srun", "-N1", "-n1", "touch", "seen"], cwd=odd_path)
    assert (odd_path / "seen").exists()


def test_a_step_gets_the_gpus_that_it_asked_for(lab: Lab) -> None:
    script = "echo $CUDA_VISIBLE_DEVICES $SLURM_STEP_GPUS $SLURM_GPUS_ON_NODE"
    said = lab.run(["srun", "-N1", "-n1", "--gres=gpu:3", "sh", "-c", script]).stdout
    assert said.split() == ["0,1,2", "0,1,2", "3"]


def test_the_shims_submit_from_outside_and_stay_out_of_the_job(lab: Lab, odd_path: Path) -> None:
    wrap = "--wrap=command -v srun; srun -N1 -n1 hostname"
    done = subprocess.run(
        ["sbatch", "--wait", "--output=job.log", "--partition=trainer", wrap],
        env=lab.environment(),
        cwd=odd_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Submitted batch job" in done.stdout
    srun, host = (odd_path / "job.log").read_text().split()
    assert (Path(srun).parent != lab.login.shims, host) == (True, "trn0")


@pytest.mark.slow
def test_a_killed_node_is_noticed_and_its_job_runs_again_elsewhere(
    lab: Lab, tmp_path: Path
) -> None:
    script = [*QUIETLY, "-N1", "--requeue", f"--wrap=hostname >>{tmp_path}/hosts; sleep 300"]
    job = lab.run(script).stdout.strip()
    hosts = tmp_path / "hosts"
    wait_for(lambda: hosts.exists() and hosts.read_text(), NOTICE_S, "the job's first line")
    first = hosts.read_text().strip()
    lab.kill_node(first)
    wait_for(lambda: lab.states()[first].startswith("down"), NOTICE_S, "Slurm's notice")
    wait_for(lambda: len(hosts.read_text().split()) == 2, NOTICE_S, "the job's second life")
    assert hosts.read_text().split()[1] != first
    assert job_state(lab, job) == "RUNNING"
    lab.start_node(first)
    until_idle(lab, first)


@pytest.mark.slow
def test_urgent_work_takes_the_nodes_of_scavengers(lab: Lab) -> None:
    low = [*QUIETLY, "-p", "scavenge", "-N4", "--requeue", "--wrap=sleep 300"]
    job = lab.run(low).stdout.strip()
    wait_for(lambda: job_state(lab, job) == "RUNNING", NOTICE_S, "the scavenger's start")
    assert lab.run(["srun", "-p", "urgent", "-N4", "-n4", "--exclusive", "true"]).returncode == 0
    assert "Restarts=1" in lab.run(["scontrol", "show", "job", job]).stdout


@pytest.mark.slow
def test_with_accounting_an_ended_job_is_remembered(lab_accounting: Lab) -> None:
    lab_accounting.run(["srun", "-J", "first", "-N1", "-n1", "true"])
    ask = ["sacct", "-n", "-X", "-P", "--name=first", "--format=State,NodeList"]

    def answer() -> str:
        return lab_accounting.run(ask).stdout.strip()

    state, node = wait_for(answer, NOTICE_S, "sacct's answer").split("|")
    assert (state, node[:3]) == ("COMPLETED", "inf")


# Beginning and end


def test_two_clusters_run_side_by_side(lab: Lab, bare: Lab) -> None:
    bare.up(inference=1, trainer=0, gpus=0)
    path = f"{bare.login.shims}:{lab.environment()['PATH']}"
    sinfo = ["sinfo", "--noheader", "-p", "all", "-o", "%D"]
    for environment, count in ((lab.environment(), "4"), ({**os.environ, "PATH": path}, "1")):
        done = subprocess.run(sinfo, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == count
    assert bare.down() == []
    until_idle(lab, *(node.name for node in lab.nodes))


def test_down_ends_all_and_leaves_nothing_on_the_machine(bare: Lab) -> None:
    bare.up(inference=1, trainer=1)
    assert on_machine(bare) == []
    bare.run(["sbatch", "-N1", "--output=/dev/null", "--wrap=sleep 1000"])
    with subprocess.Popen([*bare.login.enter(), "sleep", "1000"]) as shell:
        shims = bare.environment()
        assert bare.down() == []
        assert shell.wait() == -signal.SIGKILL
    assert on_machine(bare) == []
    assert bare.daemons.living() == {}
    done = subprocess.run(["sinfo"], env=shims, capture_output=True, text=True, check=False)
    assert (done.returncode, "no cluster is up in" in done.stderr) == (1, True)


def test_down_says_what_it_leaves(bare: Lab) -> None:
    bare.up(inference=1, trainer=0)
    down = f"{sys.executable} -m launch.cluster down --dir {bare.directory}; echo $?"
    said = bare.run(["sh", "-c", down], cwd=ROOT).stdout  # whoever asks for the end is spared
    assert "left: process" in said
    assert said.split()[-1] == "1"


def test_a_directory_is_used_again_and_its_jobs_are_forgotten(bare: Lab) -> None:
    for _ in range(2):
        bare.up(inference=1, trainer=0)
        job = bare.run([*QUIETLY, "-N1", "--hold", "--wrap=true"]).stdout.strip()
        assert job == "1"
        assert bare.down() == []


def test_records_of_an_earlier_boot_neither_hinder_nor_hurt(bare: Lab) -> None:
    mine = Process.of(os.getpid())
    bare.daemons.remember("munged", replace(mine, boot="another"))
    bare.daemons.remember("login", replace(mine, started=1))
    assert bare.down() == []
    bare.up(inference=1, trainer=0)


def test_up_is_refused_where_a_cluster_is_up(lab: Lab) -> None:
    with pytest.raises(ClusterError, match=r"a cluster is up in .*slurmctld.*take it down first"):
        lab.up()
    until_idle(lab, *(node.name for node in lab.nodes))


def test_a_daemon_that_dies_at_boot_is_quoted_and_nothing_is_left(
    bare: Lab, tmp_path: Path
) -> None:
    path = program(tmp_path / "bin", "slurmctld", "echo 'fatal: no state' >&2; exit 1")
    done = agentrl("up", "--dir", str(bare.directory), PATH=path)
    assert done.returncode == 1
    assert "slurmctld has ended while waiting for all nodes to be idle" in done.stderr
    assert "fatal: no state" in done.stderr
    assert bare.daemons.living() == {}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_up_takes_it_down(
    bare: Lab, tmp_path: Path, number: signal.Signals
) -> None:
    path = program(tmp_path / "bin", "slurmctld", "exec sleep 1000")
    words = [*CLI, "up", "--dir", str(bare.directory)]
    with subprocess.Popen(words, env={**os.environ, "PATH": path}, cwd=ROOT) as booting:
        wait_for(lambda: "trn0" in bare.daemons.living(), NOTICE_S, "the last node")
        booting.send_signal(number)
        assert booting.wait() == 130
    assert bare.daemons.living() == {}


def test_a_second_up_is_refused_and_a_killed_one_is_taken_down(bare: Lab, tmp_path: Path) -> None:
    path = program(tmp_path / "bin", "slurmctld", "exec sleep 1000")
    words = [*CLI, "up", "--dir", str(bare.directory)]
    with subprocess.Popen(words, env={**os.environ, "PATH": path}, cwd=ROOT) as booting:
        wait_for(lambda: "trn0" in bare.daemons.living(), NOTICE_S, "the last node")
        with pytest.raises(ClusterError, match=r"is being booted in .* by another process"):
            bare.up()
        booting.kill()
    assert bare.daemons.living()
    assert bare.down() == []
    bare.up(inference=1, trainer=0)


# What it refuses


def test_a_user_who_is_not_root_is_told(bare: Lab) -> None:
    os.seteuid(65534)
    try:
        with pytest.raises(ClusterError, match="this is uid 65534: run it as root"):
            bare.up()
    finally:
        os.seteuid(0)


def test_missing_packages_are_named_with_the_line_that_installs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    line = "apt-get install -y --no-install-recommends mount slurm-client util-linux$"
    with pytest.raises(ClusterError, match=line):
        lab_host.check_packages(accounting=False)


def test_what_is_missing_is_installed_with_lists_fetched_where_there_were_none(
    bare: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bare.daemons.living() == {}
    program(
        tmp_path / "bin",
        "apt-get",
        f"""cd {tmp_path}; echo "$@" >>said
        [ "$1" = update ] && exit 0
        /usr/bin/grep -q update said || exit 100
        cd bin; for name in sbatch unshare nsenter mount; do /usr/bin/ln -s apt-get $name; done""",
    )
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert lab_host.install(accounting=False) == ["mount", "slurm-client", "util-linux"]
    install = "install -y --no-install-recommends mount slurm-client util-linux"
    assert (tmp_path / "said").read_text().splitlines() == [install, "update", install]


def test_a_kernel_that_gives_no_namespaces_is_quoted(bare: Lab) -> None:
    limit = "echo 0 >/proc/sys/user/max_net_namespaces"
    command = [*CLI, "up", "--dir", str(bare.directory)]
    done = subprocess.run(
        [
            "unshare",
            "--user",
            "--map-root-user",
            "sh",
            "-c",
            f'{limit} && exec "$@"',
            "-",
            *command,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "refuses the namespaces of a node: unshare: unshare failed: No space" in done.stderr
    assert not bare.directory.exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/tmp/" + "x" * 90, "over 70 bytes"),
        ("/tmp/it's a lab", "cannot name it"),
        ("/dev/shm/lab", "a /dev/shm of its own"),
    ],
)
def test_a_directory_that_slurm_cannot_use_is_refused(bare: Lab, name: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Lab(Path(name)).up()
    assert bare.daemons.living() == {}
    assert not Path(name).exists()


def test_the_longest_directory_still_runs_batch_jobs(bare: Lab) -> None:
    room = lab_host.LONGEST_DIRECTORY - len(str(bare.directory.parent)) - 1
    long = Lab(bare.directory.parent / ("x" * room))
    try:
        long.up(inference=11, trainer=0)
        submit = ["sbatch", "--wait", "-w", "inf10", "--output=/dev/null", "--wrap=srun -n1 true"]
        assert long.run(["timeout", "240", *submit]).returncode == 0
    finally:
        assert long.down() == []


@pytest.mark.parametrize("counts", [(0, 0, 8), (91, 1, 8), (3, -1, 8), (3, 1, 65)])
def test_a_plan_that_cannot_be_is_wrong_usage(counts: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match=r"must be|at least one"):
        Plan(inference=counts[0], trainer=counts[1], gpus=counts[2])


# The command


def test_the_commands_boot_show_steer_and_end_a_cluster(bare: Lab) -> None:
    where = ("--dir", str(bare.directory))
    done = agentrl("up", *where, "--inference", "1", "--gpus", "2")
    assert "up in " in done.stdout
    assert f"agentrl cluster env --dir {bare.directory}" in done.stdout
    assert agentrl("exec", *where, "--", "hostname").stdout == "login\n"
    line = agentrl("env", *where).stdout
    shell = subprocess.run(["sh", "-c", f"{line}\nsinfo -h -p all -o %D"], stdout=-1, check=True)
    assert shell.stdout.strip() == b"2"
    assert agentrl("kill-node", *where, "inf0").returncode == 0
    shown = json.loads(agentrl("status", *where, "--json").stdout)
    assert [node["is_on"] for node in shown["nodes"]] == [False, True]
    assert agentrl("kill-node", *where, "inf7").returncode == 2
    assert agentrl("start-node", *where, "inf0").returncode == 0
    done = agentrl("down", *where)
    assert (done.returncode, "logs are in" in done.stdout) == (0, True)
    for words in (("status",), ("env",), ("exec", "true"), ("kill-node", "inf0")):
        assert agentrl(words[0], *where, *words[1:]).returncode == 1
