"""Instant stand-ins for what an attempt needs: sandboxes, an agent, tests. They fail on demand."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

from agentrl.agent.loop import AgentResult
from agentrl.agent.tokens import TokenBuffer
from agentrl.config import RunConfig
from agentrl.engine.base import Generation, VersionSpan
from agentrl.errors import SandboxLost, SandboxStartError
from agentrl.events import NoEvents
from agentrl.rollout.attempt import Workshop
from agentrl.rollout.infra import InfraWindow
from agentrl.sandbox.admission import Admission
from agentrl.sandbox.base import ExecResult
from agentrl.tasks.task import Task, Verdict


class InstantSandbox:
    def __init__(self, provider):
        self.provider = provider
        self.is_closed = False

    async def exec(self, command, *, timeout_s, max_bytes=10_000, env=None):
        if self.provider.loses:
            raise SandboxLost("the machine went away")
        output = "diff --git a/x b/x\n" if "diff" in command else "ok\n"
        return ExecResult(
            output=output, exit_code=0, timed_out=False, truncated=False, oom=False, seconds=0.0
        )

    async def close(self):
        if not self.is_closed:
            self.is_closed = True
            self.provider.open -= 1


class ToyProvider:
    """Starts sandboxes at once; a share of the starts fails, by seed."""

    name = "toy"

    def __init__(self, *, fails=0.0, loses=False, seed=0):
        self.fails, self.loses = fails, loses
        self.random = random.Random(seed)
        self.open = self.most = self.started = 0

    async def start(self, image, *, owner):
        if self.random.random() < self.fails:
            raise SandboxStartError(f"no room for {owner}")
        self.open += 1
        self.started += 1
        self.most = max(self.most, self.open)
        return InstantSandbox(self)

    async def close(self):
        return None


class ToyEvents(NoEvents):
    def __init__(self):
        self.all = []

    def write(self, event):
        self.all.append(event)

    def of(self, kind):
        return [event for event in self.all if isinstance(event, kind)]


def result(cause="submitted", tokens=8, version=1):
    buffer = TokenBuffer(range(tokens))
    buffer.append_sampled(
        Generation(
            token_ids=(1, 2),
            logprobs=(-0.1, -0.2),
            versions=(VersionSpan(version=version, start=0, end=2),),
            finish="stop",
            cached_tokens=0,
            engine="toy",
        )
    )
    return AgentResult(
        cause=cause,
        messages=[],
        submission="",
        turns=1,
        model_s=0.25,
        command_s=0.125,
        buffer=buffer,
        info={},
    )


class ToyAgent:
    """Ends at once with `cause`; raises what `errors` has for a trajectory's id first.

    hold: each waits for `gate`; `held` is set once that many wait.
    """

    def __init__(self, *, cause="submitted", errors=None, hold=0):
        self.cause, self.errors = cause, errors or {}
        self.seen = Counter()
        self.hold = hold
        self.held, self.gate = asyncio.Event(), asyncio.Event()

    async def __call__(self, *, sandbox, trajectory, seed, **rest):
        self.seen[trajectory] += 1
        if trajectory in self.errors:
            raise self.errors[trajectory]
        if self.hold:
            if len(self.seen) >= self.hold:
                self.held.set()
            await self.gate.wait()
        await asyncio.sleep(0)
        await sandbox.exec("true", timeout_s=1)
        return result(self.cause)


async def solves_even(task, sandbox, *, image, timeout_s):
    """A grader: tasks with an even number are solved."""
    good = int(task.instance_id.rpartition("-")[2]) % 2 == 0
    return Verdict(resolved=good, passed=("a",), failed=() if good else ("b",), log="")


def task(number=0):
    return Task(
        instance_id=f"task-{number}",
        repo="r",
        problem_statement="p",
        patch="",
        fail_to_pass=("a",),
        pass_to_pass=(),
        image_name=f"image-{number}",
        test_files=("test it.py",),
    )


def shop(config=None, **parts):
    config = config or RunConfig()
    values = {
        "config": config,
        "node": 0,
        "provider": ToyProvider(),
        "engine": None,
        "tokens": None,
        "prompts": None,
        "image_of": lambda task: Path("/nowhere") / task.image_name,
        "events": ToyEvents(),
        "infra": InfraWindow(
            window=config.rollout.infra_window, max_rate=config.rollout.max_infra_rate
        ),
        "starts": Admission.of(config.sandbox),
        "agent": ToyAgent(),
        "grader": solves_even,
    }
    return Workshop(**(values | parts))
