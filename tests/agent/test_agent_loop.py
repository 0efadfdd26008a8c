"""The loop: its ends, its limits, and what goes into the context."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from agent_toys import ScriptedEngine, ScriptedSandbox, block, call, make_task, ran

from agentrl import events as ev
from agentrl.agent.loop import AgentResult, run_agent
from agentrl.agent.prompts import Prompts
from agentrl.agent.record import SUBMIT, clip
from agentrl.agent.tokens import ChatTokens
from agentrl.config import AgentConfig
from agentrl.engine.base import Generation, Sampling
from agentrl.errors import EngineLost, SandboxLost
from agentrl.rollout.outcome import RULES
from agentrl.sandbox.base import ExecResult

CONFIG = AgentConfig(max_turns=6, tokens_per_turn=200, tokens_per_trajectory=4000)
HAND_IN = f"echo {SUBMIT} && cat p"
RESULTS: dict[str, ExecResult | Exception] = {
    HAND_IN: ran(f"{SUBMIT}\ndiff --git\n+x\n"),
    "ls": ran("a.py\n", seconds=0.5),
    "slow": ran("half", timed_out=True, seconds=10.0),
    "lost": SandboxLost("the sandbox is gone"),
}


class Clock:
    """A clock that only engines and tests move."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class SlowEngine(ScriptedEngine):
    """Moves the clock at each call."""

    clock = Clock()
    seconds = 0.0

    async def generate(
        self, input_ids: list[int], sampling: Sampling, *, trajectory: str
    ) -> Generation:
        self.clock.now += self.seconds
        return await super().generate(input_ids, sampling, trajectory=trajectory)


def run(
    tokens: ChatTokens,
    prompts: Prompts,
    replies: Sequence[str | Exception],
    config: AgentConfig = CONFIG,
    *,
    engine_s: float = 0.0,
    events: ev.Writer | None = None,
    sandbox: ScriptedSandbox | None = None,
) -> tuple[AgentResult, SlowEngine, ScriptedSandbox]:
    engine = SlowEngine(tokens, replies)
    engine.seconds, engine.clock = engine_s, Clock()
    sandbox = sandbox or ScriptedSandbox(RESULTS)
    result = asyncio.run(
        run_agent(
            task=make_task(),
            sandbox=sandbox,
            engine=engine,
            tokens=tokens,
            prompts=prompts,
            config=replace(config, mode=tokens.mode),
            trajectory="0/0/0",
            events=events or ev.NoEvents(),
            seed=100,
            clock=engine.clock,
        )
    )
    assert RULES[result.cause].is_graded
    return result, engine, sandbox


def roles(result: AgentResult) -> list[str]:
    return [message["role"] for message in result.messages]


def test_the_marker_and_what_follows_it_is_the_submission(
    text_tokens: ChatTokens, prompts: Prompts
) -> None:
    result, *_ = run(text_tokens, prompts, [block("ls"), block(HAND_IN)])
    assert (result.cause, result.turns) == ("submitted", 2)
    assert result.submission == "diff --git\n+x\n"
    assert roles(result) == ["system", "user", "assistant", "user", "assistant", "exit"]
    assert result.info["exit_status"] == "Submitted"


@pytest.mark.parametrize(
    "output", [ran(f"{SUBMIT}\nx", 1), ran(f"x\n{SUBMIT}\n"), ran(f"{SUBMIT}!\n")]
)
def test_a_marker_out_of_place_or_after_a_failure_submits_nothing(
    text_tokens: ChatTokens, prompts: Prompts, output: ExecResult
) -> None:
    sandbox = ScriptedSandbox({"try": output})
    result, *_ = run(text_tokens, prompts, [block("try")], sandbox=sandbox)
    assert (result.cause, result.submission) == ("turn_limit", "")


