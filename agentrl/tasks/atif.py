"""A trajectory in ATIF 1.7, Harbor's interchange form: steps, calls, observations, tokens.

Source: harborframework.com/docs/trajectory-format (read; no validator of Harbor was run on it).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from agentrl.agent.toolcall import BASH_TOOL
from agentrl.handoff.trajectory import Trajectory

VERSION = "ATIF-v1.7"
Step = dict[str, Any]


def to_atif(trajectory: Trajectory, *, model: str) -> dict[str, Any]:
    """Return the document. A reply's tokens and log-probabilities are in its step's metrics."""
    kept = json.loads(trajectory.messages)
    replies = list(sampled(trajectory))
    steps = _steps(kept.get("messages", []), replies)
    return {
        "schema_version": VERSION,
        "session_id": trajectory.run,
        "trajectory_id": f"{trajectory.run}/{trajectory.task_id}/{trajectory.attempt}",
        "agent": {
            "name": "agentrl",
            "version": kept.get("trajectory_format", ""),
            "model_name": model,
            "tool_definitions": [BASH_TOOL],
        },
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": len(trajectory.tokens) - sum(len(ids) for ids, _ in replies),
            "total_completion_tokens": sum(len(ids) for ids, _ in replies),
            "total_steps": len(steps),
        },
        "extra": {"cause": trajectory.cause, "reward": trajectory.reward, "draw": trajectory.draw},
    }


def sampled(trajectory: Trajectory) -> Iterator[tuple[list[int], list[float]]]:
    """Yield each reply's tokens and log-probabilities: the runs of its loss mask, in order."""
    rows = zip(
        trajectory.loss_mask.tolist(),
        trajectory.tokens.tolist(),
        trajectory.logprobs.tolist(),
        strict=True,
    )
    for is_sampled, run in groupby(rows, key=lambda row: row[0]):
        if is_sampled:
            _, ids, logprobs = zip(*run, strict=True)
            yield list(ids), list(logprobs)


def _steps(
    messages: Sequence[Mapping[str, Any]], replies: Sequence[tuple[list[int], list[float]]]
) -> list[Step]:
    steps: list[Step] = []
    left = iter(replies)
    for message in messages:
        role, extra = message["role"], message.get("extra", {})
        if role == "exit":
            continue
        if "raw_output" in extra and steps:
            _add_result(steps[-1], message)
            continue
        step: Step = {
            "step_id": len(steps) + 1,
            "source": "agent" if role == "assistant" else role,
            "message": message.get("content") or "",
        }
        if "timestamp" in extra:
            step["timestamp"] = datetime.fromtimestamp(extra["timestamp"], UTC).isoformat()
        if role == "assistant":
            step |= _called(message, len(steps) + 1)
            ids, logprobs = next(left, ([], []))
            step["metrics"] = {
                "completion_tokens": len(ids),
                "completion_token_ids": ids,
                "logprobs": logprobs,
            }
        steps.append(step)
    return steps


def _called(message: Mapping[str, Any], number: int) -> Step:
    actions = message.get("extra", {}).get("actions", [])
    calls = [
        {
            "tool_call_id": action.get("tool_call_id", f"call_{number}_{place}"),
            "function_name": "bash",
            "arguments": {"command": action["command"]},
        }
        for place, action in enumerate(actions)
    ]
    return {"tool_calls": calls} if calls else {}


def _add_result(step: Step, message: Mapping[str, Any]) -> None:
    """Put an observation into the step whose call it answers."""
    results = step.setdefault("observation", {"results": []})["results"]
    calls = step.get("tool_calls", [])
    result = {"content": message.get("content") or ""}
    if len(results) < len(calls):
        result["source_call_id"] = calls[len(results)]["tool_call_id"]
    results.append(result)
