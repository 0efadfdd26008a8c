"""The messages of a trajectory, and the file they end in: mini-swe-agent's format 1.1."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from agentrl.agent.prompts import Message, Prompts
from agentrl.agent.toolcall import Reply
from agentrl.engine.base import Generation
from agentrl.sandbox.base import ExecResult

FORMAT = "mini-swe-agent-1.1"
MINI_VERSION = "2.4.6"
"""The mini-swe-agent whose format this is."""
SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
EXIT_STATUS = {
    "submitted": "Submitted",
    "turn_limit": "LimitsExceeded",
    "token_limit": "LimitsExceeded",
    "malformed": "RepeatedFormatError",
    "time_limit": "TimeExceeded",
}
"""Cause of an end → mini-swe-agent's word for it."""
AGENT_DEFAULTS: dict[str, Any] = {
    "step_limit": 0,
    "cost_limit": 3.0,
    "wall_time_limit_seconds": 0,
    "max_consecutive_format_errors": 3,
    "output_path": None,
}
"""What mini-swe-agent writes for the keys of `agent` that a YAML leaves out."""
NOT_EXECUTED: dict[str, Any] = {
    "output": "",
    "returncode": -1,
    "exception_info": "action was not executed",
}


def assistant(reply: Reply, generation: Generation, turn: int) -> Message:
    """Return a reply's message; a malformed one has no actions."""
    actions: list[dict[str, str]] = [{"command": action.command} for action in reply.actions]
    message: Message = {"role": "assistant", "content": reply.content}
    if reply.has_tool_calls and reply.actions:
        calls = []
        for number, (action, entry) in enumerate(zip(reply.actions, actions, strict=True)):
            entry["tool_call_id"] = f"call_{turn}_{number}"
            function = {"name": "bash", "arguments": action.arguments}
            calls.append({"id": entry["tool_call_id"], "type": "function", "function": function})
        message["tool_calls"] = calls
    message["extra"] = {
        "actions": actions,
        "response": {
            "finish_reason": generation.finish,
            "engine": generation.engine,
            "completion_tokens": len(generation.token_ids),
            "cached_tokens": generation.cached_tokens,
        },
        "cost": 0.0,
        "timestamp": time.time(),
    }
    return message


def format_error(content: str, reply: Reply, text: str) -> Message:
    """Return the answer to a malformed reply."""
    extra = {
        "interrupt_type": "FormatError",
        "n_actions": len(reply.found),
        "model_response": text,
    }
    return {"role": "user", "content": content, "extra": extra}


def observation(content: str, output: Mapping[str, Any], action: Mapping[str, str]) -> Message:
    """Return what a command gave: a `tool` message where a call asked for it, else a user's."""
    message: Message = {
        "role": "user",
        "content": content,
        "extra": {
            "raw_output": output["output"],
            "returncode": output["returncode"],
            "timestamp": time.time(),
            "exception_info": output["exception_info"],
            **output.get("extra", {}),
        },
    }
    if "tool_call_id" in action:
        message |= {"role": "tool", "tool_call_id": action["tool_call_id"]}
    return message


def output_of(result: ExecResult, timeout_s: float, max_bytes: int) -> dict[str, Any]:
    """Return the template's `output`. A timeout is told to the model; it ends nothing."""
    output = {
        "output": clip(result.output, max_bytes),
        "returncode": result.exit_code,
        "exception_info": "",
    }
    if result.timed_out:
        reason = f"the command was stopped: it had not ended after {timeout_s:g} seconds"
        output["returncode"] = -1
        output["exception_info"] = f"An error occurred: {reason}"
        output["extra"] = {"exception_type": "TimeoutExpired", "exception": reason}
    elif result.oom:
        output["exception_info"] = "An error occurred: the command ran out of memory"
        output["extra"] = {"exception_type": "MemoryError", "exception": "out of memory"}
    return output


def clip(text: str, max_chars: int) -> str:
    """Bound a text that was read with a higher bound than the model may see."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return (
        f"{text[:half]}\n… {len(text) - 2 * half} characters elided …\n{text[len(text) - half :]}"
    )


def submission(result: ExecResult) -> str | None:
    """Return what is handed in: all after the marker's line. None where there is no marker."""
    if result.exit_code != 0 or SUBMIT not in result.output:
        return None
    lines = result.output.lstrip().splitlines(keepends=True)
    return "".join(lines[1:]) if lines and lines[0].strip() == SUBMIT else None


def end(cause: str, handed_in: str) -> Message:
    """Return the message that closes a trajectory."""
    status = EXIT_STATUS[cause]
    content = handed_in if cause == "submitted" else status
    return {
        "role": "exit",
        "content": content,
        "extra": {"exit_status": status, "submission": handed_in},
    }


def info(
    prompts: Prompts, parts: Mapping[str, str], *, calls: int, last: Message
) -> dict[str, Any]:
    """Return the file's `info`. `parts` has the types of agent, model and environment."""
    sections = prompts.sections
    return {
        "model_stats": {"instance_cost": 0.0, "api_calls": calls},
        "config": {
            "agent": {**AGENT_DEFAULTS, **sections["agent"]},
            "agent_type": parts["agent"],
            "model": sections["model"],
            "model_type": parts["model"],
            "environment": sections["environment"],
            "environment_type": parts["environment"],
        },
        "mini_version": MINI_VERSION,
        "exit_status": last["extra"]["exit_status"],
        "submission": last["extra"]["submission"],
    }


def to_json(info: Mapping[str, Any], messages: Sequence[Message]) -> str:
    tree = {"info": info, "messages": messages, "trajectory_format": FORMAT}
    return msgspec.json.encode(tree).decode()
