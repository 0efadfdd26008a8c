"""What all commands share: arguments, exit codes, and how an error is told to a person."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from agentrl.errors import AgentRLError
from slurm.exit_record import FAILED, classify

PARTIAL = 130
"""Exit code after a Ctrl-C that had nothing to save."""


def parser(name: str, about: str) -> argparse.ArgumentParser:
    """Return the parser of one command; its wrong usage exits 2, as argparse does."""
    return argparse.ArgumentParser(
        prog=f"agentrl {name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def parse(arguments: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse with options and key=value in any order; exits 2 on wrong usage."""
    return arguments.parse_intermixed_args(list(argv))


def add_config(to: argparse.ArgumentParser) -> None:
    """Add CONFIG and its overrides."""
    to.add_argument("config", metavar="CONFIG", help="YAML of the run, such as configs/demo.yaml")
    add_overrides(to)


def add_overrides(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "overrides", metavar="key=value", nargs="*", help="laid over it, as training.steps=10"
    )


def guard(main: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code. Our own errors are one message, others a traceback."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        return main(sys.argv[1:] if argv is None else argv)
    except AgentRLError as error:
        sys.stderr.write(f"agentrl: {error}\n")
        return classify(error)[0]
    except KeyboardInterrupt:
        sys.stderr.write("agentrl: interrupted\n")
        return PARTIAL
    except BrokenPipeError:
        return FAILED
    except Exception:
        traceback.print_exc()
        return FAILED


def say(text: str) -> None:
    """Print a line now, even into a pipe; the work goes on when its reader has gone."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # for the rest of the process
