import asyncio

import pytest
from rollout_toys import ToyAgent, ToyProvider, shop, task

from agentrl.config import RunConfig
from agentrl.errors import (
    EngineLost,
    GradingError,
    SandboxLost,
    TooManyInfraFailures,
)
from agentrl.events import Grade, GroupEvent, SandboxStart, TrajectoryEvent
from agentrl.rollout.attempt import Attempt, run_attempt
from agentrl.rollout.group import make_group, run_group
from agentrl.rollout.infra import InfraWindow
from agentrl.rollout.outcome import RULES, Outcome
from agentrl.rollout.patch import take_patch


def attempt(made, number=0, **changes):
    wanted = Attempt(**({"draw": 4, "task": task(number), "attempt": 1} | changes))
    return asyncio.run(run_attempt(made, wanted))


def group(made, number=0, attempts=4):
    async def run():
        return await run_group(
            made, 4, task(number), attempts=attempts, slots=asyncio.Semaphore(64)
        )

    return asyncio.run(run())


def raises(error):
    async def grader(task, sandbox, *, image, timeout_s):
        raise error

    return grader


@pytest.mark.parametrize("cause", [cause for cause, rule in RULES.items() if rule.is_graded])
def test_an_end_of_the_policys_doing_is_graded_by_the_tests(cause):
    made = shop(agent=ToyAgent(cause=cause))
    solved, failed = attempt(made, 0), attempt(made, 1)
    assert (solved.cause, solved.reward, failed.reward) == (cause, 1.0, 0.0)


@pytest.mark.parametrize("cause", RULES)
def test_the_table_ties_rewards_to_causes(cause):
    reward = 0.0 if RULES[cause].is_graded else None
    assert Outcome(cause=cause, reward=reward).cause == cause
    with pytest.raises(ValueError, match=r"must be None|needs a number"):
        Outcome(cause=cause, reward=None if reward == 0.0 else 0.0)


def test_a_trajectory_has_the_agents_tokens_phases_and_patch():
    made = attempt(shop())
    assert made.tokens.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 1, 2]
    assert made.loss_mask.sum() == 2
    assert made.patch == "diff --git a/x b/x\n"
    assert (made.seconds["model"], made.seconds["command"]) == (0.25, 0.125)
    assert {"queued", "sandbox_start", "setup", "grade", "total"} <= made.seconds.keys()
    assert (made.draw, made.attempt, made.tries, made.turns) == (4, 1, 1, 1)


ENGINE = {f"4/1/{number}": EngineLost("no engine answered") for number in range(3)}
LOST = {f"4/1/{number}": SandboxLost("gone") for number in range(3)}
BUG = {f"4/1/{number}": KeyError("a bug of ours") for number in range(3)}


def no_image(task):
    raise OSError("no space left")


