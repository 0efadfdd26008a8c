"""What each role of a launch attempt runs, on this machine and on a cluster alike.

A role reads its run's own config, polls the stop flag, and leaves an exit record. Whatever it
raises is recorded first and then raised again, so that the job has the traceback by role.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from agentrl.config import RunConfig
from agentrl.engine.devices import EngineShare
from agentrl.errors import Interrupted
from agentrl.events import EventWriter
from launch import network
from launch.fence import Fence
from launch.run_dir import RunDir
from launch.shares import ephemeral_ports, shares_of, vendor_of
from launch.signals import StopFlag
from slurm import exit_record

ALIKE = {"NCCL_CUMEM_ENABLE": "0"}
"""What NCCL and RCCL must find alike in all roles, or a push of weights hangs. SGLang sets 0 where
it finds nothing; so do slime, miles and verl. `cluster.environment`, or the shell, may say
otherwise for all."""
Body = Callable[[RunConfig, StopFlag, EventWriter], int]
log = logging.getLogger(__name__)


def trainer_role(run_dir: str, attempt: int) -> int:
    """Train until the last step or until asked to stop; return 0 or 75."""

    def body(config: RunConfig, stop: StopFlag, events: EventWriter) -> int:
        from agentrl.training.loop import train

        address = network.address_of_trainer(RunDir(Path(run_dir)).attempt(attempt))
        return train(config, attempt=attempt, stop=stop, events=events, address=address)

    return play("trainer", body, run_dir=run_dir, attempt=attempt)


def inference_role(run_dir: str, attempt: int, node: int) -> int:
    """Serve engines and roll out groups on one node until the trainer is done; return 0 or 75."""

    def body(config: RunConfig, stop: StopFlag, events: EventWriter) -> int:
        from agentrl.rollout.node import run_node

        return asyncio.run(
            run_node(
                config,
                node=node,
                attempt=attempt,
                run_dir=Path(run_dir),
                stop=stop,
                events=events,
                shares=shares_here(config, RunDir(Path(run_dir)).attempt(attempt)),
            )
        )

    return play("inference", body, run_dir=run_dir, attempt=attempt, node=node)


def shares_here(config: RunConfig, attempt_dir: Path) -> tuple[EngineShare, ...]:
    """Return the engines' shares of a job's node; none on one machine, where any port will do."""
    if network.plan_of(attempt_dir) is None:
        return ()
    engine = config.engine
    return shares_of(engine, os.environ, vendor=vendor_of(engine), ephemeral=ephemeral_ports())


def play(role: str, body: Body, *, run_dir: str, attempt: int, node: int = 0) -> int:
    """Run `body` as a role: its log, events, stop flag and exit record."""
    for name, value in ALIKE.items():  # before anything asks for a device
        os.environ.setdefault(name, value)
    started = time.time()
    run = RunDir(Path(run_dir))
    folder = run.attempt(attempt)
    faulthandler.enable()
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,  # a step's keeper has set handlers of its own, for warnings only
    )
    log.info(
        "%s on node %d, attempt %d of run %s, pid %d", role, node, attempt, run.name, os.getpid()
    )
    events = EventWriter(run.path / "events", role, node=str(node))
    network.tell(events, folder, os.environ.get("SLURMD_NODENAME", ""))
    stop = StopFlag(run.stop_file, events).install()
    try:
        with Fence(run, attempt):
            code = body(run.config(), stop, events)
    except Interrupted:
        code = exit_record.SAVED
    except Exception as error:
        step = run.checkpoint_step()
        exit_record.write(
            folder, exit_record.from_error(role, node, error, step=step, started=started)
        )
        raise
    finally:
        events.close()
    step = run.checkpoint_step()
    exit_record.write(folder, exit_record.from_code(role, node, code, step=step, started=started))
    log.info("%s on node %d ends with code %d", role, node, code)
    return code
