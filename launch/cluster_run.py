"""A run as a Slurm job: config, JobSpec, script on disk, bash -n, sbatch --test-only, sbatch."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from agentrl.config import RunConfig
from agentrl.config_cluster import ClusterConfig, RoleResources
from agentrl.errors import ConfigError, SubmitError
from containers.entering import enter_script
from launch import submission
from launch.command import say
from launch.image_run import container_of
from launch.run_dir import RunDir
from launch.suspects import suspects
from slurm import sbatch
from slurm.files import publish
from slurm.render import check_bash, render, srun_flags
from slurm.spec import Component, JobSpec, literal

TEMPLATE = "run.sh.j2"
SCRIPT, DRAFT = "script.sbatch", "draft.sbatch"
MARK = "$SLURM_JOB_ID.$SLURM_STEP_ID.$SLURMD_NODENAME"
"""AGENTRL_ROLE_MARK of a role's step."""
LOG = "host.log"
"""The batch script's own output, of all lives of the job."""
log = logging.getLogger(__name__)


def launch(run: RunDir, argv: Sequence[str], *, began: str) -> None:
    """Queue the run, say its job id and what to type next.

    Raises LaunchError if it is queued or running already, SubmitError in sbatch's own words.
    """
    submission.refuse_if_living(run)
    config = run.config()
    number = submission.next_number(run)
    folder = submission.folder_of(run, number)
    script = folder / SCRIPT
    hosts = avoidable(config, run, number)
    publish(script, script_of(config, run, number, began=began, avoid=hosts).encode())
    check_bash(script)
    sbatch.test_only(script)
    run.stop_file.unlink(missing_ok=True)
    jobs: list[str] = []
    for _ in range(config.cluster.chain_depth if config.cluster.requeue == "chain" else 1):
        # not `singleton`: the components of one job have one name, and wait for each other for ever
        jobs.append(sbatch.submit(script, dependency=f"afterany:{jobs[-1]}" if jobs else ""))
    submission.record(run, number, jobs, began=began, cluster=config.cluster.name, argv=list(argv))
    say(f"job {', '.join(jobs)} on cluster {config.cluster.name}; its log: {folder / LOG}")
    for command in ("watch", "status", "stop"):
        say(f"$ agentrl {command} {run.path}")


def show(config: RunConfig) -> int:
    """Print the script that `launch` would queue next; write nothing. Return 0."""
    if not config.cluster.is_slurm:
        raise ConfigError("--dry-run with cluster=local: there is no script; give cluster=NAME")
    run = RunDir(config.run_dir.absolute())
    sys.stdout.write(script_of(config, run, submission.next_number(run), began="started"))
    return 0


def avoidable(config: RunConfig, run: RunDir, number: int) -> list[str]:
    """Return the suspect nodes that the job can do without, as Slurm itself says; all or none."""
    found = suspects(run)
    if not found:
        return []
    hosts = [one.host for one in found]
    draft = submission.folder_of(run, number) / DRAFT
    publish(draft, script_of(config, run, number, began="", avoid=hosts).encode())
    try:
        sbatch.test_only(draft)
    except SubmitError as error:
        log.warning("not staying away from %s: %s", ", ".join(hosts), error)
        return []
    finally:
        draft.unlink()
    for one in found:
        log.warning(
            "staying away from %s: %s; %s", one.host, one.reason, f"remove {one.file} to use it"
        )
    return hosts


def exclusions(config: RunConfig, run: RunDir, number: int) -> list[str]:
    """Return what each component, as Slurm sees them, is to be kept from; nothing without suspects.

    It holds what the config excludes: Slurm's update of a queued job replaces the list.
    """
    hosts = avoidable(config, run, number)
    if not hosts:
        return []
    spec = job_spec(config, run, number, avoid=hosts)
    lists = [component.exclude for component in spec.components]
    if spec.is_het:
        return lists
    return [",".join(dict.fromkeys(lists))]


def script_of(
    config: RunConfig, run: RunDir, number: int, *, began: str, avoid: Sequence[str] = ()
) -> str:
    """Return the batch script's text; the same for the same arguments.

    avoid: nodes besides those that the config excludes.
    """
    spec = job_spec(config, run, number, avoid=avoid)
    container = container_of(config, run)
    return render(
        TEMPLATE,
        spec,
        run=run.path,
        submission=number,
        began=began,
        grace_s=round(config.grace_s),
        python=[sys.executable],
        mark=MARK,
        enter=enter_script(container, MARK) if container else "",
        is_chain=config.cluster.requeue == "chain",
        attempts=config.max_attempts_without_progress,
        trainer_count=spec.component("trainer").nodes,
        trainer_flags=_flags_of_one_node(spec, "trainer"),
        inference_flags=_flags_of_one_node(spec, "inference"),
        wishes=_network_wishes(config.cluster),
    )


def job_spec(config: RunConfig, run: RunDir, number: int, *, avoid: Sequence[str] = ()) -> JobSpec:
    """Translate the run's choices into what is asked of Slurm. Raises ConfigError, SpecError."""
    cluster = config.cluster
    if 0 < cluster.signal_s <= config.grace_s:
        raise ConfigError(
            f"cluster.signal_s={cluster.signal_s} is not over grace_s={config.grace_s:g}: the "
            "limit would come before the roles have had their time to save; raise the first"
        )
    return JobSpec(
        name=config.name,
        components=(
            _component("trainer", 1, cluster.trainer, avoid),
            _component("inference", config.rollout.nodes, cluster.inference, avoid),
        ),
        layout="het" if cluster.layout == "het" else "homogeneous",
        account=cluster.account,
        qos=cluster.qos,
        reservation=cluster.reservation,
        time_min=cluster.time_min,
        signal=f"B:USR2@{cluster.signal_s}" if cluster.signal_s else "",
        requeue=cluster.requeue == "requeue",
        output=literal(str(submission.folder_of(run, number) / LOG)),
        modules=tuple(cluster.modules),
        environment=tuple(cluster.environment.items()),
    )


def _network_wishes(cluster: ClusterConfig) -> list[str]:
    pin = ["--pin", cluster.interface_pin] if cluster.interface_pin else []
    return pin + [word for hint in cluster.interface_hints for word in ("--hint", hint)]


def _component(role: str, nodes: int, resources: RoleResources, avoid: Sequence[str]) -> Component:
    return Component(
        role=role,
        nodes=nodes,
        cpus_per_task=resources.cpus_per_task,
        gpus_per_node=resources.gpus_per_node,
        gres=resources.gres,
        mem_gb=resources.mem_gb,
        partition=resources.partition,
        constraint=resources.constraint,
        exclude=",".join(filter(None, [resources.exclude, *avoid])),
        extra=tuple(resources.extra),
        srun=tuple(resources.srun),
    )


def _flags_of_one_node(spec: JobSpec, role: str) -> list[str]:
    """Return srun's flags of a role's step on one node, which the script names."""
    flags = srun_flags(spec, role, nodes=1)
    return [flag for flag in flags if not flag.startswith("--relative")]
