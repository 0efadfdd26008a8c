"""One try of the agent at one task, natively async: mini-swe-agent's loop, kept token by token.

Different from mini-swe-agent on purpose: a malformed reply stays in the context, tokens and
all, and the trajectory is written once, at its end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from agentrl import events as ev
from agentrl.agent import record
from agentrl.agent.prompts import Message, Prompts
from agentrl.agent.tokens import ChatTokens, TokenBuffer
from agentrl.agent.toolcall import Reply, parse
from agentrl.config import AgentConfig
from agentrl.engine.base import Engine, Generation, Sampling
from agentrl.errors import EngineLost
from agentrl.sandbox.base import ExecResult, Sandbox
from agentrl.tasks.task import Task

SUBMISSION_BYTES = 1 << 20
"""Output kept of a command that names the submit marker: a patch must not lose its middle."""

_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentResult:
    cause: str
    """`submitted`, `turn_limit`, `token_limit`, `malformed` or `time_limit`."""
    messages: list[Message]
    submission: str
    turns: int
    model_s: float
    command_s: float
    buffer: TokenBuffer
    info: dict[str, Any]

    def to_trajectory_json(self) -> str:
        """Return the trajectory in mini-swe-agent's format 1.1."""
        return record.to_json(self.info, self.messages)


@dataclass(kw_only=True, slots=True)
class _Try:
    """The state of one trajectory."""

    task: Task
    sandbox: Sandbox
    engine: Engine
    tokens: ChatTokens
    prompts: Prompts
    config: AgentConfig
    trajectory: str
    events: ev.Writer
    temperature: float
    seed: int | None
    clock: Callable[[], float]
    limits: _Limits
    messages: list[Message]
    buffer: TokenBuffer
    pending: list[Message] = field(default_factory=list)
    """Observations that no prompt holds yet."""
    turns: int = 0
    malformed: int = 0
    model_s: float = 0.0
    command_s: float = 0.0
    submission: str = ""

    @property
    def spent_s(self) -> float:
        """Time that the policy spent; waits for sandboxes and our own work are not in it."""
        return self.model_s + self.command_s

    async def until_end(self) -> str:
        """Take turns; return the cause of the end."""
        while True:
            if self.turns >= self.limits.turns:
                return "turn_limit"
            if self.spent_s >= self.limits.trajectory_s:
                return "time_limit"
            if not await self._extend():
                return "token_limit"
            if cause := await self._turn():
                return cause

    async def _extend(self) -> bool:
        """Put pending observations into the context; False when no token could be sampled then."""
        ids: list[int] = []
        if self.pending:
            if self.buffer.tokens[-1] != self.tokens.end_of_turn:
                ids.append(self.tokens.end_of_turn)  # the reply was cut, or ended by another token
            ids += await _in_turn(self.tokens.observation, self.pending)
        if len(self.buffer) + len(ids) >= self.config.tokens_per_trajectory:
            return False
        self.buffer.append_context(ids)
        self.pending = []
        return True

    async def _turn(self) -> str:
        """Sample a reply and run what it asks for; return a cause, or '' to go on."""
        deadline_s = self.spent_s + self.config.turn_timeout_s
        generation = await self._sample()
        text = self._text(generation)
        reply = parse(
            text,
            mode=self.config.mode,
            action=self.prompts.action,
            is_thinking=self.tokens.opens_thinking,
        )
        message = record.assistant(reply, generation, self.turns)
        self.messages.append(message)
        if reply.error:
            self._answer_malformed(reply, generation, text)
        else:
            self.malformed = 0
            if await self._act(message["extra"]["actions"], deadline_s):
                return "submitted"
        self.messages += self.pending
        if reply.error and self.malformed >= self.limits.malformed:
            return "malformed"
        return "time_limit" if self.spent_s >= deadline_s else ""

    async def _sample(self) -> Generation:
        length = len(self.buffer)
        room = self.config.tokens_per_trajectory - length
        sampling = Sampling(
            max_new_tokens=min(self.config.tokens_per_turn, room),
            temperature=self.temperature,
            stop_token_ids=self.tokens.stop_ids,
            seed=None if self.seed is None else self.seed + self.turns,
            experts_from=self.buffer.known_experts,
        )
        start, begun = ev.now(), self.clock()
        generation = await self.engine.generate(
            self.buffer.tokens,  # lent, not copied: a thousand copies cost more than all the rest
            sampling,
            trajectory=self.trajectory,
        )
        self.model_s += self.clock() - begun
        self.events.write(
            ev.ModelCall(
                start=start,
                end=ev.now(),
                trajectory=self.trajectory,
                engine=generation.engine,
                turn=self.turns,
                prompt_tokens=length,
                new_tokens=len(generation.token_ids),
                cached_tokens=generation.cached_tokens,
                finish=generation.finish,
            )
        )
        if generation.finish == "abort":
            raise EngineLost(
                f"trajectory {self.trajectory}, turn {self.turns}: {generation.engine} ended the "
                "reply by an abort that nobody continued; the client must join such parts"
            )
        self.buffer.append_sampled(generation)
        self.turns += 1
        return generation

    def _text(self, generation: Generation) -> str:
        ids = generation.token_ids
        if ids and ids[-1] in self.tokens.stop_ids:
            ids = ids[:-1]
        return self.tokens.decode(ids)

    def _answer_malformed(self, reply: Reply, generation: Generation, text: str) -> None:
        self.malformed += 1
        values = {
            **self._values(),
            "error": reply.error,
            "actions": list(reply.found),
            "finish_reason": generation.finish,
            "has_tool_calls": reply.has_tool_calls,
        }
        self.pending = [record.format_error(self.prompts.format_error(values), reply, text)]

    async def _act(self, actions: Sequence[dict[str, str]], deadline_s: float) -> bool:
        """Run a reply's commands; True when one handed in, which drops the turn's observations."""
        outputs: list[dict[str, Any]] = []
        for action in actions:
            left_s = min(deadline_s, self.limits.trajectory_s) - self.spent_s
            if left_s <= 0:
                outputs.append(record.NOT_EXECUTED)
                continue
            timeout_s = min(self.limits.command_s, left_s)
            result = await self._exec(action["command"], timeout_s)
            handed_in = record.submission(result)
            if handed_in is not None:
                self.submission = handed_in
                return True
            outputs.append(record.output_of(result, timeout_s, self.config.observation_bytes))
        values = self._values()
        self.pending = [
            record.observation(self.prompts.observation(output, values), output, action)
            for action, output in zip(actions, outputs, strict=True)
        ]
        return False

    async def _exec(self, command: str, timeout_s: float) -> ExecResult:
        bound = self.config.observation_bytes
        start = ev.now()
        result = await self.sandbox.exec(
            command,
            timeout_s=timeout_s,
            max_bytes=max(bound, SUBMISSION_BYTES) if record.SUBMIT in command else bound,
            env=self.prompts.env,
        )
        self.command_s += max(result.seconds, timeout_s) if result.timed_out else result.seconds
        self.events.write(
            ev.ToolCall(
                start=start,
                end=ev.now(),
                trajectory=self.trajectory,
                turn=self.turns - 1,
                exit_code=result.exit_code,
                timed_out=result.timed_out,
                truncated=result.truncated,
            )
        )
        return result

    def _values(self) -> dict[str, Any]:
        return {
            "task": self.task.problem_statement,
            "n_model_calls": self.turns,
            "model_cost": 0.0,
            "elapsed_seconds": int(self.spent_s),
        }

    def result(self, cause: str) -> AgentResult:
        last = record.end(cause, self.submission)
        self.messages.append(last)
        parts = {
            "agent": f"{run_agent.__module__}.{run_agent.__name__}",
            "model": _type_name(self.engine),
            "environment": _type_name(self.sandbox),
        }
        return AgentResult(
            cause=cause,
            messages=self.messages,
            submission=self.submission,
            turns=self.turns,
            model_s=self.model_s,
            command_s=self.command_s,
            buffer=self.buffer,
            info=record.info(self.prompts, parts, calls=self.turns, last=last),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Limits:
    """The lower of the config's and the YAML's, each."""

    turns: int
    malformed: int
    command_s: float
    trajectory_s: float

    @classmethod
    def of(cls, config: AgentConfig, prompts: Prompts) -> _Limits:
        stated = prompts.limits
        return cls(
            turns=min(config.max_turns, stated.turns or config.max_turns),
            malformed=min(config.max_malformed, stated.malformed or config.max_malformed),
            command_s=min(config.command_timeout_s, stated.command_s or config.command_timeout_s),
            trajectory_s=min(
                config.trajectory_timeout_s, stated.trajectory_s or config.trajectory_timeout_s
            ),
        )


async def run_agent(
    *,
    task: Task,
    sandbox: Sandbox,
    engine: Engine,
    tokens: ChatTokens,
    prompts: Prompts,
    config: AgentConfig,
    trajectory: str,
    events: ev.Writer,
    temperature: float | None = None,
    seed: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> AgentResult:
    """Let the model work on `task` until it hands in or reaches a limit.

    The lower of the config's and the YAML's limits holds. `seed` + turn seeds each reply.
    The engine borrows the token list of each prompt: it must not change it, nor keep it after.
    What is not the policy's doing is raised: SandboxLost, EngineLost, and cancellation.
    """
    messages = prompts.initial(task.problem_statement)
    run = _Try(
        task=task,
        sandbox=sandbox,
        engine=engine,
        tokens=tokens,
        prompts=prompts,
        config=config,
        trajectory=trajectory,
        events=events,
        temperature=config.temperature if temperature is None else temperature,
        seed=seed,
        clock=clock,
        limits=_Limits.of(config, prompts),
        messages=messages,
        buffer=TokenBuffer(await _in_turn(tokens.initial, messages)),
    )
    return run.result(await run.until_end())


async def _in_turn(
    tokenize: Callable[[Sequence[Message]], list[int]], messages: Sequence[Message]
) -> list[int]:
    """Tokenize for one caller in each pass of the event loop.

    A thousand trajectories that go on in the same pass, 5 ms each, would hold up all else for 5 s.
    """
    async with _turns.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
        ids = tokenize(messages)
        await asyncio.sleep(0)
        return ids


def _type_name(part: object) -> str:
    return f"{type(part).__module__}.{type(part).__qualname__}"
