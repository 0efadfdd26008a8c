"""`agentrl COMMAND …`: finds the command's module and runs it; `python -m launch.NAME` does too.

Exit codes: 0 done, 1 failed, 2 wrong usage, 75 saved and to be resumed.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "demo": "the whole job on one machine: prepare, sft, evaluate, train, evaluate, report",
    "prepare": "make the tasks, and the model and tokenizer where the config asks for it",
    "validate": "prove in sandboxes that tasks can decide: gold passes, nothing else does",
    "grade": "grade predictions (preds.json) on a split, each in a fresh sandbox",
    "plan": "tell every cap on trajectories at once, the smallest first",
    "sft": "make expert traces in real sandboxes and fine-tune the model on them",
    "import_traces": "turn published trajectories into traces that sft reads",
    "train": "train by reinforcement learning: an inference role and a trainer role",
    "evaluate": "attempt a split of the tasks and write pass@1 and pass@k",
    "resume": "go on with a run that was saved, stopped or killed",
    "status": "show where a run stands",
    "watch": "show it live, until the run ends",
    "stop": "ask a run to save and end",
    "image": "build the image that every role of a run runs in, and try one on a node",
    "doctor": "look whether this login node, and the nodes, can carry a run",
    "cluster": "boot and end a real small Slurm on this machine, to try and to test with",
    "convert": "turn a model folder from Hugging Face's layout into Megatron's, or back",
    "audit": "prove from a run's files that every draw is accounted for",
    "export": "write trajectories as files: mini-swe-agent's form, or ATIF",
    "report": "write the page with a run's plots",
    "sweep": "remove the sandboxes that no living process owns",
}
USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` names; return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    if not given or given[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0 if given else USAGE
    if given[0] == "--version":
        from importlib.metadata import version

        print(version("agentrl-slurm"))
        return 0
    if given[0] not in COMMANDS:
        return _unknown(given[0])
    from launch.command import guard

    return guard(importlib.import_module(f"launch.{given[0]}").main, given[1:])


def help_text() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {about}" for name, about in COMMANDS.items()]
    return "\n".join(
        [
            "usage: agentrl COMMAND …      (agentrl COMMAND --help tells its arguments)",
            "",
            *lines,
            "",
            "exit codes: 0 done, 1 failed, 2 wrong usage, 75 saved and to be resumed",
        ]
    )


def _unknown(name: str) -> int:
    near = difflib.get_close_matches(name, COMMANDS, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"commands: {', '.join(COMMANDS)}"
    sys.stderr.write(f"agentrl: no command {name!r}; {hint}\n")
    return USAGE


if __name__ == "__main__":
    sys.exit(main())
