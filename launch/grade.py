"""`agentrl grade CONFIG PREDICTIONS [--split SPLIT] [--out FILE] [key=value …]`: grade patches.

PREDICTIONS is a preds.json (mini-swe-agent's, SWE-bench's, `agentrl evaluate`'s own) or such rows
as JSONL; or `gold`, each task's own fix, or `empty`, no change. Each is graded in a fresh sandbox.
Written is SWE-bench's report, by default beside the predictions (else ./gold-SPLIT.report.json).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from agentrl import config as schema
from agentrl.config import RunConfig
from agentrl.handoff.publish import publish_json
from launch.command import add_overrides, guard, parse, parser, say
from launch.progress import Bar
from slurm.exit_record import DONE


def main(argv: Sequence[str]) -> int:
    """Grade one file of predictions on one split."""
    arguments = parser("grade", __doc__)
    arguments.add_argument("--split", help="default: evaluation.split")
    arguments.add_argument("--out", type=Path, help="where the report goes")
    arguments.add_argument("config", metavar="CONFIG", help="YAML of the run: its tasks, sandbox")
    arguments.add_argument("predictions", metavar="PREDICTIONS", help="a file, `gold` or `empty`")
    add_overrides(arguments)
    given = parse(arguments, argv)
    config = schema.load(given.config, given.overrides)
    split = given.split or config.evaluation.split
    out = given.out or _beside(given.predictions, split)
    summary = grade_split(config, split, given.predictions, out)
    say(f"{split}: {summary}; report {out}")
    return DONE


def grade_split(config: RunConfig, split: str, predictions: str, out: Path) -> str:
    """Grade `predictions` on a split and publish the report; return its numbers for a person."""
    from agentrl.tasks.load import load_split
    from agentrl.tasks.predictions import EMPTY, GOLD, grade_all, read_predictions, report

    tasks = load_split(config.tasks, split)
    own = predictions in (GOLD, EMPTY)
    patches = predictions if own else read_predictions(Path(predictions))
    done = 0
    with Bar(f"grading {split}", len(tasks) if own else len(patches)) as bar:

        def told() -> None:
            nonlocal done
            done += 1
            bar.update(done)

        graded = asyncio.run(grade_all(config, tasks, patches, told))
    found = report(tasks, graded)
    publish_json(out, found)
    return (
        f"{found['resolved_instances']} of {found['total_instances']} resolved, "
        f"{found['unresolved_instances']} not, {found['empty_patch_instances']} without a patch, "
        f"{found['error_instances']} without a verdict"
    )


def _beside(predictions: str, split: str) -> Path:
    path = Path(predictions)
    return path.with_suffix(".report.json") if path.suffix else Path(f"{path}-{split}.report.json")


if __name__ == "__main__":
    sys.exit(guard(main))
