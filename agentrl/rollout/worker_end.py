"""How a worker process ended, as its node reads it: an exit code, and a file where none mends it.

Apart from the worker, whose imports take longer than those of a node that starts its engines.
"""

from __future__ import annotations

import json
from pathlib import Path

from agentrl.errors import NEVER_MENDS, AgentRLError, TooManyInfraFailures
from agentrl.handoff.publish import publish_json

DONE, STOPPED, HOPELESS = 0, 75, 76
TOLD = (*NEVER_MENDS, TooManyInfraFailures)
"""What a worker hands up to its node, which does not start it again."""


def tell(attempt_dir: Path, node: int, worker: int, error: AgentRLError) -> None:
    """Leave one of TOLD, ahead of an end with HOPELESS."""
    kind = next(kind for kind in TOLD if isinstance(error, kind))
    record = {"error": kind.__name__, "message": str(error)}
    publish_json(_file(attempt_dir, node, worker), record)


def told(attempt_dir: Path, node: int, worker: int) -> AgentRLError:
    """Return what a worker process raised before it ended with HOPELESS."""
    record = json.loads(_file(attempt_dir, node, worker).read_bytes())
    kinds = {kind.__name__: kind for kind in TOLD}
    return kinds[record["error"]](record["message"])


def _file(attempt_dir: Path, node: int, worker: int) -> Path:
    return attempt_dir / f"worker-{node}-{worker}.json"
