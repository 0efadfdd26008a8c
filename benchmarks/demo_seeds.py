"""Does the demo learn? Runs it for several seeds; compares RL with SFT on tasks never trained on.

    python -m benchmarks.demo_seeds [--seeds 0 1 2] [--config configs/demo.yaml] [key=value …]

A seed draws the starting model, the expert's tries, the order of tasks and every sample; the tasks
and their splits stay. Intervals: 95 %, bootstrap over (function, site, replacement) clusters. Runs
that are there already are kept. T=0.5 is the control for sharpening: paired, on the same tasks.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from agentrl.estimators import paired_difference
from agentrl.handoff.publish import publish_json

RESULT = Path(__file__).parent / "results" / "demo_seeds.json"
PACKAGES = ("torch", "transformers", "tokenizers", "pyarrow", "aiohttp")
EVALUATIONS = 8
"""Of SFT and of RL: two temperatures on held_out, one on each other split."""
Summary = Mapping[str, Any]


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--config", default="configs/demo.yaml")
    arguments.add_argument("overrides", nargs="*", metavar="key=value")
    given = arguments.parse_args()
    rows = [seed_row(given.config, seed, given.overrides) for seed in given.seeds]
    for row in rows:
        print(told(row))
    result = {
        "command": " ".join(["python -m benchmarks.demo_seeds", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "seeds": rows,
    }
    publish_json(RESULT, result)
    print(f"written to {RESULT}")
    return 0


def seed_row(config: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    """Run the demo for one seed unless its evaluations are all there; return its figures."""
    name = f"demo-seed{seed}"
    command = [sys.executable, "-m", "launch.demo", config, "--control-attempts", "4", *overrides]
    command += [f"name={name}", f"seed={seed}", f"model.path=data/{name}/model"]
    row: dict[str, Any] = {"seed": seed}
    if len(found := summaries(name)) < EVALUATIONS:
        is_whole = not Path("runs", name).exists()
        began = time.monotonic()
        subprocess.run(command, check=True)
        found = summaries(name)
        if is_whole:  # the rest of a run that was begun before says nothing of the time
            row["minutes"] = round((time.monotonic() - began) / 60, 2)
    row["pass_at"] = {name: one["pass_at"] for name, one in sorted(found.items())}
    row["tasks"] = {name: one["tasks"] for name, one in sorted(found.items())}
    row["ungraded"] = {name: one["ungraded"] for name, one in sorted(found.items())}
    row["clusters"] = len(set(found["rl-held_out-T1.0"]["clusters"].values()))
    row["paired"] = {
        what: paired(found, what)
        for what in ("held_out-T1.0", "held_out-T0.5", "unseen_sites-T1.0", "unseen_functions-T1.0")
    }
    return row


def summaries(name: str) -> dict[str, Summary]:
    return {
        path.parent.name: json.loads(path.read_bytes())
        for path in Path("runs", name).glob("evaluations/*/summary.json")
    }


def paired(found: Mapping[str, Summary], what: str) -> dict[str, float]:
    return paired_difference(found[f"sft-{what}"], found[f"rl-{what}"]).as_dict


def told(row: Mapping[str, Any]) -> str:
    """Return the seed's lines for a person, shares in per cent."""
    minutes = f"{row['minutes']} minutes, " if "minutes" in row else ""
    lines = [f"seed {row['seed']}: {minutes}{row['clusters']} held-out clusters"]
    for what, difference in row["paired"].items():
        before, after = (row["pass_at"][f"{label}-{what}"] for label in ("sft", "rl"))
        apart = "apart" if after["1"]["low"] > before["1"]["high"] else "overlap"
        lines.append(
            f"  {what:21} pass@1 SFT {percent(before['1'])} → RL {percent(after['1'])} "
            f"(intervals {apart}), paired {percent(difference, sign='+')}, "
            f"pass@4 {100 * before['4']['value']:.1f} → {100 * after['4']['value']:.1f}"
        )
    return "\n".join(lines)


def percent(estimate: Mapping[str, float], *, sign: str = "") -> str:
    value, low, high = (100 * estimate[key] for key in ("value", "low", "high"))
    return f"{value:{sign}.1f} [{low:.1f}, {high:.1f}]"


if __name__ == "__main__":
    sys.exit(main())
