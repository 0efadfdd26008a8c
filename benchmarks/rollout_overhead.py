"""CPU that the agent's loop costs a turn, beside mini-swe-agent's, with nothing else to do.

Both sides read the same YAML and take the same replies and 4 kB outputs from an engine and a
sandbox that answer at once; both write their trajectory as JSON once, at the end. mini-swe-agent
is favoured: its save at each step is switched off, its model and environment answer from
memory, and give few template variables. CPU is the process's (user + system), not wall time.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.metadata
import json
import os
import platform
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from agentrl.agent.loop import run_agent
from agentrl.agent.prompts import Prompts
from agentrl.agent.tokens import ChatTokens
from agentrl.config import AgentConfig
from agentrl.engine.base import Generation, Sampling, VersionSpan
from agentrl.events import NoEvents
from agentrl.sandbox.base import ExecResult, Sandbox
from agentrl.tasks.task import Task

ROOT = Path(__file__).parents[1]
YAML = ROOT / "configs/agents/swebench_text.yaml"
RESULTS = ROOT / "benchmarks/results/rollout_overhead.json"
REPLY = (
    "THOUGHT: I look at the next part of the file.\n\n```mswea_bash_command\nsed -n 1,80p a.py\n```"
)
OUTPUT = "".join(
    f"{line:4d}  value_{line} = compute(value_{line - 1}, {line})\n" for line in range(90)
)
ISSUE = "compute() returns the wrong value for an empty list.\n" * 12
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class NoTokens:
    """Stands for ChatTokens: fixed ids and a fixed text, so that nothing is tokenized."""

    mode = "text"
    opens_thinking = False
    end_of_turn = 1
    stop_ids = (1,)

    def __init__(self) -> None:
        self._prompt, self._delta = list(range(700)), list(range(1300))

    def initial(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        return self._prompt

    def observation(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        return self._delta

    def decode(self, ids: Sequence[int]) -> str:
        return REPLY


@dataclass(frozen=True, kw_only=True)
class Waits:
    """How long parts take, seconds (lowest, highest). Zero waits still yield once to the loop."""

    start: tuple[float, float] = (0.0, 0.0)
    model: tuple[float, float] = (0.0, 0.0)
    command: tuple[float, float] = (0.0, 0.0)


class Engine:
    def __init__(self, tokens: ChatTokens, waits: Waits) -> None:
        ids = tuple(range(40)) if isinstance(tokens, NoTokens) else tuple(tokens.encode(REPLY))
        ids += (tokens.end_of_turn,)
        self._waits = waits
        self._reply = Generation(
            token_ids=ids,
            logprobs=tuple(-0.1 for _ in ids),
            versions=(VersionSpan(version=0, start=0, end=len(ids)),),
            finish="stop",
            cached_tokens=0,
            engine="instant",
        )

    async def generate(
        self, input_ids: list[int], sampling: Sampling, *, trajectory: str
    ) -> Generation:
        await asyncio.sleep(random.uniform(*self._waits.model))
        return self._reply


class InstantSandbox:
    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._result = ExecResult(
            output=OUTPUT, exit_code=0, timed_out=False, truncated=False, oom=False, seconds=0.0
        )

    async def exec(self, command: str, **options: Any) -> ExecResult:
        await asyncio.sleep(random.uniform(*self._waits.command))
        return self._result


async def ours(tokens: ChatTokens, prompts: Prompts, count: int, turns: int, waits: Waits) -> int:
    """Run `count` trajectories at once; return the turns taken."""
    engine, sandbox = Engine(tokens, waits), cast(Sandbox, InstantSandbox(waits))
    config = AgentConfig(
        max_turns=turns, tokens_per_turn=1024, tokens_per_trajectory=1_000_000, max_malformed=3
    )
    task = Task(
        instance_id="i",
        repo="r",
        problem_statement=ISSUE,
        patch="",
        fail_to_pass=(),
        pass_to_pass=(),
        image_name="i",
    )

    async def one(number: int) -> int:
        await asyncio.sleep(random.uniform(*waits.start))
        result = await run_agent(
            task=task,
            sandbox=sandbox,
            engine=engine,
            tokens=tokens,
            prompts=prompts,
            config=config,
            trajectory=f"{number}/0/0",
            events=NoEvents(),
        )
        result.to_trajectory_json()
        return result.turns

    return sum(await asyncio.gather(*(one(number) for number in range(count))))


def upstream(count: int, turns: int) -> int:
    """The same by mini-swe-agent's DefaultAgent, a thread a trajectory."""
    from minisweagent.agents.default import DefaultAgent

    sections = Prompts.load(YAML).sections
    model = instant_model(sections["model"])
    environment = instant_environment(sections["environment"])

    class SavesOnce(DefaultAgent):
        def save(self, path: Path | None, *extra: Any) -> dict[str, Any]:
            return {}

    limits = {**sections["agent"], "step_limit": turns, "cost_limit": 0}

    def one(_: int) -> int:
        agent = SavesOnce(model(), environment(), **limits)
        agent.run(ISSUE)
        json.dumps(agent.serialize())
        return int(agent.n_calls)

    with ThreadPoolExecutor(count) as pool:
        return sum(pool.map(one, range(count)))


