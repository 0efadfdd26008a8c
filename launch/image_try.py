"""One token of each engine and one step of each trainer that is in here, on a tiny random model."""

from __future__ import annotations

import asyncio
import importlib.util
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path

import aiohttp
import numpy as np

from agentrl import config as schema
from agentrl.config import EngineConfig, ModelConfig, RunConfig
from agentrl.engine import startup
from agentrl.engine.devices import EngineShare
from agentrl.engine.startup import Start
from agentrl.errors import LaunchError
from agentrl.training import ranks
from agentrl.training.backends import open_backend
from agentrl.training.packing import Sample, pack_step
from launch.findings import Finding, fail, looked, ok, skip

ENGINES = {"embedded": "torch", "sglang": "sglang"}
TRAINERS = {"torch": "torch", "megatron": "megatron.core"}
"""Kind → the module that it needs."""
SHAPE = ModelConfig(hidden_size=256, heads=4, head_dim=64, layers=2)
"""Tiny, but with heads as wide as the attention kernels of GPUs take them."""
TOKENS = tuple(range(10, 26))


def findings() -> Iterator[Finding]:
    """Yield a finding for each engine and each trainer."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        made = list(looked("tiny model", partial(_make, model)))
        if made[0].state == "fail":
            yield from made
            return
        for kind, module in ENGINES.items():
            name = f"{kind} token"
            yield from looked(name, partial(_where, module, partial(token, kind, model), name))
        for kind, module in TRAINERS.items():
            name = f"{kind} step"
            yield from looked(name, partial(_where, module, partial(step, kind, model), name))


def token(kind: str, model: Path) -> Finding:
    """Start an engine as a run does and have it sample one token."""
    config = engine_config(kind, model.parent)
    began = time.monotonic()
    value = asyncio.run(_sampled(config, model))
    if not -100 < value <= 0:
        return fail(f"{kind} token", f"its log-probability is {value}", "see the engine's issues")
    return ok(f"{kind} token", f"sampled, log-probability {value:.2f}, {_since(began)}")


def engine_config(kind: str, folder: Path) -> EngineConfig:
    """Return the preset that a run would take here."""
    torch = import_module("torch")
    place = "-rocm" if torch.version.hip else "" if _gpus() else "-cpu"
    os.environ.setdefault("SGLANG_PYTHON", sys.executable)
    path = folder / "check.yaml"
    path.write_text("name: check\n")
    chosen = [f"engine={kind}{place if kind == 'sglang' else ''}", "engine.start_timeout_s=900"]
    return schema.load(path, chosen).engine


def step(kind: str, model: Path) -> Finding:
    """Take one optimizer step as the trainer does."""
    if kind == "megatron" and not _gpus():
        return skip("megatron step", "megatron-core needs a GPU")
    config = RunConfig(model=ModelConfig(path=str(model)))
    config.training.backend = kind
    config.training.device = "gpu" if _gpus() else "cpu"
    config.training.packing = "packed" if kind == "megatron" else "padded"
    sample = Sample(
        tokens=np.array(TOKENS, np.int32),
        loss_mask=np.arange(len(TOKENS)) > 3,
        engine_logprobs=np.full(len(TOKENS), -6.0, np.float32),
        advantage=1.0,
        weight=1.0 / len(TOKENS),
    )
    began = time.monotonic()
    with ranks.started(config) as world:
        found = open_backend(config, world).train_step(pack_step([sample], config.training))
    if not math.isfinite(found["grad_norm"]) or found["grad_norm"] <= 0:
        return fail(f"{kind} step", f"gradient norm {found['grad_norm']}", "try another GPU, torch")
    return ok(f"{kind} step", f"taken, gradient norm {found['grad_norm']:.2g}, {_since(began)}")


async def _sampled(config: EngineConfig, model: Path) -> float:
    """Return the log-probability of the one token that an engine samples."""
    start = Start(index=0, announced=None, log=model.parent / "engine.log", share=EngineShare())
    process, ready = await startup.launch(config, model, start)
    asked = {
        "input_ids": list(TOKENS),
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
    }
    try:
        async with aiohttp.ClientSession() as session:
            url = await startup.wait_until_ready(
                session, process, ready, timeout_s=config.start_timeout_s
            )
            async with session.post(f"{url}/generate", json=asked) as answer:
                if answer.status != 200:
                    raise LaunchError(f"/generate: {answer.status} {await answer.text()}")
                found = await answer.json()
    finally:
        await process.kill()
    return float(found["meta_info"]["output_token_logprobs"][0][0])


def _make(folder: Path) -> Finding:
    from agentrl.tasks.model_init import make_model, make_tokenizer, save_model

    tokenizer = make_tokenizer(["def f(x):\n    return x + 1\n"] * 8, SHAPE.vocab_size)
    save_model(folder, make_model(SHAPE, tokenizer, 0), tokenizer, {})
    return ok("tiny model", str(folder))


def _where(module: str, look: partial[Finding], name: str) -> Finding:
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return skip(name, f"no {module.partition('.')[0]} in here")
    return look()


def _gpus() -> int:
    return int(import_module("torch").cuda.device_count())


def _since(began: float) -> str:
    return f"{time.monotonic() - began:.0f} s"
