"""The scripted expert: an Engine whose replies are tries, so traces come from the agent's loop."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

from agentrl.engine.base import Generation, Sampling, VersionSpan
from agentrl.errors import TaskError
from agentrl.tasks.command import try_command
from agentrl.tasks.task import Task

if TYPE_CHECKING:
    from agentrl.agent.tokens import ChatTokens

FENCE = "```mswea_bash_command\n{command}\n```"
CALL = '<tool_call>\n{{"name": "bash", "arguments": {{"command": {command}}}}}\n</tool_call>'


class ExpertEngine:
    """Tries the right edit with chance `accuracy`, else another of the same family, none twice.

    One instance serves one trajectory. It never looks at what it is shown: it knows the bug.
    """

    def __init__(
        self, tokens: ChatTokens, task: Task, *, seed: int, accuracy: float, mode: str = "text"
    ) -> None:
        if task.fix is None:
            raise TaskError(
                f"task {task.instance_id}: no one-line fix is known; only `repair` has them"
            )
        self._tokens = tokens
        self._fix = task.fix
        self._rng = random.Random(f"{task.instance_id} {seed}")
        self._accuracy = accuracy
        self._mode = mode
        self._left = list(task.rivals)
        self._rng.shuffle(self._left)

    async def generate(
        self, input_ids: list[int], sampling: Sampling, *, trajectory: str
    ) -> Generation:
        """Return the next try, whole, with the end-of-turn token; log-probabilities are zeros."""
        del input_ids, sampling, trajectory
        ids = (*self._tokens.encode(self.next_reply()), self._tokens.end_of_turn)
        return Generation(
            token_ids=ids,
            logprobs=(0.0,) * len(ids),
            versions=(VersionSpan(version=0, start=0, end=len(ids)),),
            finish="stop",
            cached_tokens=0,
            engine="expert",
        )

    def next_reply(self) -> str:
        """Return the text of the next try in the agent's form."""
        is_right = self._rng.random() < self._accuracy or not self._left
        command = try_command(*(self._fix if is_right else self._left.pop()))
        if self._mode == "text":
            return FENCE.format(command=command)
        return CALL.format(command=json.dumps(command))