def instant_model(model_keys: dict[str, Any]) -> type:
    """Return a model for mini-swe-agent that always gives REPLY, at once."""
    from minisweagent.models.utils.actions_text import (
        format_observation_messages,
        parse_regex_actions,
    )

    class Model:
        config = model_keys

        def query(self, messages: list[dict[str, Any]], **kwargs: Any) -> dict[str, Any]:
            actions = parse_regex_actions(
                REPLY,
                action_regex=model_keys["action_regex"],
                format_error_template=model_keys["format_error_template"],
            )
            extra = {"actions": actions, "cost": 0.0, "timestamp": time.time()}
            return {"role": "assistant", "content": REPLY, "extra": extra}

        def format_message(self, **kwargs: Any) -> dict[str, Any]:
            return kwargs

        def format_observation_messages(
            self, message: dict[str, Any], outputs: list[Any], template_vars: Any = None
        ) -> Any:
            return format_observation_messages(
                outputs,
                observation_template=model_keys["observation_template"],
                template_vars=template_vars,
            )

        def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
            return model_keys

        def serialize(self) -> dict[str, Any]:
            return {"info": {"config": {"model": model_keys, "model_type": "instant"}}}

    return Model


def instant_environment(environment: dict[str, Any]) -> type:
    """Return an environment for mini-swe-agent whose commands give OUTPUT, at once."""
    machine = platform.uname()._asdict()

    class Environment:
        config = environment

        def execute(self, action: dict[str, Any], cwd: str = "") -> dict[str, Any]:
            return {"output": OUTPUT, "returncode": 0, "exception_info": ""}

        def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
            return {**environment, **machine}

        def serialize(self) -> dict[str, Any]:
            return {"info": {"config": {"environment": environment, "environment_type": "instant"}}}

    return Environment


def cpu_ms_per_turn(work: Callable[[], int], expected: int) -> float:
    gc.collect()
    begun = time.process_time()
    done = work()
    if done != expected:
        raise RuntimeError(f"{done} turns were taken, {expected} were asked for")
    return (time.process_time() - begun) * 1000 / done


async def loop_delay(work: Awaitable[Any], period_s: float = 0.005) -> list[float]:
    """Await `work` beside a ticker; return by how many ms each tick came late."""
    delays: list[float] = []

    async def tick() -> None:
        while True:
            begun = time.perf_counter()
            await asyncio.sleep(period_s)
            delays.append((time.perf_counter() - begun - period_s) * 1000)

    ticker = asyncio.create_task(tick())
    await work
    ticker.cancel()
    return sorted(delays)


