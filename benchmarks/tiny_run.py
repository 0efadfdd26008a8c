"""A run so small that a laptop's cores bear its four nodes: its config, tasks and tuned model."""

from __future__ import annotations

from pathlib import Path

import psutil

from launch.cli import main as agentrl

ROOT = Path(__file__).parents[1]
CONFIG = """\
extends: {root}/configs/demo.yaml
name: tiny
runs_dir: {folder}/runs
agent: {{prompts: {root}/configs/agents/repair.yaml}}
tasks: {{folder: {folder}/tasks, train: 4, held_out: 4, unseen_sites: 2, unseen_functions: 2}}
model: {{path: {folder}/model, hidden_size: 64, intermediate_size: 128, layers: 2, heads: 2}}
rollout: {{concurrency: 4, attempts_per_task: 4}}
sft: {{traces: 48, expert_accuracy: 0.5, epochs: 12}}
training: {{steps: 6, groups_per_step: 2, checkpoint_every: 2}}
grace_s: 40
"""


def prepared(work: Path) -> Path:
    """Make two easy tasks and a model that was tuned on them, unless they are there.

    Returns the config; `model_of` is the model. Some tries of each task are solved, some not.
    """
    config = work / "config.yaml"
    if config.is_file():
        return config
    work.mkdir(parents=True, exist_ok=True)
    draft = work / "draft.yaml"
    draft.write_text(CONFIG.format(root=ROOT, folder=work))
    _agentrl("prepare", draft)
    two = (work / "tasks" / "sft.jsonl").read_bytes().splitlines(keepends=True)[:2]
    for split in ("sft", "train"):
        (work / "tasks" / f"{split}.jsonl").write_bytes(b"".join(two))
    _agentrl("sft", draft)
    draft.rename(config)
    return config


def model_of(config: Path) -> Path:
    return config.parent / "runs" / "tiny" / "sft" / "model"


def roles_of(run: Path, role: str = "") -> list[psutil.Process]:
    """Return the running roles of a run, of one role or of both; each one's parent keeps it."""
    found = []
    for one in psutil.process_iter(["cmdline"]):
        words = one.info["cmdline"] or []
        if "launch.role" in words and str(run) in words and role in ("", *words):
            parent = one.parent()
            if parent is not None and parent.cmdline() == words and words[0] != "srun":
                found.append(one)
    return found


def _agentrl(command: str, config: Path) -> None:
    if code := agentrl([command, str(config)]):
        raise SystemExit(f"agentrl {command} {config} ended with {code}")
