"""A tiny Qwen3, a config for it, and groups as an inference node would have written them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from agentrl.config import RunConfig
from agentrl.engine.base import VersionSpan
from agentrl.handoff.spool import SpoolWriter
from agentrl.handoff.trajectory import Group, Trajectory
from agentrl.training.packing import Sample

VOCABULARY = 64


def make_model(
    folder: Path, *, hidden: int = 32, layers: int = 2, vocabulary: int = VOCABULARY
) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(7)
    config = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        vocab_size=vocabulary,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def make_config(root: Path, model: Path) -> RunConfig:
    config = RunConfig(name="tiny", runs_dir=str(root / "runs"))
    config.model.path = str(model)
    config.training.groups_per_step = 2
    config.training.steps = 3
    config.training.checkpoint_every = 2
    config.training.warmup_steps = 2
    config.training.wait_timeout_s = 120.0
    config.training.micro_batch_tokens = 128
    return config


def make_trajectory(
    draw: int, attempt: int, *, reward: float | None, version: int = 0, cause: str = "submitted"
) -> Trajectory:
    rng = random.Random(1000 * draw + attempt)
    length = rng.randrange(12, 30)
    prompt = 5
    mask = [index >= prompt and index % 7 != 0 for index in range(length)]
    return Trajectory(
        run="tiny",
        draw=draw,
        task_id=f"task-{draw}",
        attempt=attempt,
        node=0,
        tokens=[rng.randrange(VOCABULARY) for _ in range(length)],  # type: ignore[arg-type]
        logprobs=[-4.0 if on else 0.0 for on in mask],  # type: ignore[arg-type]
        loss_mask=mask,  # type: ignore[arg-type]
        versions=(VersionSpan(version=version, start=prompt, end=length),),
        reward=reward,
        cause=cause,
        turns=1,
    )


def make_group(draw: int, rewards: list[float | None], *, version: int = 0) -> Group:
    return Group(
        draw=draw,
        task_id=f"task-{draw}",
        trajectories=tuple(
            make_trajectory(
                draw,
                attempt,
                reward=reward,
                version=version,
                cause="submitted" if reward is not None else "sandbox_lost",
            )
            for attempt, reward in enumerate(rewards)
        ),
    )


def fill_spool(
    config: RunConfig, draws: range, rewards: tuple[float | None, ...] = (1, 0, 0, 1)
) -> None:
    writer = SpoolWriter(config.run_dir / "spool", 0)
    for draw in draws:
        writer.write(make_group(draw, list(rewards)))


def make_experts(tokens: int, *, layers: int, count: int, seed: int = 0) -> np.ndarray:
    """Return two distinct experts for each token and layer, drawn at random."""
    rng = np.random.default_rng([tokens, seed])
    drawn = rng.permuted(np.tile(np.arange(count), (tokens, layers, 1)), axis=2)
    return drawn[:, :, :2].astype(np.uint8)


def with_experts(samples: list[Sample], *, layers: int = 2, count: int = 4) -> list[Sample]:
    """Return samples whose tokens go to experts drawn at random."""
    return [
        replace(one, experts=make_experts(len(one.tokens), layers=layers, count=count))
        for one in samples
    ]


def write_traces(path: Path, count: int = 24) -> Path:
    """Write traces of up to 16 words, 8 different ones; return the file."""
    lines = []
    for index in range(count):
        tokens = [(index + step) % 8 for step in range(12 + index % 5)]
        mask = [step >= 4 for step in range(len(tokens))]
        lines.append(json.dumps({"tokens": tokens, "loss_mask": mask}))
    path.write_text("\n".join(lines))
    return path


def run_ranks(folder: Path, work: str, size: int, *extra: str) -> None:
    """Run `module:function(rank, size, *extra)` of this folder in `size` gloo processes."""
    script = (
        "import importlib, os, sys, torch.distributed as dist\n"
        "store, work, rank, size, *extra = sys.argv[1:]\n"
        "rank, size = int(rank), int(size)\n"
        "dist.init_process_group('gloo', init_method=f'file://{store}', rank=rank,\n"
        "                        world_size=size)\n"
        "module, _, name = work.partition(':')\n"
        "getattr(importlib.import_module(module), name)(rank, size, *extra)\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
        "os._exit(0)\n"  # gloo's threads, at times alive still, would abort the interpreter's end
    )
    store = folder / "ranks-store"
    store.unlink(missing_ok=True)
    paths = [str(above) for above in Path(__file__).parents[:3]]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    logs = [folder / f"rank-{rank}.log" for rank in range(size)]
    ranks = []
    for rank, log in enumerate(logs):
        command = [sys.executable, "-c", script, str(store), work, str(rank), str(size), *extra]
        with log.open("w") as words:  # a pipe would fill up, and the rank stand still
            ranks.append(subprocess.Popen(command, env=environment, stderr=words))
    deadline = time.monotonic() + 1700
    try:
        while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
            assert time.monotonic() < deadline, [log.read_text()[-2000:] for log in logs]
            time.sleep(0.05)
    finally:
        for rank in ranks:  # those that wait for one that failed
            rank.kill()
            rank.wait()
    for code, log in zip(codes, logs, strict=True):
        assert not code, log.read_text()