def real_tokens(folder: Path | None) -> ChatTokens:
    """Load a model folder's tokenizer, or train a byte-level BPE on this project's sources."""
    if folder:
        return ChatTokens.load(folder, mode="text")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8192,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = [path.read_text() for path in sorted((ROOT / "agentrl").rglob("*.py"))]
    backend.train_from_iterator(sources, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    fast.chat_template = CHATML
    with tempfile.TemporaryDirectory() as made:
        fast.save_pretrained(made)
        return ChatTokens.load(Path(made), mode="text")


def summary(values: Sequence[float]) -> dict[str, Any]:
    return {
        "median": round(statistics.median(values), 4),
        "lowest": round(min(values), 4),
        "highest": round(max(values), 4),
        "all": [round(value, 4) for value in values],
    }


def delays_of(
    tokens: ChatTokens, prompts: Prompts, options: argparse.Namespace, *, many: int
) -> dict[str, Any]:
    """Measure `many` at once, with waits as of a GPU engine; 0 shows the machine's own delays."""
    waits = Waits(start=(0, 10), model=(8, 24), command=(0.05, 0.5))
    begun, cpu = time.perf_counter(), time.process_time()
    work = ours(tokens, prompts, many, options.many_turns, waits) if many else asyncio.sleep(10)
    delays = asyncio.run(loop_delay(work))
    wall_s = time.perf_counter() - begun
    return {
        "waits_s": {"start": waits.start, "model": waits.model, "command": waits.command},
        "ticks": len(delays),
        "p50_ms": round(delays[len(delays) // 2], 2),
        "p99_ms": round(delays[int(len(delays) * 0.99)], 2),
        "max_ms": round(delays[-1], 2),
        "wall_s": round(wall_s, 2),
        "cpu_share": round((time.process_time() - cpu) / wall_s, 3),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    prompts, turns = Prompts.load(YAML), options.count * options.turns
    stand_in, tokens = cast(ChatTokens, NoTokens()), real_tokens(options.model)
    rows: dict[str, list[float]] = {"ours": [], "upstream": [], "ours_tokenizing": []}

    def run_ours(chosen: ChatTokens, turns: int) -> int:
        return asyncio.run(ours(chosen, prompts, options.count, turns, Waits()))

    for repeat in range(options.repeats):
        rows["ours"].append(cpu_ms_per_turn(lambda: run_ours(stand_in, options.turns), turns))
        rows["upstream"].append(
            cpu_ms_per_turn(lambda: upstream(options.count, options.turns), turns)
        )
        print(
            f"repeat {repeat + 1}:",
            {name: row[-1] for name, row in rows.items() if row},
            flush=True,
        )
    few = max(1, options.turns // 4)  # the tokenizer's cost does not depend on the turn
    rows["ours_tokenizing"].append(
        cpu_ms_per_turn(lambda: run_ours(tokens, few), options.count * few)
    )
    pairs = zip(rows["upstream"], rows["ours"], strict=True)
    return {
        "cpu_ms_per_turn": {name: summary(row) for name, row in rows.items()},
        "ratio_upstream_to_ours": summary([theirs / own for theirs, own in pairs]),
        "loop_delay": {
            "nothing_running": delays_of(tokens, prompts, options, many=0),
            "tokenizing": delays_of(tokens, prompts, options, many=options.many),
            "without_tokenization": delays_of(stand_in, prompts, options, many=options.many),
        },
    }


def provenance(options: argparse.Namespace) -> dict[str, Any]:
    packages = ("mini-swe-agent", "jinja2", "tokenizers", "transformers", "msgspec")
    return {
        "command": shlex.join(["python", "-m", "benchmarks.rollout_overhead", *sys.argv[1:]]),
        "trajectories": options.count,
        "turns": options.turns,
        "output_bytes": len(OUTPUT),
        "many": {"trajectories": options.many, "turns": options.many_turns},
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load_before": [round(value, 2) for value in os.getloadavg()],
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=384, help="trajectories at once")
    parser.add_argument("--turns", type=int, default=40, help="turns of each")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--many", type=int, default=1024, help="at once, for the loop's delay")
    parser.add_argument("--many-turns", type=int, default=3, help="turns of each of those")
    parser.add_argument("--model", type=Path, help="a model folder whose tokenizer to use")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:  # mini-swe-agent makes and reads a user folder
        os.environ |= {"MSWEA_SILENT_STARTUP": "1", "MSWEA_GLOBAL_CONFIG_DIR": folder}
        report = {**provenance(options), **measure(options)}
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    ratio = report["ratio_upstream_to_ours"]
    for name, row in report["cpu_ms_per_turn"].items():
        print(f"{name:16} {row['median']:.3f} CPU ms a turn ({row['lowest']}-{row['highest']})")
    print(f"ratio mini-swe-agent / ours: {ratio['median']:.1f}x")
    for name, row in report["loop_delay"].items():
        delay = f"p50 {row['p50_ms']} ms, p99 {row['p99_ms']} ms, longest {row['max_ms']} ms"
        print(f"{options.many} at once, {name}: event loop late by {delay}")
    print(f"versions {report['versions']}, python {report['python']}; {report['command']}")


if __name__ == "__main__":
    main()
