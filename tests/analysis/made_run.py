"""Makes a run directory of the shape that a demo leaves, by the real event writer. Seeded."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from random import Random

from agentrl import config, events

BEGIN = 1_700_000_000.0
STEP_S = 3.0
ATTEMPTS = 8
GROUPS = 8


@dataclass
class Made:
    """How much of a run to make."""

    steps: int = 110
    resume_at: int = 60
    """Checkpoint that a second launch attempt goes on from, after ten more steps; 0 for none."""
    hostile: str = "<script>alert(1)</script>"


def make_run(folder: Path, made: Made | None = None, *, seed: int = 0) -> Path:
    """Write a whole run into `folder` and return it."""
    made = made or Made()
    random = Random(seed)
    folder.mkdir(parents=True)
    chosen = config.RunConfig(name=folder.name, runs_dir=str(folder.parent))
    config.save(chosen, folder / "config.yaml")
    write_provenance(folder)
    write_sft(folder, random)
    write_training(folder, made, random)
    write_evaluations(folder, random)
    return folder


def write_provenance(folder: Path) -> None:
    found = {
        "git": "41ba94f", "argv": ["agentrl", "demo"], "versions": {"torch": "2.13.0"},
        "created": BEGIN, "image": None,
    }  # fmt: skip
    (folder / "provenance.json").write_text(json.dumps(found))


def write_sft(folder: Path, random: Random) -> None:
    (folder / "sft").mkdir()
    losses = [0.08 + 3.0 * 0.985 ** (4 * i) + random.gauss(0, 0.01) for i in range(188)]
    found = {"seconds": 112.5, "steps": 750, "tokens": 520_000, "losses": losses}
    (folder / "sft" / "model.sft.json").write_text(json.dumps(found))


def write_training(folder: Path, made: Made, random: Random) -> None:
    trainer = events.EventWriter(folder / "events", "trainer", node="a")
    begin = BEGIN + 200
    clock = begin
    order = list(range(1, made.steps + 1))
    if made.resume_at:
        undone = list(range(1, made.resume_at + 11))
        order = [*undone, *order[made.resume_at :]]
    last = 0
    for step in order:
        if step <= last:
            clock += 20
            event = events.CheckpointEvent(start=clock, end=clock, step=step - 1, phase="loaded")
            trainer.write(event)
        clock += write_step(trainer, step, clock, random)
        last = step
    trainer.close()
    write_rollout(folder, made, begin, clock, random)
    line = {"attempt": 1, "began": "started", "ended": "killed", "step_begin": 0, "step_end": 60}
    second = {"attempt": 2, "began": "resumed", "ended": "done", "step_begin": 60, "step_end": 110}
    times = [(begin, begin + (clock - begin) / 2), (begin + (clock - begin) / 2, clock)]
    with (folder / "ledger.jsonl").open("w") as file:
        for fields, (started, finished) in zip((line, second), times, strict=True):
            file.write(json.dumps(fields | {"started": started, "finished": finished}) + "\n")


def write_step(writer: events.EventWriter, step: int, start: float, random: Random) -> float:
    """Write one step and return its seconds."""
    wait = max(0.0, random.gauss(1.1, 0.4)) + (4 if step == 1 else 0)
    update, logprob = random.gauss(1.2, 0.1), random.gauss(0.45, 0.05)
    checkpoint = 0.3 if step % 20 == 0 else 0.0
    whole = wait + update + logprob + checkpoint + 0.08 + 0.05
    grown = step / (step + 40)
    metrics = {
        "reward": 0.36 + 0.25 * grown + random.gauss(0, 0.05),
        "loss": random.gauss(0, 0.02),
        "grad_norm": abs(random.gauss(0.6, 0.15)),
        "entropy": 0.72 - 0.22 * grown + random.gauss(0, 0.015),
        "ess": min(1.0, random.gauss(0.95, 0.02)),
        "gap": abs(random.gauss(0.011, 0.003)),
        "clip_fraction": abs(random.gauss(0.02, 0.01)),
        "staleness_mean": random.uniform(0.3, 1),
        "staleness_max": 1.0,
        "trajectories": 64.0,
        "zero_signal": float(random.randint(2, 5)),
        "sampled_tokens": random.gauss(1100, 90),
        "lr": 3e-4,
        "groups": float(GROUPS),
    }
    event = events.Step(
        start=start,
        end=start + whole,
        step=step,
        version=step,
        wait_s=wait,
        logprob_s=logprob,
        update_s=update,
        publish_s=0.08,
        checkpoint_s=checkpoint,
        metrics=metrics,
    )
    writer.write(event)
    return whole


def write_rollout(
    folder: Path, made: Made, begin: float, end: float, random: Random, per_second: float = 16.0
) -> None:
    """Write trajectories from `begin` to `end`, and what one engine said of its load."""
    writer = events.EventWriter(folder / "events", "inference", node="b")
    count = int((end - begin) * per_second)
    for i in range(count):
        write_trajectory(writer, i, begin + i / per_second, made, random)
    busy = tokens = 0.0
    clock = begin - 2
    while clock < end:
        event = events.EngineState(
            start=clock,
            end=clock,
            engine="http://b:1",
            state="load",
            running=random.randint(20, 60),
            busy_s=busy,
            generated_tokens=int(tokens),
        )
        writer.write(event)
        share = min(1.0, max(0.0, random.gauss(0.7, 0.1)))
        clock, busy, tokens = clock + 2, busy + 2 * share, tokens + 2 * share * 900
    fault = events.EngineFault(
        start=end, end=end, engine="http://b:1", cause="exit", detail=made.hostile, restarts=1
    )
    writer.write(fault)
    writer.write(events.Drop(start=end, end=end, what="group", reason="all attempts lost", draw=3))
    writer.close()


def write_trajectory(
    writer: events.EventWriter, i: int, start: float, made: Made, random: Random
) -> None:
    name = f"{i // ATTEMPTS}/{i % ATTEMPTS}/0"
    clock = start
    boot = random.uniform(0.02, 0.06)
    is_lost = random.random() < 0.003
    queued = random.expovariate(20)
    event = events.SandboxStart(
        start=clock,
        end=clock + queued + boot,
        trajectory=name,
        backend="bubblewrap",
        queued_s=queued,
        ok=not is_lost,
        detail="exit 1" if is_lost else "",
    )
    writer.write(event)
    clock = event.end
    turns = random.choice((1, 2, 2, 3, 3, 3))
    for turn in range(0 if is_lost else turns):
        think, act = random.gauss(0.9, 0.2) + 0.4 * random.expovariate(2), random.gauss(0.12, 0.02)
        call = events.ModelCall(
            start=clock,
            end=clock + max(0.05, think),
            trajectory=name,
            engine="http://b:1",
            turn=turn,
            prompt_tokens=90,
            new_tokens=17,
        )
        writer.write(call)
        clock = call.end
        tool = events.ToolCall(
            start=clock, end=clock + max(0.02, act), trajectory=name, turn=turn, exit_code=0
        )
        writer.write(tool)
        clock = tool.end
    writer.write(events.Grade(start=clock, end=clock + 0.15, trajectory=name, resolved=True))
    done = events.TrajectoryEvent(
        start=start,
        end=clock + 0.2,
        trajectory=name,
        draw=i // ATTEMPTS,
        task=f"repair-{i}-{made.hostile}",
        attempt=i % ATTEMPTS,
        cause="sandbox_start" if is_lost else "submitted",
        reward=None if is_lost else float(random.random() < 0.4),
        turns=turns,
        sampled_tokens=17 * turns,
    )
    writer.write(done)


def tear(path: Path) -> None:
    """Cut the last line of a file in its middle."""
    with path.open("rb+") as file:
        file.seek(-9, os.SEEK_END)
        file.truncate()


RATES = {  # (split, temperature) → (SFT, RL)
    ("held_out", 1.0): (0.17, 0.29),
    ("held_out", 0.5): (0.22, 0.32),
    ("unseen_sites", 1.0): (0.09, 0.17),
    ("unseen_functions", 1.0): (0.06, 0.11),
}


def write_evaluations(folder: Path, random: Random) -> None:
    for (split, temperature), rates in RATES.items():
        tasks = 250 if split == "held_out" else 60
        hard = [random.betavariate(0.5, 0.5) for _ in range(tasks)]
        for model, rate in zip(("sft", "rl"), rates, strict=True):
            solved = [[random.random() < 2 * rate * h for _ in range(4)] for h in hard]
            write_summary(folder, model, split, temperature, solved)


def write_summary(
    folder: Path, model: str, split: str, temperature: float, solved: list[list[bool]]
) -> Path:
    """Write what evaluation would, for `solved` by task and attempt."""
    one = sum(map(sum, solved)) / sum(map(len, solved))
    many = sum(map(any, solved)) / len(solved)
    out = folder / "evaluations" / f"{model}-{split}-T{temperature}"
    out.mkdir(parents=True)
    found = {
        "split": split,
        "temperature": temperature,
        "tasks": len(solved),
        "attempts": len(solved[0]),
        "pass_at": {
            "1": {"value": one, "low": max(0, one - 0.045), "high": one + 0.05, "tasks": 1},
            "4": {"value": many, "low": max(0, many - 0.06), "high": many + 0.06},
        },
        "per_task": {f"t{i}": sum(row) / len(row) for i, row in enumerate(solved)},
        "difficulty": {f"t{i}": ("short", "long")[i % 2] for i in range(len(solved))},
        "seconds": 31.5,
    }
    (out / "summary.json").write_text(json.dumps(found))
    return out