@pytest.mark.parametrize("mode", ["text", "tool"])
def test_each_prompt_holds_all_before_it_and_every_reply_verbatim(
    text_tokens: ChatTokens, tool_tokens: ChatTokens, prompts: Prompts, mode: str
) -> None:
    tokens, make = (text_tokens, block) if mode == "text" else (tool_tokens, call)
    result, engine, _ = run(tokens, prompts, [make("ls"), "hm, naïve ✓", make("ls"), make(HAND_IN)])
    assert len(engine.prompts) == 4
    for prompt, reply, after in zip(
        engine.prompts, engine.sampled, [*engine.prompts[1:], result.buffer.tokens], strict=True
    ):
        assert after[: len(prompt) + len(reply)] == [*prompt, *reply]
    sampled = [t for t, on in zip(result.buffer.tokens, result.buffer.loss_mask, strict=True) if on]
    assert sampled == [token for reply in engine.sampled for token in reply]
    assert [span.version for span in result.buffer.versions] == [1, 2, 3, 4]


def test_the_context_reads_as_the_template_renders_its_messages(
    tool_tokens: ChatTokens, prompts: Prompts
) -> None:
    two = call("ls") + "\n" + call("pwd")
    result, engine, _ = run(tool_tokens, prompts, [two, "no call", call("ls"), call(HAND_IN)])
    seen = result.messages[: roles(result).index("exit") - 1]
    rendered = tool_tokens.template.render(seen, prompt=True)
    assert tool_tokens.decode(engine.prompts[-1]) == rendered


def test_a_malformed_reply_stays_in_the_context_with_its_mask_on(
    text_tokens: ChatTokens, prompts: Prompts
) -> None:
    result, engine, _ = run(text_tokens, prompts, ["I will think.", block(HAND_IN)])
    assert roles(result) == ["system", "user", "assistant", "user", "assistant", "exit"]
    assert "I will think.<|im_end|>" in text_tokens.decode(engine.prompts[1])
    start = len(engine.prompts[0])
    assert all(result.buffer.loss_mask[start : start + len(engine.sampled[0])])


def test_malformed_replies_in_a_row_end_it_and_a_good_one_resets_the_count(
    text_tokens: ChatTokens, prompts: Prompts
) -> None:
    replies = ["no", "no", block("ls"), "no", "no", "no", "never asked"]
    result, engine, _ = run(text_tokens, prompts, replies, replace(CONFIG, max_turns=9))
    assert (result.cause, result.turns, len(engine.prompts)) == ("malformed", 6, 6)
    assert result.info["exit_status"] == "RepeatedFormatError"


def test_the_lower_of_the_config_s_and_the_yaml_s_limits_holds(
    text_tokens: ChatTokens, write_yaml: Callable[..., Path]
) -> None:
    path = write_yaml(
        agent__step_limit=4, agent__max_consecutive_format_errors=2, environment__timeout=3
    )
    strict = Prompts.load(path)
    assert run(text_tokens, strict, ["no"])[0].turns == 2
    result, _, sandbox = run(text_tokens, strict, [block("ls")])
    assert (result.cause, result.turns) == ("turn_limit", 4)
    assert {timeout_s for _, timeout_s, _ in sandbox.asked} == {3}


def test_a_reply_cut_at_its_token_limit_is_closed_with_the_mask_off(
    text_tokens: ChatTokens, prompts: Prompts
) -> None:
    config = replace(CONFIG, tokens_per_turn=10)
    result, engine, _ = run(text_tokens, prompts, ["word " * 50, block(HAND_IN)], config)
    at = len(engine.prompts[0]) + 10
    assert result.buffer.tokens[at] == text_tokens.end_of_turn
    assert (result.buffer.loss_mask[at - 1], result.buffer.loss_mask[at]) == (True, False)
    assert "length" in result.messages[3]["content"]


def test_a_trajectory_never_passes_its_token_limit(
    text_tokens: ChatTokens, prompts: Prompts
) -> None:
    for limit in range(50, 400, 7):  # the first prompt has 46
        config = replace(CONFIG, tokens_per_trajectory=limit, max_turns=50)
        result, engine, _ = run(text_tokens, prompts, [block("ls")], config)
        assert result.cause in ("token_limit", "malformed")
        assert len(result.buffer) <= limit
        for prompt, sampling in zip(engine.prompts, engine.samplings, strict=True):
            assert 1 <= sampling.max_new_tokens <= limit - len(prompt)


def test_a_prompt_without_room_for_a_reply_ends_before_the_first_turn(
    text_tokens: ChatTokens, prompts: Prompts
) -> None:
    config = replace(CONFIG, tokens_per_trajectory=5)
    result, engine, _ = run(text_tokens, prompts, [block("ls")], config)
    assert (result.cause, result.turns, engine.prompts) == ("token_limit", 0, [])


