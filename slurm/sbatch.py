"""All that asks Slurm to do something: sbatch, scancel, scontrol."""

from __future__ import annotations

import logging
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrl.errors import AgentRLError, SubmitError

LEAKS = re.compile(r"(SLURMD?|SBATCH|SRUN|SALLOC|SACCT|SQUEUE|SCANCEL|SCONTROL|PMIX|PMI|PALS)_")
KEPT = ("SLURM_CONF", "SLURM_JWT", "SLURM_CLUSTERS")
"""Where and who the cluster is, not what a job is."""
OF_A_JOB = (
    "CUDA_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)
"""What Slurm sets in a job beside its own names; dropped only inside one."""
OURS = ("AGENTRL_ROLE_MARK", "AGENTRL_LAUNCHER")
"""Of the role that submits, should it be one: the new job is not its child."""
TIMEOUT_S = 120.0
log = logging.getLogger(__name__)


def scrubbed_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without what another job, or a shell born in one, would hand on.

    Nor with a person's own defaults: SQUEUE_PARTITION, say, would hide a job that runs.
    """
    is_inside = "SLURM_JOB_ID" in environ
    return {
        name: value
        for name, value in environ.items()
        if (name in KEPT or not LEAKS.match(name))
        and not (is_inside and name in OF_A_JOB)
        and name not in OURS
    }


def test_only(script: Path, *, dependency: str = "") -> str:  # noqa: PT028  sbatch's word
    """Have Slurm check every component without queueing; return what it said. SubmitError."""
    return _run(["sbatch", "--test-only", *_depends(dependency), str(script)]).stderr.strip()


def submit(script: Path, *, dependency: str = "", extra: Sequence[str] = ()) -> str:
    """Queue `script`; return the id of the job, the leader's for a heterogeneous one.

    dependency: in Slurm's words, such as afterok:12 or singleton. Raises SubmitError.
    """
    words = ["sbatch", "--parsable", *_depends(dependency), *extra, str(script)]
    said = _run(words).stdout.strip().splitlines()
    found = re.fullmatch(r"(\d+)(;.*)?", said[-1]) if said else None  # a federation: 1234;cluster
    if not found:
        raise SubmitError(f"sbatch --parsable {script}: answered {said!r}, not a job id")
    log.info("queued %s as job %s", script, found[1])
    return found[1]


def cancel(job_id: str) -> None:
    """Cancel a job with all its components; one that has ended is left alone."""
    _run(["scancel", leader(job_id)])


def requeue(job_id: str) -> None:
    """Put a job with all its components back into the queue. On a host only, not in a container."""
    _run(["scontrol", "requeue", leader(job_id)])


def send_signal(job_id: str, name: str, *, batch: bool = False) -> None:
    """Signal all steps of all components, as USR2; with `batch` the batch script alone."""
    _run(["scancel", f"--signal={name}", *(["--batch"] if batch else []), leader(job_id)])


def exclude(job_id: str, nodes: Sequence[str]) -> None:
    """Keep a waiting job from nodes: a list in Slurm's words for each component."""
    for part, listed in enumerate(nodes):
        component = f"{leader(job_id)}+{part}" if len(nodes) > 1 else leader(job_id)
        _run(["scontrol", "update", f"JobId={component}", f"ExcNodeList={listed}"])


def leader(job_id: str) -> str:
    """Return the leader's id of `12` or `12+0`. Raises SubmitError for anything else."""
    found = re.fullmatch(r"(\d+)(\+0)?", job_id)
    if not found:
        raise SubmitError(
            f"job {job_id!r}: a heterogeneous job is steered by the id of its leader, such as 12"
        )
    return found[1]


def _depends(dependency: str) -> list[str]:
    return [f"--dependency={dependency}"] if dependency else []


def _run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    done = call(words, error=SubmitError, timeout_s=TIMEOUT_S)
    if done.returncode:
        raise SubmitError(f"{' '.join(words)} exited {done.returncode}: {done.stderr.strip()}")
    return done


def call(
    words: Sequence[str], *, error: type[AgentRLError], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm's as from a shell outside any job, whatever it exits with.

    Raises `error` where it is missing or does not answer.
    """
    what = " ".join(words)
    try:
        return subprocess.run(
            words,
            capture_output=True,
            text=True,
            env=scrubbed_environment(os.environ),
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError as missing:
        raise error(
            f"{what}: no {words[0]} on PATH; run it where Slurm's commands are, on a login node"
        ) from missing
    except subprocess.TimeoutExpired as silence:
        raise error(
            f"{what}: no answer within {timeout_s:g} s; is slurmctld up? (sinfo tells)"
        ) from silence
