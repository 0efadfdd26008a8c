"""Asking sbatch, scancel and scontrol: what they get, and what they say back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.errors import SubmitError
from slurm import sbatch
from slurm.sbatch import scrubbed_environment

Fake = Callable[..., Path]


def test_submit_returns_the_leaders_id(fake_program: Fake, odd_path: Path) -> None:
    calls = fake_program("sbatch", "echo 6")
    assert sbatch.submit(odd_path / "a b.sbatch") == "6"
    assert calls.read_text().splitlines() == ["sbatch", "--parsable", f"{odd_path}/a b.sbatch"]


def test_a_federation_names_its_cluster_after_the_id(fake_program: Fake) -> None:
    fake_program("sbatch", "echo '1234;lumi'")
    assert sbatch.submit(Path("x")) == "1234"


def test_a_banner_before_the_id_is_passed_over(fake_program: Fake) -> None:
    fake_program("sbatch", "echo 'welcome'; echo 12")
    assert sbatch.submit(Path("x")) == "12"


def test_an_answer_without_an_id_is_refused(fake_program: Fake) -> None:
    fake_program("sbatch", "echo 'Submitted batch job'")
    with pytest.raises(SubmitError, match="not a job id"):
        sbatch.submit(Path("x"))


def test_submit_repeats_what_sbatch_said(fake_program: Fake) -> None:
    fake_program("sbatch", "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1")
    with pytest.raises(SubmitError, match="exited 1: sbatch: error: invalid partition"):
        sbatch.submit(Path("x"))


def test_a_dependency_goes_to_the_check_and_the_submission(fake_program: Fake) -> None:
    calls = fake_program("sbatch", "echo 7")
    sbatch.test_only(Path("x"), dependency="afterok:6")
    sbatch.submit(Path("x"), dependency="afterok:6")
    assert calls.read_text().count("--dependency=afterok:6") == 2


def test_no_slurm_says_where_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SubmitError, match="no sbatch on PATH; run it where"):
        sbatch.submit(Path("x"))


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: sbatch.cancel("6"), ["scancel", "6"]),
        (lambda: sbatch.cancel("6+0"), ["scancel", "6"]),
        (lambda: sbatch.requeue("6"), ["scontrol", "requeue", "6"]),
        (lambda: sbatch.send_signal("6", "USR2"), ["scancel", "--signal=USR2", "6"]),
    ],
)
def test_a_job_is_steered_by_its_leaders_id(
    fake_program: Fake, act: Callable[[], None], words: list[str]
) -> None:
    calls = fake_program(words[0], "true")
    act()
    assert calls.read_text().splitlines() == words


@pytest.mark.parametrize("job_id", ["6+1", "6_1", "6_[0-3]", "", "all"])
def test_another_components_id_is_refused(job_id: str) -> None:
    with pytest.raises(SubmitError, match="by the id of its leader"):
        sbatch.cancel(job_id)


# The caller's environment


LEAKED = {
    "SLURM_NTASKS": "8",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0xF",
    "SLURM_JOB_ID": "5",
    "SLURM_JOBID": "5",
    "SLURMD_NODENAME": "n1",
    "SQUEUE_PARTITION": "x",
    "SACCT_FORMAT": "x",
    "SBATCH_PARTITION": "x",
    "SRUN_CPUS_PER_TASK": "4",
    "PMIX_RANK": "0",
    "PMI_RANK": "0",
    "AGENTRL_ROLE_MARK": "m",
    "CUDA_VISIBLE_DEVICES": "0",
    "ROCR_VISIBLE_DEVICES": "0",
}


def test_what_another_job_hands_on_is_left_behind() -> None:
    kept = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "SLURM_JWT": "t", "MY_SLURM_X": "1"}
    assert scrubbed_environment(LEAKED | kept) == kept


def test_a_users_own_gpu_mask_stays_outside_a_job() -> None:
    assert scrubbed_environment({"CUDA_VISIBLE_DEVICES": "0"}) == {"CUDA_VISIBLE_DEVICES": "0"}


def test_sbatch_sees_none_of_it(fake_program: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LEAKED.items():
        monkeypatch.setenv(name, value)
    fake_program("sbatch", "env | grep -qE 'SLURM_|SBATCH_|SRUN_|PMI' && exit 1; echo 9")
    assert sbatch.submit(Path("x")) == "9"