def test_a_command_s_timeout_is_an_observation(text_tokens: ChatTokens, prompts: Prompts) -> None:
    result, _, sandbox = run(text_tokens, prompts, [block("slow"), block(HAND_IN)])
    assert result.cause == "submitted"
    observation = result.messages[3]
    assert observation["content"].startswith("An error occurred: the command was stopped")
    assert observation["extra"]["returncode"] == -1
    assert "half" in observation["content"]
    assert result.command_s == 10.0
    assert sandbox.asked[0][1] == CONFIG.command_timeout_s


def test_model_and_command_time_end_a_trajectory(text_tokens: ChatTokens, prompts: Prompts) -> None:
    config = replace(CONFIG, max_turns=50, trajectory_timeout_s=100.0)
    result, *_ = run(text_tokens, prompts, [block("ls")], config, engine_s=30.0)
    assert (result.cause, result.turns) == ("time_limit", 4)
    assert (result.model_s, result.command_s) == (120.0, 1.5)


def test_a_turn_that_takes_too_long_ends_the_trajectory(
    text_tokens: ChatTokens, prompts: Prompts
) -> None:
    result, *_ = run(text_tokens, prompts, [block("ls")], engine_s=61.0)
    assert (result.cause, result.turns) == ("time_limit", 1)


def test_commands_share_their_turn_s_time(tool_tokens: ChatTokens, prompts: Prompts) -> None:
    config = replace(CONFIG, command_timeout_s=10.0, turn_timeout_s=25.0)
    reply = "\n".join([call("slow")] * 4)
    result, _, sandbox = run(tool_tokens, prompts, [reply], config)
    assert [timeout_s for _, timeout_s, _ in sandbox.asked] == [10.0, 10.0, 5.0]
    assert result.cause == "time_limit"
    assert result.messages[-2]["extra"]["exception_info"] == "action was not executed"


def test_time_that_is_not_the_policy_s_does_not_count(
    text_tokens: ChatTokens, prompts: Prompts
) -> None:
    class SlowToStart(ScriptedSandbox):
        async def exec(self, command: str, **options: object) -> ExecResult:
            clock.now += 1000.0  # queued behind other sandboxes
            return await super().exec(command, timeout_s=1.0)

    clock = Clock()
    result = asyncio.run(
        run_agent(
            task=make_task(),
            sandbox=SlowToStart(RESULTS),
            engine=ScriptedEngine(text_tokens, [block("ls"), block(HAND_IN)]),
            tokens=text_tokens,
            prompts=prompts,
            config=CONFIG,
            trajectory="0/0/0",
            events=ev.NoEvents(),
            clock=clock,
        )
    )
    assert (result.cause, result.model_s, result.command_s) == ("submitted", 0.0, 0.5)


def test_what_is_not_the_policy_s_doing_is_raised(
    text_tokens: ChatTokens, prompts: Prompts
) -> None:
    with pytest.raises(SandboxLost):
        run(text_tokens, prompts, [block("lost")])
    with pytest.raises(EngineLost, match="no engine"):
        run(text_tokens, prompts, [EngineLost("no engine")])


def test_a_reply_that_ends_by_an_abort_is_no_reply(
    text_tokens: ChatTokens, prompts: Prompts
) -> None:
    class Aborting(ScriptedEngine):
        async def generate(
            self, input_ids: list[int], sampling: Sampling, *, trajectory: str
        ) -> Generation:
            done = await super().generate(input_ids, sampling, trajectory=trajectory)
            return replace(done, finish="abort")

    coroutine = run_agent(
        task=make_task(),
        sandbox=ScriptedSandbox(),
        engine=Aborting(text_tokens, [block("ls")]),
        tokens=text_tokens,
        prompts=prompts,
        config=CONFIG,
        trajectory="7/0/0",
        events=ev.NoEvents(),
    )
    with pytest.raises(EngineLost, match="trajectory 7/0/0, turn 0"):
        asyncio.run(coroutine)


