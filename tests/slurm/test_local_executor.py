"""HetLocalExecutor on real processes."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import role_functions as roles
from processes import is_gone
from submitit.core.utils import FailedJobError, UncompletedJobError

from agentrl.errors import LaunchError
from slurm.local import HetLocalExecutor, HetLocalJob


def until(claim: Callable[[], bool], what: str, deadline_s: float = 120.0) -> None:
    end = time.monotonic() + deadline_s
    while not claim():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.02)


def until_gone(pids: list[int]) -> None:
    """A process that was killed is there until the kernel has taken it down."""
    until(lambda: all(map(is_gone, pids)), f"the end of {pids}")


def pids_in(folder: Path) -> list[int]:
    until((folder / "pids").is_file, "the role wrote its pids")
    return [int(pid) for pid in (folder / "pids").read_text().split()]


def test_results_come_by_role_in_the_order_of_nodes(odd_path: Path) -> None:
    executor = HetLocalExecutor(odd_path)
    executor.update_parameters(nodes={"inference": 2})
    job = executor.submit(
        {
            "trainer": functools.partial(roles.add, 1, b=2),
            "inference": functools.partial(roles.name_node, "it's "),
        }
    )
    assert job.results() == {"trainer": [3], "inference": ["it's 0", "it's 1"]}
    assert (job.state, job.done(), job.exception()) == ("COMPLETED", True, None)
    assert job.stdout("inference", 1) == "hello from it's \n"
    assert HetLocalJob.load(odd_path, job.job_id).results() == job.results()


def test_a_failure_is_told_with_its_role_and_its_traceback(tmp_path: Path) -> None:
    job = HetLocalExecutor(tmp_path).submit(
        {
            "trainer": functools.partial(roles.fail, "no luck"),
            "inference": functools.partial(roles.add, 1, 1),
        }
    )
    errors = job.exceptions()
    assert list(errors) == [("trainer", 0)]
    assert "trainer task 0 failed" in str(errors["trainer", 0])
    assert "raise ValueError(message)\nValueError: no luck" in str(errors["trainer", 0])
    assert job.state == "FAILED"
    assert job.states()["inference", 0] == "COMPLETED"
    with pytest.raises(FailedJobError, match="no luck"):
        job.results()


def test_a_killed_role_is_an_uncompleted_one_with_code_137(tmp_path: Path) -> None:
    job = HetLocalExecutor(tmp_path).submit({"trainer": roles.kill_itself})
    assert isinstance(job.exception(), UncompletedJobError)
    assert job.returncode("trainer") == 137
    assert "exit code 137" in str(job.exception())


def test_a_result_that_json_cannot_carry_is_a_failure_that_says_so(tmp_path: Path) -> None:
    job = HetLocalExecutor(tmp_path).submit({"trainer": roles.unprintable})
    assert "which JSON cannot carry" in str(job.exception())


def test_cancel_ends_a_role_and_what_it_put_in_other_sessions(tmp_path: Path) -> None:
    job = HetLocalExecutor(tmp_path).submit({"inference": roles.wait_for_ever}, str(tmp_path))
    pids = pids_in(tmp_path)
    job.cancel()
    assert job.state == "CANCELLED"
    until_gone(pids)


def test_a_role_that_dies_takes_its_children_along(tmp_path: Path) -> None:
    job = HetLocalExecutor(tmp_path).submit({"inference": roles.wait_for_ever}, str(tmp_path))
    pids = pids_in(tmp_path)
    os.kill(pids[0], signal.SIGKILL)
    job.wait(120)
    until_gone(pids)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_reaches_the_function(tmp_path: Path, number: signal.Signals) -> None:
    job = HetLocalExecutor(tmp_path).submit({"trainer": roles.until_term}, str(tmp_path))
    until((tmp_path / "ready").is_file, "the role is ready")
    job.signal("trainer", number)
    assert job.results() == {"trainer": [number.name]}


def test_a_role_starts_again_while_the_other_stays(tmp_path: Path) -> None:
    job = HetLocalExecutor(tmp_path, logs=tmp_path / "logs").submit(
        {
            "trainer": functools.partial(roles.name_node, "t"),
            "inference": functools.partial(roles.wait_for_ever, str(tmp_path)),
        }
    )
    inference = pids_in(tmp_path)[0]
    until(lambda: job.returncode("trainer") == 0, "the trainer's end")
    job.start("trainer")
    until(lambda: job.returncode("trainer") == 0, "its second end")
    assert not is_gone(inference)
    assert job.stdout("trainer") == "hello from t\nhello from t\n"
    with pytest.raises(LaunchError, match="still runs"):
        job.start("inference")
    job.cancel()


def test_nothing_runs_on_once_the_launcher_is_killed(tmp_path: Path) -> None:
    code = f"import role_functions; role_functions.submit_and_wait({str(tmp_path)!r})"
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen([sys.executable, "-c", code], env=env) as launcher:
        pids = pids_in(tmp_path)
        launcher.kill()
    until_gone(pids)
    assert not list(tmp_path.glob("*_result.json"))


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda: 1, "not importable by name"),
        (functools.partial(roles.add, object()), "not plain JSON"),
        (functools.partial(roles.add, (1, 2)), "would arrive as"),
        ("text".upper, "not importable by name"),
    ],
)
def test_what_does_not_go_by_reference_is_refused(
    tmp_path: Path, function: Callable[..., object], said: str
) -> None:
    with pytest.raises(LaunchError, match=said):
        HetLocalExecutor(tmp_path).submit({"trainer": function})


def test_wrong_parameters_and_arrays_are_refused(tmp_path: Path) -> None:
    executor = HetLocalExecutor(tmp_path)
    with pytest.raises(LaunchError, match="must be one of"):
        executor.update_parameters(gpus=1)
    executor.update_parameters(nodes={"inference": 1})
    with pytest.raises(LaunchError, match="each must be a role"):
        executor.submit({"trainer": roles.kill_itself})
    with pytest.raises(LaunchError, match="arrays"), executor.batch():
        executor.submit({"trainer": roles.kill_itself})


def test_slurm_imports_nothing_heavy() -> None:
    code = (
        "import slurm.local, slurm.task, slurm.verdict, sys; print(sorted({'torch', 'numpy',"
        " 'transformers', 'pyarrow', 'aiohttp', 'omegaconf', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
