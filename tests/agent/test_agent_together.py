"""Trajectories that go on together: whose turn it is to tokenize."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

from agent_toys import ScriptedEngine, ScriptedSandbox, block, make_task, ran

from agentrl import events as ev
from agentrl.agent.loop import AgentResult, run_agent
from agentrl.agent.prompts import Message, Prompts
from agentrl.agent.record import SUBMIT
from agentrl.agent.tokens import ChatTokens
from agentrl.config import AgentConfig
from agentrl.sandbox.base import ExecResult

CONFIG = AgentConfig(max_turns=6, tokens_per_turn=200, tokens_per_trajectory=4000)
HAND_IN = f"echo {SUBMIT} && cat p"
RESULTS: dict[str, ExecResult | Exception] = {
    HAND_IN: ran(f"{SUBMIT}\ndiff --git\n+x\n"),
    "ls": ran("a.py\n", seconds=0.5),
}


class CountingTokens:
    """Real tokens that note in which pass of the event loop each prompt was tokenized."""

    def __init__(self, tokens: ChatTokens) -> None:
        self._tokens = tokens
        self.passes = 0
        self.tokenized: list[int] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._tokens, name)

    def initial(self, messages: Sequence[Message]) -> list[int]:
        self.tokenized.append(self.passes)
        return self._tokens.initial(messages)

    def observation(self, messages: Sequence[Message]) -> list[int]:
        self.tokenized.append(self.passes)
        return self._tokens.observation(messages)

    async def count(self) -> None:
        while True:
            self.passes += 1
            await asyncio.sleep(0)


def test_trajectories_that_go_on_together_tokenize_in_different_passes_of_the_loop(
    text_tokens: ChatTokens, prompts: Prompts
) -> None:
    tokens = CountingTokens(text_tokens)

    async def one(number: int) -> AgentResult:
        return await run_agent(
            task=make_task(),
            sandbox=ScriptedSandbox(RESULTS),
            engine=ScriptedEngine(text_tokens, [block("ls"), block(HAND_IN)]),
            tokens=cast(ChatTokens, tokens),
            prompts=prompts,
            config=CONFIG,
            trajectory=f"{number}/0/0",
            events=ev.NoEvents(),
        )

    async def many() -> list[AgentResult]:
        counter = asyncio.create_task(tokens.count())
        results = await asyncio.gather(*map(one, range(20)))
        counter.cancel()
        return results

    assert [result.turns for result in asyncio.run(many())] == [2] * 20
    assert len(set(tokens.tokenized)) == len(tokens.tokenized) == 40