STAGES = {
    "image": ({"image_of": no_image}, "infra"),
    "sandbox start": ({"provider": ToyProvider(fails=1.0)}, "sandbox_start"),
    "sandbox lost": ({"provider": ToyProvider(loses=True)}, "sandbox_lost"),
    "sandbox lost in the agent": ({"agent": ToyAgent(errors=LOST)}, "sandbox_lost"),
    "engine": ({"agent": ToyAgent(errors=ENGINE)}, "engine_lost"),
    "agent": ({"agent": ToyAgent(errors=BUG)}, "infra"),
    "grading": ({"grader": raises(GradingError("no verdict"))}, "grading"),
    "sandbox lost in grading": ({"grader": raises(SandboxLost("gone"))}, "sandbox_lost"),
    "grader": ({"grader": raises(ZeroDivisionError("a bug of ours"))}, "infra"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_failure_of_ours_in_any_stage_has_its_cause_and_no_reward(stage):
    parts, cause = STAGES[stage]
    made = shop(**parts)
    found = attempt(made)
    assert (found.cause, found.reward, found.tries) == (cause, None, 3)
    assert made.provider.open == 0
    ends = made.events.of(TrajectoryEvent)
    assert [event.trajectory for event in ends] == ["4/1/0", "4/1/1", "4/1/2"]
    assert all(event.cause == cause and event.reward is None and event.detail for event in ends)


def test_a_bugs_traceback_is_in_the_event():
    made = shop(agent=ToyAgent(errors=BUG))
    attempt(made)
    assert "Traceback" in made.events.of(TrajectoryEvent)[0].detail


def test_a_try_that_fails_is_made_again_in_a_new_sandbox():
    made = shop(agent=ToyAgent(errors={"4/1/0": SandboxLost("gone")}))
    found = attempt(made)
    assert (found.cause, found.reward, found.tries) == ("submitted", 1.0, 2)
    assert made.provider.started == 2
    assert [event.ok for event in made.events.of(SandboxStart)] == [True, True]
    assert [event.trajectory for event in made.events.of(Grade)] == ["4/1/1"]


def test_time_in_the_queue_for_a_sandbox_is_told_apart():
    config = RunConfig()
    config.sandbox.max_starts = 1
    toys = ToyProvider()

    class Slow:
        name = "slow"

        async def start(self, image, *, owner):
            await asyncio.sleep(0.02)
            return await toys.start(image, owner=owner)

    made = shop(config, provider=Slow())
    seconds = [one.seconds for one in group(made).trajectories]
    assert all(0.015 < one["sandbox_start"] < 5 for one in seconds)
    assert max(one["queued"] for one in seconds) > 0.05
    starts = made.events.of(SandboxStart)
    assert all(event.seconds >= event.queued_s for event in starts)


def test_no_failure_of_ours_enters_a_groups_mean():
    errors = {f"4/0/{number}": EngineLost("gone") for number in range(3)}
    made = shop(agent=ToyAgent(errors=errors))
    found = group(made)
    assert [one.reward for one in found.trajectories] == [None, 1.0, 1.0, 1.0]
    assert found.dropped == ""
    assert made.events.of(GroupEvent)[0].versions == [1, 1]


def test_a_group_with_too_few_graded_is_dropped_with_the_reason():
    errors = {
        f"4/{attempt}/{number}": EngineLost("gone") for attempt in range(3) for number in range(3)
    }
    found = group(shop(agent=ToyAgent(errors=errors)))
    assert found.dropped == "1 of 4 graded, rollout.min_group=2: engine_lost 3"
    assert make_group(4, "t", found.trajectories, min_group=1).dropped == ""


def test_one_unexpected_exception_costs_one_trajectory():
    config = RunConfig()
    config.rollout.retries = 0
    made = shop(config, agent=ToyAgent(errors={"4/17/0": MemoryError("odd")}))
    found = group(made, attempts=64)
    assert [one.attempt for one in found.trajectories if one.reward is None] == [17]


def test_an_attempt_over_the_groups_time_is_cut_and_the_others_count():
    config = RunConfig()
    config.rollout.group_timeout_s = 0.2

    async def agent(*, trajectory, **rest):
        if trajectory.startswith("4/2/"):
            await asyncio.Event().wait()
        return await ToyAgent()(trajectory=trajectory, **rest)

    made = shop(config, agent=agent)
    found = group(made)
    assert [one.reward for one in found.trajectories] == [1.0, 1.0, None, 1.0]
    assert found.trajectories[2].cause == "group_timeout"
    told = [one for one in made.events.of(TrajectoryEvent) if one.cause == "group_timeout"]
    assert [one.detail for one in told] == ["cancelled: cut at rollout.group_timeout_s"]
    assert made.provider.open == 0


def test_groups_that_are_all_cut_stop_the_run_with_the_table():
    config = RunConfig()
    config.rollout.group_timeout_s, config.rollout.infra_window = 0.1, 8

    async def agent(**rest):
        await asyncio.Event().wait()

    with pytest.raises(TooManyInfraFailures, match=r"group_timeout +8"):
        group(shop(config, agent=agent), attempts=8)


def test_a_cancelled_future_inside_an_attempt_costs_that_try_alone():
    async def agent(*, trajectory, **rest):
        if trajectory == "4/1/0":
            gone = asyncio.get_running_loop().create_future()
            gone.cancel()
            await gone
        return await ToyAgent()(trajectory=trajectory, **rest)

    made = shop(agent=agent)
    found = group(made)
    assert [one.tries for one in found.trajectories] == [1, 2, 1, 1]
    assert [one.reward for one in found.trajectories] == [1.0] * 4


def test_cancelling_a_group_closes_every_sandbox_and_is_never_tried_again():
    agent = ToyAgent(hold=8)
    made = shop(agent=agent)

    async def run():
        running = asyncio.create_task(
            run_group(made, 4, task(), attempts=8, slots=asyncio.Semaphore(64))
        )
        await agent.held.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(run())
    assert made.provider.open == 0
    assert len(agent.seen) == 8
    causes = {event.cause for event in made.events.of(TrajectoryEvent)}
    assert causes == {"cancelled"}


def test_most_sandbox_starts_failing_stops_the_run_with_the_table():
    made = shop(provider=ToyProvider(fails=0.9, seed=3))

    async def run():
        for draw in range(100):
            await run_group(made, draw, task(draw), attempts=8, slots=asyncio.Semaphore(64))

    with pytest.raises(TooManyInfraFailures) as error:
        asyncio.run(run())
    table = str(error.value).splitlines()
    assert "rollout.max_infra_rate=50%" in table[0]
    assert table[1].split() == ["cause", "count", "share", "last", "error"]
    assert table[2].startswith("sandbox_start")
    assert "no room for" in table[2]
    assert made.provider.open == 0
    assert made.provider.started < 40


def test_few_failures_and_cancelled_tries_do_not_stop_a_run():
    window = InfraWindow(window=10, max_rate=0.5)
    for _ in range(50):
        for cause in ("submitted", "engine_lost", "cancelled"):
            window.record(cause, "x")
    assert window.rate == 0.5


def test_a_cut_patch_and_a_broken_git_give_no_patch(tmp_path):
    class Sandbox:
        def __init__(self, **changes):
            self.changes = changes

        async def exec(self, command, *, timeout_s, max_bytes, env=None):
            from agentrl.sandbox.base import ExecResult

            values = {
                "output": command,
                "exit_code": 0,
                "timed_out": False,
                "truncated": False,
                "oom": False,
                "seconds": 0.0,
            }
            return ExecResult(**(values | self.changes))

    git = tmp_path / "testbed" / ".git"
    (git / "refs").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/main\n")
    (git / "refs" / "main").write_text("c0ffee\n")
    whole = asyncio.run(take_patch(task(), Sandbox(), tmp_path))
    assert "c0ffee -- . ':(exclude)test it.py'" in whole
    assert asyncio.run(take_patch(task(), Sandbox(truncated=True), tmp_path)) == ""
    assert asyncio.run(take_patch(task(), Sandbox(exit_code=128), tmp_path)) == ""


def test_a_thousand_trajectories_at_once_share_one_process():
    agent = ToyAgent(hold=1024)
    made = shop(agent=agent)

    async def run():
        slots = asyncio.Semaphore(1024)
        groups = [
            asyncio.create_task(run_group(made, draw, task(draw), attempts=8, slots=slots))
            for draw in range(128)
        ]
        await asyncio.wait_for(agent.held.wait(), 60)
        agent.gate.set()
        return await asyncio.gather(*groups)

    groups = asyncio.run(run())
    assert made.provider.most == 1024
    assert sum(one.reward for made in groups for one in made.trajectories) == 512
