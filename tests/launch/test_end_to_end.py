"""The real commands on a tiny model: real sandboxes, real engine, real steps, real kills."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentrl import events
from launch.run_dir import RunDir
from slurm import ledger

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
STEPS = 6
CONFIG = """\
extends: {root}/configs/models/tiny-qwen3.yaml
name: tiny
runs_dir: {folder}/runs
agent: {{prompts: {root}/configs/agents/repair.yaml}}
tasks: {{folder: {folder}/tasks, train: 4, held_out: 4, unseen_sites: 2, unseen_functions: 2}}
model: {{path: {folder}/model, hidden_size: 64, intermediate_size: 128, layers: 2, heads: 2}}
sandbox: {{kind: {sandbox}}}
rollout: {{concurrency: 8, attempts_per_task: 4}}
sft: {{traces: 100, expert_accuracy: 0.5, epochs: 8}}
training: {{steps: {steps}, groups_per_step: 2, checkpoint_every: 2}}
evaluation: {{attempts: 2}}
grace_s: 20
"""
Begin = Callable[..., "subprocess.Popen[str]"]
ROOT = Path(__file__).parents[2]


def until(claim: Callable[[], object], what: str, deadline_s: float = 300.0) -> None:
    end = time.monotonic() + deadline_s
    while not claim():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.05)


def agentrl(*argv: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "launch.cli", *map(str, argv)],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    print(done.stdout, done.stderr)
    return done


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Starts commands; those that still run at the test's end are killed, and their roles end."""
    started: list[subprocess.Popen[str]] = []

    def start(*argv: object) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "launch.cli", *map(str, argv)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return started[-1]

    yield start
    for launcher in started:
        launcher.kill()
        launcher.wait()
        if launcher.stdout is not None:
            launcher.stdout.close()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared and fine-tuned tiny model, in a folder with an awkward name."""
    folder = tmp_path_factory.mktemp("it's a demo")
    path = folder / "tiny.yaml"
    text = CONFIG.format(folder=folder, root=ROOT, steps=STEPS, sandbox="bubblewrap")
    path.write_text(text)
    assert agentrl("prepare", path).returncode == 0
    learn_two_tasks_by_heart(folder / "tasks")
    assert agentrl("sft", path).returncode == 0
    return path


def learn_two_tasks_by_heart(tasks: Path) -> None:
    """Fine-tune and train on the same two tasks: then a tiny model solves some of its tries."""
    two = (tasks / "sft.jsonl").read_bytes().splitlines(keepends=True)[:2]
    for split in ("sft", "train"):
        (tasks / f"{split}.jsonl").write_bytes(b"".join(two))


def run_of(config: Path, name: str) -> RunDir:
    return RunDir(config.parent / "runs" / name)


def trains(config: Path, name: str) -> list[object]:
    model = config.parent / "runs" / "tiny" / "sft" / "model"
    return ["train", config, f"name={name}", f"model.path={model}"]


def trainer_pid(run: RunDir) -> int:
    """Return the pid of the trainer's newest process, as its log tells it."""
    text = (run.attempt(max(run.attempts())) / "logs" / "trainer-0.err").read_text()
    return int(re.findall(r"trainer on node 0.* pid (\d+)", text)[-1])


def steps_taken(run: RunDir) -> int:
    found = events.read_folder(run.path / "events") if (run.path / "events").is_dir() else []
    return max((one.step for one in found if isinstance(one, events.Step)), default=0)


def leftovers(folder: Path) -> list[str]:
    """Return the command lines of processes that mention `folder`, this test's apart."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in (os.getpid(), os.getppid()):
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if str(folder) in line:
                found.append(line)
    return found


def test_a_trainer_killed_half_way_goes_on_and_the_audit_is_clean(
    config: Path, begin: Begin
) -> None:
    run = run_of(config, "killed")
    launcher = begin(*trains(config, "killed"))
    until(lambda: steps_taken(run) >= STEPS // 2, "half the steps")
    os.kill(trainer_pid(run), signal.SIGKILL)
    said, _ = launcher.communicate(timeout=600)
    assert launcher.returncode == 0, said
    assert "killed by SIGKILL" in said
    assert run.checkpoint_step() == STEPS
    [line] = ledger.read(run.path)
    assert (line.action, line.restarts) == ("done", 1)
    assert agentrl("audit", run.path).returncode == 0
    assert leftovers(run.path) == []


def test_a_stopped_run_resumes_to_its_end(config: Path, begin: Begin) -> None:
    run = run_of(config, "stopped")
    launcher = begin(*trains(config, "stopped"))
    until(lambda: steps_taken(run) >= 1, "the first step")
    launcher.send_signal(signal.SIGINT)
    said, _ = launcher.communicate(timeout=300)
    assert launcher.returncode == 75, said
    assert "agentrl resume" in said
    saved = run.checkpoint_step()
    assert saved >= 1
    assert agentrl("audit", run.path).returncode == 0
    assert agentrl("resume", run.path).returncode == 0
    assert [line.step_begin for line in ledger.read(run.path)] == [0, saved]
    assert run.checkpoint_step() == STEPS
    assert agentrl("audit", run.path).returncode == 0
    assert leftovers(run.path) == []
    found = agentrl("status", run.path, "--json")
    assert json.loads(found.stdout)["state"] == "done"


def test_a_killed_launcher_leaves_no_process_and_its_run_resumes(
    config: Path, begin: Begin
) -> None:
    run = run_of(config, "orphaned")
    launcher = begin(*trains(config, "orphaned"))
    until(lambda: steps_taken(run) >= 1, "the first step")
    launcher.kill()
    launcher.wait()
    until(lambda: not leftovers(run.path), "all its processes end")
    assert agentrl("resume", run.path).returncode == 0
    assert agentrl("audit", run.path).returncode == 0


def test_an_evaluation_is_written_and_reported(config: Path) -> None:
    done = agentrl("evaluate", config, "--out", "sft-held_out-T1.0")
    assert done.returncode == 0
    folder = run_of(config, "tiny").path / "evaluations" / "sft-held_out-T1.0"
    summary = json.loads((folder / "summary.json").read_bytes())
    assert (summary["tasks"], summary["attempts"]) == (4, 2)
    assert "pass@1" in done.stdout
    assert len(json.loads((folder / "preds.json").read_bytes())) == 4
