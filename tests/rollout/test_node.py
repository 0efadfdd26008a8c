"""One node for real: embedded engine, worker processes, sandboxes of the host, a random model."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from transformers import AutoModelForCausalLM

from agentrl.config import RunConfig, save
from agentrl.errors import TaskError, TooManyInfraFailures
from agentrl.events import EventWriter, TrajectoryEvent, read_folder
from agentrl.handoff.spool import list_spool, read_group
from agentrl.rollout.node import run_node
from agentrl.rollout.view import EnginesFile
from agentrl.rollout.worker_end import STOPPED
from agentrl.tasks.prepare import prepare
from agentrl.weights import push
from agentrl.weights.version import publish_version, reannounce

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Tasks and a random model, made once."""
    folder = tmp_path_factory.mktemp("it's data")
    prepare(settings(folder))
    return folder


def settings(data, runs=None):
    config = RunConfig(name="node", runs_dir=str(runs or data))
    config.model.init, config.model.path = "qwen3", str(data / "model")
    config.model.hidden_size, config.model.intermediate_size, config.model.layers = 32, 64, 1
    config.model.heads, config.model.head_dim = 2, 16
    config.tasks.folder = str(data / "tasks")
    config.tasks.train, config.tasks.held_out = 24, 4
    config.sft.traces = 20
    config.tasks.unseen_sites = config.tasks.unseen_functions = 2
    config.sandbox.kind = "process"
    config.agent.prompts = str(ROOT / config.agent.prompts)
    config.agent.tokens_per_turn = 8
    config.rollout.workers = 2
    config.rollout.attempts_per_task = 2
    config.training.groups_per_step = 3
    return config


def publish(config, version, done=False, consumed=()):
    model = AutoModelForCausalLM.from_pretrained(config.model.path)
    return publish_version(
        config.run_dir / "weights",
        run=config.name,
        attempt=1,
        version=version,
        step=version,
        tensors=model.named_parameters(),
        model_folder=Path(config.model.path),
        consumed=list(consumed),
        done=done,
    )


def begin(config):
    config.run_dir.mkdir(parents=True, exist_ok=True)
    save(config, config.run_dir / "config.yaml")
    return asyncio.create_task(
        run_node(
            config,
            node=0,
            attempt=1,
            stop=lambda: False,
            events=EventWriter(config.run_dir / "events", "inference", node="0"),
        )
    )


def engines_of(config):
    """Return what the node tells its workers of its engines now."""
    file = EnginesFile(config.run_dir / "attempts" / "0001", 0)
    file.urls()
    return file


async def until(condition, running):
    deadline = time.monotonic() + 600
    while not condition():
        if running.done():
            running.result()
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def workers():
    """Return our node's worker processes; what ends meanwhile is in none of psutil's snapshots."""
    own = ["-m", "agentrl.rollout.worker", str(os.getpid())]
    shown = ((one.pid, one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"]))
    return [pid for pid, words in shown if [*words[1:3], *words[-1:]] == own]


def test_a_node_serves_versions_and_restarts_a_killed_worker(data, tmp_path):
    config = settings(data, tmp_path)
    config.weights = "collective"  # its engines would take part, and versions come by disk
    spool, attempt_dir = config.run_dir / "spool", config.run_dir / "attempts" / "0001"

    async def run():
        push.tell_members(attempt_dir, 0, {"engine-0": "http://of-a-role-that-was-killed"})
        running = begin(config)
        await until(lambda: not push.members(attempt_dir), running)
        publish(config, 0)
        await until(lambda: len(list_spool(spool)) == 6, running)
        assert len(push.members(attempt_dir)) == config.engine.count
        first = engines_of(config).weights()
        killed = workers()[0]
        os.kill(killed, signal.SIGKILL)
        await until(lambda: len(set(workers()) - {killed}) == 2, running)
        announced = publish(config, 1, consumed=[])
        await until(lambda: engines_of(config).weights() != first, running)
        reannounce(config.run_dir / "weights", announced, consumed=[[0, 2]])
        await until(lambda: len(list_spool(spool)) == 9, running)
        reannounce(config.run_dir / "weights", announced, done=True)
        return await running

    assert asyncio.run(run()) == 0
    assert push.members(attempt_dir) == []
    groups = [read_group(path) for path in list_spool(spool).values()]
    assert [group.draw for group in groups] == list(range(9))
    versions = [
        {span.version for one in group.trajectories for span in one.versions} for group in groups
    ]
    assert versions[:6] == [{0}] * 6
    assert versions[6:] == [{1}] * 3
    assert all(one.reward is not None for group in groups for one in group.trajectories)
    ends = read_folder(config.run_dir / "events")
    assert sum(isinstance(event, TrajectoryEvent) for event in ends) >= 18
    assert workers() == []


def test_a_nodes_workers_hand_up_the_table_of_causes(data, tmp_path):
    config = settings(data, tmp_path)
    config.sandbox.start_timeout_s = 1e-4
    config.rollout.infra_window = 10

    async def run():
        running = begin(config)
        publish(config, 0)
        await running

    with pytest.raises(TooManyInfraFailures, match="sandbox_start"):
        asyncio.run(run())
    assert workers() == []


def test_a_nodes_workers_that_have_no_tasks_say_so_and_are_not_started_again(data, tmp_path):
    config = settings(data, tmp_path)
    config.tasks.folder = str(tmp_path / "none")

    async def run():
        running = begin(config)
        publish(config, 0)
        await running

    with pytest.raises(TaskError, match=r"none/train.jsonl: no such file"):
        asyncio.run(run())


def test_a_worker_whose_node_process_died_while_it_started_ends(data, tmp_path):
    config = settings(data, tmp_path)
    config.run_dir.mkdir(parents=True)
    save(config, config.run_dir / "config.yaml")
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    words = [str(config.run_dir), "0", "0", "1", str(dead.pid)]
    done = subprocess.run(
        [sys.executable, "-m", "agentrl.rollout.worker", *words], timeout=300, check=False
    )
    assert done.returncode == STOPPED
