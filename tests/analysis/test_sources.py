"""Each adapter on a file of real shape: what it knows, what it passes over, what it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from agentrl import events
from analysis import step_time, throughput, trajectory_time
from analysis.run_files import Run, load_run
from analysis.sources.adapted import Adapted, Source
from analysis.sources.harbor import Harbor
from analysis.sources.mini_swe_agent import MiniSweAgent
from analysis.sources.sglang import SglangLog, SglangMetrics
from analysis.sources.slime import RolloutDump, SlimeLog
from analysis.sources.slurm import Sacct, SlurmLog
from analysis.sources.swebench import SwebenchReport

FIXTURES = Path(__file__).parent / "fixtures"


def adapt(source: Source, *names: str) -> Adapted:
    into = Adapted()
    source.read([FIXTURES / name for name in names], into)
    return into


def report_on(folder: Path, name: str) -> Run:
    shutil.copytree(FIXTURES / name, folder / "logs")
    return load_run(folder / "logs")


def test_decode_lines_of_three_sglang_versions_give_the_same_facts() -> None:
    old = adapt(SglangLog(), "sglang/engine-0.3.log")
    new = adapt(SglangLog(), "sglang/engine-0.5.log")
    metrics = [e for e in old.events + new.events if isinstance(e, events.EngineMetrics)]
    facts = [(e.running, e.queued, e.token_usage, e.throughput) for e in metrics]
    assert facts == [
        (1, 0, 0.0, 147.64), (233, 317, 0.82, 4594.01), (6, 0, 0.04, 1374.02),
        (18, 3, 0.71, 2520.18), (4, 1, 0.31, 99.5),
    ]  # fmt: skip
    assert [e.graph_passes for e in metrics] == [0, 0, 1, 1, 0]


def test_lines_that_sglang_is_not_known_to_write_are_shown_not_guessed() -> None:
    found = adapt(SglangLog(), "sglang/engine-0.5.log")
    assert found.unknown == {
        "decode batch without running requests or throughput": 1, "no known line of SGLang": 1,
    }  # fmt: skip
    said = " ".join(found.say("SGLang log"))
    assert "Quantum flux" in said
    assert [e.cause for e in found.events if isinstance(e, events.EngineFault)] == [
        "Memory access fault"
    ]


def test_a_prometheus_dump_gives_one_sample_a_rank_at_its_time() -> None:
    found = adapt(SglangMetrics(), "sglang/metrics-1790000000.prom")
    first, second = found.events
    assert isinstance(first, events.EngineMetrics)
    assert (first.end, first.running, first.queued, first.token_usage) == (1.79e9, 4, 3, 0.28)
    assert first.generated_tokens == 139_795
    assert isinstance(second, events.EngineMetrics)
    assert second.engine.endswith("/tp_rank1")
    assert found.unknown["no sample of SGLang"] == 1


def test_components_of_one_heterogeneous_job_are_one_launch_attempt() -> None:
    found = adapt(Sacct(), "slurm/sacct.txt")
    begun = [e for e in found.events if isinstance(e, events.LaunchAttempt) and e.phase == "begin"]
    ended = [e for e in found.events if isinstance(e, events.LaunchAttempt) and e.phase == "end"]
    assert [e.reason for e in begun] == [
        "Slurm job 11, 2 components, queued 300 s", "Slurm job 11, 2 components, queued 116 s",
    ]  # fmt: skip
    assert [e.reason for e in ended] == ["NODE_FAIL", "COMPLETED"]
    assert ended[0].end - begun[0].start == 3604
    assert (found.passed["steps"], found.passed["jobs that did not start"]) == (2, 1)
    assert sum(found.unknown.values()) == 1


def test_slurms_logs_say_why_a_job_ended() -> None:
    found = adapt(SlurmLog(), "slurm/slurmctld.log", "slurm/job-11.out")
    names = [e.name for e in found.events if isinstance(e, events.Signal)]
    assert names == [
        "node failed", "requeued", "time limit", "node failure", "time limit", "srun: Killed",
    ]  # fmt: skip
    assert set(found.examples.values()) == {
        "[2026-11-29T12:00:09.000] The moon is in the seventh house", "epoch 3 loss 0.5",
    }  # fmt: skip


def test_a_slime_log_gives_the_published_step(tmp_path: Path) -> None:
    run = report_on(tmp_path, "slime")
    rows = step_time.table(run)
    assert [(r.update, r.wait, r.logprob) for r in rows] == [(131, 60, 16)] * 2
    assert [r.publish for r in rows] == [0, 23]
    assert [r.total for r in rows] == [208, 208]
    (first, _) = run.of(events.Step)
    assert (first.metrics["reward"], first.metrics["gap"]) == (0.25, 0.011)
    assert first.metrics["zero_signal"] == 26


def test_what_slime_did_not_write_as_numbers_is_refused() -> None:
    found = adapt(SlimeLog(), "slime/train.log")
    assert found.unknown["no known line of slime"] == 2
    assert found.passed["timers"] == 1


def test_a_rollout_dump_tells_truncated_from_aborted() -> None:
    found = adapt(RolloutDump(), "slime/rollout_0.jsonl")
    facts = [(e.cause, e.reward) for e in found.events if isinstance(e, events.TrajectoryEvent)]
    assert facts == [("submitted", 1.0), ("token_limit", 0.0), ("cancelled", None)]
    assert found.unknown == {"not JSON": 1}


def test_a_mini_swe_agent_trajectory_is_timed_by_its_messages(tmp_path: Path) -> None:
    found = adapt(MiniSweAgent(), "mini/django__django-11099.traj.json", "mini/broken.traj.json")
    calls = [e.seconds for e in found.events if isinstance(e, events.ModelCall)]
    tools = [(e.seconds, e.timed_out) for e in found.events if isinstance(e, events.ToolCall)]
    assert (calls, tools) == ([5.0, 3.5], [(1.5, False), (2.0, True)])
    (done,) = [e for e in found.events if isinstance(e, events.TrajectoryEvent)]
    assert (done.cause, done.reward, done.turns, done.seconds) == ("ungraded", None, 2, 12.0)
    assert found.unknown == {"not JSON": 1}


def test_a_swe_bench_report_grades_the_trajectories_beside_it(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "mini", tmp_path / "logs")
    shutil.copy(FIXTURES / "swebench" / "m1.run-1.json", tmp_path / "logs")
    run = load_run(tmp_path / "logs")
    (row,) = trajectory_time.table(run)
    assert (row.model, row.command, row.total) == (8.5, 3.5, 12.0)
    assert [e.reward for e in run.of(events.TrajectoryEvent)] == [1.0]


def test_a_harbor_trial_gives_its_phases_and_steps(tmp_path: Path) -> None:
    run = report_on(tmp_path, "harbor")
    (row,) = trajectory_time.table(run)
    assert (row.setup, row.sandbox_start, row.model, row.grade) == (8, 2, 40, 7)
    assert (row.backend, row.turns, row.other) == ("docker", 2, 3)
    (lost,) = [e for e in run.of(events.TrajectoryEvent) if e.reward is None]
    assert (lost.cause, lost.detail) == ("infra", "EnvironmentStartTimeoutError")


def test_swe_bench_errors_are_not_failures() -> None:
    found = adapt(SwebenchReport(), "swebench/m1.run-1.json", "swebench/report.json")
    first, second = found.evaluations
    assert (first.model, first.tasks, first.pass_at[1].value) == ("m1", 3, pytest.approx(1 / 3))
    assert first.causes["error"] == 1
    assert second.per_task == {"django__django-1": 1.0}


def test_a_folder_of_logs_is_reported_like_a_run(tmp_path: Path) -> None:
    run = report_on(tmp_path, "sglang")
    assert len(run.of(events.EngineMetrics)) == 7
    assert throughput.table(run) == []
    assert any("SGLang log: 6 of 12" in problem for problem in run.problems)
    for ours in ("config.yaml", "provenance.json", "evaluations/", "events/"):
        assert not any(ours in problem for problem in run.problems)


def test_pickles_and_strangers_are_named_and_left_alone(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "slime", tmp_path / "logs")
    (tmp_path / "logs" / "rollout_1.pt").write_bytes(b"PK\3\4")
    (tmp_path / "logs" / "notes.md").write_text("# notes")
    said = " ".join(load_run(tmp_path / "logs").problems)
    assert "rollout_1.pt is a pickle" in said
    assert "notes.md" in said


@pytest.mark.parametrize("source", [Sacct(), SlurmLog(), SglangLog(), SlimeLog(), Harbor()])
def test_an_adapter_refuses_bytes_that_are_no_text(source: Source, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(bytes(range(256)) * 4)
    into = Adapted()
    source.read([path], into)
    assert into.events == []
    assert sum(into.unknown.values()) > 0
