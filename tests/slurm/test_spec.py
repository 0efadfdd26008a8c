"""What a job may be: everything that Slurm would refuse, or take otherwise, is refused first."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.errors import ConfigError, SpecError
from slurm.spec import OWN_FLAGS, Component, JobSpec, literal

TRAINER = Component(role="trainer")
INFERENCE = Component(role="inference", nodes=3)


def job(*components: Component, **more: Any) -> JobSpec:
    return JobSpec(name=more.pop("name", "run"), components=components or (TRAINER,), **more)


def test_a_spec_error_is_a_wrong_usage() -> None:
    assert issubclass(SpecError, ConfigError)


@pytest.mark.parametrize("name", ["nodes", "tasks_per_node", "cpus_per_task"])
def test_a_component_without_nodes_tasks_or_cpus_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match=rf"{name}=0 in component 'trainer': must be 1 or more"):
        Component(role="trainer", **{name: 0})


@pytest.mark.parametrize("flag", ["--array=1-4", "--array 1-4"])
def test_an_array_is_refused_with_what_to_do(flag: str) -> None:
    with pytest.raises(SpecError, match="no arrays of heterogeneous jobs; submit once for each"):
        Component(role="trainer", extra=(flag,))


@pytest.mark.parametrize("flag", OWN_FLAGS)
def test_a_flag_that_a_field_sets_is_refused_as_extra(flag: str) -> None:
    with pytest.raises(SpecError, match=rf"--{flag}=1.*set by"):
        Component(role="trainer", extra=(f"--{flag}=1",))


@pytest.mark.parametrize("flag", ["-N4", "exclusive", "--x\n--y"])
def test_an_extra_that_is_no_long_flag_is_refused(flag: str) -> None:
    with pytest.raises(SpecError):
        Component(role="trainer", extra=(flag,))


@pytest.mark.parametrize("field", ["name", "comment", "output", "chdir"])
def test_the_word_hetjob_is_refused_in_any_text(field: str) -> None:
    with pytest.raises(SpecError, match=f"{field}='my_HetJob'.*as a directive"):
        job(**{field: "my_HetJob"})


def test_a_newline_in_any_text_is_refused() -> None:
    with pytest.raises(SpecError, match=r"partition=.*control character"):
        Component(role="trainer", partition="a\n#SBATCH --uid=0")


@pytest.mark.parametrize("code", ["%j", "%A", "%t", "%n", "%x", "%"])
def test_a_pattern_that_differs_by_component_is_refused(code: str) -> None:
    with pytest.raises(SpecError, match=r"only %N and %s are safe"):
        job(output=f"logs/{code}")


def test_a_percent_sign_of_a_path_is_made_literal() -> None:
    assert job(output=literal("/a/100% %j/x")).output == "/a/100%% %%j/x"
    assert job(output="logs/%N-%s.log").output == "logs/%N-%s.log"


def test_memory_of_one_component_only_is_refused() -> None:
    with pytest.raises(SpecError, match="mem_gb in job 'run' is set for trainer only"):
        job(Component(role="trainer", mem_gb=64), INFERENCE)


@pytest.mark.parametrize(
    ("signal", "said"),
    [
        ("USR1@60", "NCCL's proxy takes USR1"),
        ("B:SIGUSR1@60", "NCCL's proxy takes USR1"),
        ("USR2", "must read NAME@SECONDS"),
        ("USR2@3600", "comes before the job begins"),
    ],
)
def test_a_signal_that_cannot_serve_is_refused(signal: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        job(signal=signal)


def test_one_allocation_has_one_partition() -> None:
    parts = (Component(role="a", partition="x"), Component(role="b", partition="y"))
    with pytest.raises(SpecError, match="partition in job 'run' is x and y"):
        job(*parts, layout="homogeneous")


def test_a_role_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(SpecError, match="job 'run' has trainer, inference"):
        job(TRAINER, INFERENCE).component("engine")


@pytest.mark.parametrize(
    "bad",
    [
        {"name": " "},
        {"layout": "hetero"},
        {"time_min": 0},
        {"environment": (("A B", "1"),)},
        {"components": ()},
        {"components": (TRAINER, TRAINER)},
    ],
)
def test_a_job_that_cannot_be_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        JobSpec(**({"name": "run", "components": (TRAINER,)} | bad))


@pytest.mark.parametrize("bad", [{"gres": "gpu:8", "gpus_per_node": 8}, {"srun": ("-N2",)}])
def test_a_component_that_says_two_things_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        Component(role="trainer", **bad)
