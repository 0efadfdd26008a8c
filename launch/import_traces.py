"""`agentrl import_traces CONFIG FILE [key=value …]`: published trajectories become SFT traces.

FILE is JSONL or Parquet of Open-SWE-Traces' schema (`messages`, `resolved`). Resolved ones are told
in the agent's own tool format and the model's tokens, and written to runs/NAME/sft/traces, where
`agentrl sft CONFIG sft.traces=N` finds them. What is left out is counted by reason.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentrl import config as schema
from agentrl.agent import record
from agentrl.agent.prompts import Message, Prompts
from agentrl.agent.tokens import ChatTokens
from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.handoff.spool import SpoolWriter
from agentrl.handoff.trajectory import Group, Trajectory
from agentrl.tasks.expert import CALL, FENCE
from agentrl.tasks.open_traces import OpenTrace, TraceRow, Turn, Unconvertible, convert
from agentrl.tasks.records import read_records
from launch.command import add_overrides, guard, parse, parser, say
from launch.run_dir import settled
from launch.train import check_model
from slurm.exit_record import DONE

PER_FILE = 50


def main(argv: Sequence[str]) -> int:
    """Convert one file."""
    arguments = parser("import_traces", __doc__)
    arguments.add_argument("config", metavar="CONFIG", help="YAML of the run")
    arguments.add_argument("file", metavar="FILE", type=Path, help="JSONL or Parquet")
    add_overrides(arguments)
    given = parse(arguments, argv)
    config = settled(schema.load(given.config, given.overrides))
    check_model(config)
    folder = config.run_dir / "sft" / "traces"
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"{folder}: has traces already; delete it, or give another name=…")
    count, left_out = import_file(config, given.file, folder)
    for reason, number in left_out.most_common():
        say(f"  {number} left out: {reason}")
    say(f"{count} traces in {folder}\n$ agentrl sft {given.config} sft.traces={count}")
    return DONE


def import_file(config: RunConfig, path: Path, folder: Path) -> tuple[int, Counter[str]]:
    """Write a file's traces below `folder`; return how many, and what was left out by reason."""
    left_out: Counter[str] = Counter()
    writer, count = SpoolWriter(folder, 0), 0
    batch: list[Trajectory] = []
    maker = Maker.of(config)
    for trace in _traces(path, left_out):
        made = maker.trajectory(trace, count)
        if len(made.tokens) > config.agent.tokens_per_trajectory:
            left_out["over agent.tokens_per_trajectory"] += 1
            continue
        batch.append(made)
        count += 1
        if len(batch) == PER_FILE:
            draw = count // PER_FILE - 1
            writer.write(Group(draw=draw, task_id="traces", trajectories=tuple(batch)))
            batch = []
    if batch:
        draw = count // PER_FILE
        writer.write(Group(draw=draw, task_id="traces", trajectories=tuple(batch)))
    return count, left_out


def _traces(path: Path, left_out: Counter[str]) -> Iterator[OpenTrace]:
    for row in read_records(path, TraceRow, "Open-SWE-Traces"):
        if row.resolved != 1:
            left_out["not resolved"] += 1
            continue
        try:
            yield convert(row)
        except Unconvertible as error:
            left_out[str(error)] += 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Maker:
    """Tells a trace in a model's tokens and an agent's words."""

    tokens: ChatTokens
    prompts: Prompts
    run: str
    mode: str

    @classmethod
    def of(cls, config: RunConfig) -> Maker:
        return cls(
            tokens=ChatTokens.load(Path(config.model.path), mode=config.agent.mode),
            prompts=Prompts.load(Path(config.agent.prompts)),
            run=config.name,
            mode=config.agent.mode,
        )

    def trajectory(self, trace: OpenTrace, number: int) -> Trajectory:
        """Return `trace` with a loss on what the assistant wrote."""
        messages = self.prompts.initial(trace.issue)
        ids, mask = list(self.tokens.initial(messages)), []
        mask += [False] * len(ids)
        for place, turn in enumerate(trace.turns):
            text = self._reply(turn)
            reply = [*self.tokens.encode(text), self.tokens.end_of_turn]
            seen = self._observations(turn, place)
            context = self.tokens.observation(seen) if place + 1 < len(trace.turns) else []
            ids += [*reply, *context]
            mask += [True] * len(reply) + [False] * len(context)
            messages += [{"role": "assistant", "content": text}, *seen]
        return Trajectory(
            run=self.run,
            draw=number // PER_FILE,
            task_id=trace.instance_id,
            attempt=number % PER_FILE,
            node=0,
            tokens=np.asarray(ids, np.int32),
            logprobs=np.zeros(len(ids), np.float32),
            loss_mask=np.asarray(mask, np.bool_),
            reward=1.0,
            cause="submitted",
            turns=len(trace.turns),
            messages=record.to_json({"exit_status": "Submitted"}, messages),
        )

    def _reply(self, turn: Turn) -> str:
        if self.mode == "text":
            return f"{turn.text}\n\n{FENCE.format(command=chr(10).join(turn.commands))}".strip()
        calls = [CALL.format(command=json.dumps(one, ensure_ascii=False)) for one in turn.commands]
        return "\n".join(filter(None, (turn.text, *calls)))

    def _observations(self, turn: Turn, place: int) -> list[Message]:
        """In text mode a reply has one command, so its outputs are one observation."""
        outputs = list(turn.outputs)
        if self.mode == "text" and outputs:
            outputs = [("\n".join(text for text, _ in outputs), outputs[-1][1])]
        found = []
        for number, (text, code) in enumerate(outputs):
            output: dict[str, Any] = {"output": text, "returncode": code, "exception_info": ""}
            action = {"tool_call_id": f"call_{place}_{number}"} if self.mode == "tool" else {}
            values = {"n_model_calls": place + 1, "model_cost": 0.0, "elapsed_seconds": 0}
            content = self.prompts.observation(output, values)
            found.append(record.observation(content, output, action))
        return found


if __name__ == "__main__":
    sys.exit(guard(main))