def test_cancellation_ends_a_waiting_trajectory(text_tokens: ChatTokens, prompts: Prompts) -> None:
    class Hanging(ScriptedEngine):
        async def generate(
            self, input_ids: list[int], sampling: Sampling, *, trajectory: str
        ) -> Generation:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

    async def cancel() -> None:
        trying = asyncio.create_task(
            run_agent(
                task=make_task(),
                sandbox=ScriptedSandbox(),
                engine=Hanging(text_tokens, []),
                tokens=text_tokens,
                prompts=prompts,
                config=CONFIG,
                trajectory="0/0/0",
                events=ev.NoEvents(),
            )
        )
        await asyncio.wait_for(asked.wait(), 60)
        trying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(trying, 60)

    asked = asyncio.Event()
    asyncio.run(cancel())


def test_a_long_patch_keeps_its_middle_and_other_output_is_bounded(
    text_tokens: ChatTokens, prompts: Prompts
) -> None:
    patch = "".join(f"+{number}\n" for number in range(9000))
    failed = f"{HAND_IN} --bad"
    sandbox = ScriptedSandbox({HAND_IN: ran(f"{SUBMIT}\n{patch}"), failed: ran("y" * 99_999, 1)})
    config = replace(CONFIG, tokens_per_trajectory=100_000)
    result, *_ = run(text_tokens, prompts, [block(failed), block(HAND_IN)], config, sandbox=sandbox)
    assert result.submission == patch
    assert len(result.messages[3]["content"]) < 11_000
    assert [bound for *_, bound in sandbox.asked] == [1 << 20] * 2


def test_clip_says_how_much_it_left_out() -> None:
    assert clip("abc", 3) == "abc"
    assert clip("a" * 10 + "b" * 90, 20) == "a" * 10 + "\n… 80 characters elided …\n" + "b" * 10


def test_each_reply_has_its_own_seed_and_the_model_s_stop_tokens(
    text_tokens: ChatTokens, prompts: Prompts
) -> None:
    _, engine, _ = run(text_tokens, prompts, [block("ls")], replace(CONFIG, max_turns=3))
    assert [sampling.seed for sampling in engine.samplings] == [100, 101, 102]
    assert engine.samplings[0].stop_token_ids == text_tokens.stop_ids


def test_each_model_call_and_command_is_an_event(
    text_tokens: ChatTokens, prompts: Prompts, odd_path: Path
) -> None:
    writer = ev.EventWriter(odd_path, "worker", node="n0")
    run(text_tokens, prompts, [block("ls"), "no", block("slow"), block(HAND_IN)], events=writer)
    writer.close()
    found = list(ev.read(writer.path))
    assert [event.turn for event in found if isinstance(event, ev.ModelCall)] == [0, 1, 2, 3]
    tools = [event for event in found if isinstance(event, ev.ToolCall)]
    assert [(event.turn, event.timed_out) for event in tools] == [(0, False), (2, True), (3, False)]
    assert all(event.end >= event.start > 0 for event in found)


def test_the_trajectory_is_json_of_format_1_1(text_tokens: ChatTokens, prompts: Prompts) -> None:
    result, *_ = run(text_tokens, prompts, [block("ls"), "no", block(HAND_IN)])
    tree = json.loads(result.to_trajectory_json())
    assert tree["trajectory_format"] == "mini-swe-agent-1.1"
    assert tree["info"]["model_stats"] == {"instance_cost": 0.0, "api_calls": 3}
    assert tree["info"]["submission"] == "diff --git\n+x\n"
    assert tree["messages"] == result.messages


def test_a_greedy_evaluation_may_ask_for_temperature_zero(
    text_tokens: ChatTokens, prompts: Prompts
) -> None:
    engine = ScriptedEngine(text_tokens, [block(HAND_IN)])
    asyncio.run(
        run_agent(
            task=make_task(),
            sandbox=ScriptedSandbox(RESULTS),
            engine=engine,
            tokens=text_tokens,
            prompts=prompts,
            config=CONFIG,
            trajectory="t/0/0",
            events=ev.NoEvents(),
            temperature=0.0,
        )
    )
    assert engine.samplings[0].temperature == 0.0


def test_importing_the_loop_loads_no_model_library() -> None:
    check = "import sys, agentrl.agent.loop; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
