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
from launch.cli import main
from launch.run_dir import RunDir
from slurm import ledger

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
STEPS = 12
CONFIG = """\
extends: {root}/configs/models/tiny-qwen3.yaml
name: tiny
runs_dir: {folder}/runs
agent: {{prompts: {root}/configs/agents/repair.yaml}}
tasks: {{folder: {folder}/tasks, train: 4, held_out: 4, unseen_sites: 2, unseen_functions: 2}}
model: {{path: {folder}/model, hidden_size: 64, intermediate_size: 128, layers: 2, heads: 2}}
sandbox: {{kind: {sandbox}}}
rollout: {{concurrency: 8, attempts_per_task: 4}}
sft: {{traces: 48, expert_accuracy: 0.5, epochs: 12}}
training: {{steps: {steps}, groups_per_step: 2, checkpoint_every: 2}}
evaluation: {{attempts: 2}}
grace_s: 40
"""
Begin = Callable[..., "subprocess.Popen[str]"]
ROOT = Path(__file__).parents[2]


def until(claim: Callable[[], object], what: str, deadline_s: float = 300.0) -> None:
    end = time.monotonic() + deadline_s
    while not claim():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.05)


def agentrl(*argv: object) -> int:
    """Run a command to its end in this process; what it starts are processes of their own."""
    return main([str(word) for word in argv])


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
    assert agentrl("prepare", path) == 0
    learn_two_tasks_by_heart(folder / "tasks")
    assert agentrl("sft", path) == 0
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


def test_a_run_outlives_the_ends_of_its_trainer_of_its_command_and_of_its_launcher(
    config: Path, begin: Begin, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(config, "hurt")
    launcher = begin(*trains(config, "hurt"))
    until(lambda: steps_taken(run) >= 2, "two steps")
    os.kill(trainer_pid(run), signal.SIGKILL)  # the engines stay, the same attempt goes on
    until(lambda: steps_taken(run) >= 4, "two more steps")
    launcher.send_signal(signal.SIGINT)
    said, _ = launcher.communicate(timeout=600)
    assert launcher.returncode == 75, said
    assert "killed by SIGKILL" in said
    assert "agentrl resume" in said
    saved = run.checkpoint_step()
    assert 4 <= saved < STEPS
    assert agentrl("audit", run.path) == 0
    assert leftovers(run.path) == []

    launcher = begin("resume", run.path)
    until(lambda: steps_taken(run) > saved, "a step after the resume")
    launcher.kill()
    launcher.wait()
    until(lambda: not leftovers(run.path), "all processes of a killed launcher end")

    launcher = begin("resume", run.path)
    said, _ = launcher.communicate(timeout=600)
    assert launcher.returncode == 0, said
    assert run.checkpoint_step() == STEPS
    first, lost, last = ledger.read(run.path)
    assert (first.step_begin, first.step_end, first.restarts) == (0, saved, 1)
    assert [line.action for line in (first, lost, last)] == ["stop", "lost", "done"]
    assert agentrl("audit", run.path) == 0
    assert leftovers(run.path) == []
    capsys.readouterr()
    assert agentrl("status", run.path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["state"] == "done"


def test_an_evaluation_is_written_and_reported(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert agentrl("evaluate", config, "--out", "sft-held_out-T1.0") == 0
    folder = run_of(config, "tiny").path / "evaluations" / "sft-held_out-T1.0"
    summary = json.loads((folder / "summary.json").read_bytes())
    assert (summary["tasks"], summary["attempts"]) == (4, 2)
    assert "pass@1" in capsys.readouterr().out
    assert len(json.loads((folder / "preds.json").read_bytes())) == 4
