"""The trainer role: take groups, step, publish, checkpoint, until the run has its steps.

Version = weights after that many optimizer steps, always. A batch whose groups all lack signal
takes no step: its draws are consumed and announced under the version that stands.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, KeysView
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

import agentrl.config
from agentrl.config import RunConfig
from agentrl.engine import quarantine
from agentrl.errors import DivergedError, Interrupted, NoSignalError, WaitTimeout
from agentrl.events import Step, VersionEvent, Writer, now
from agentrl.model_fit import check_fit
from agentrl.training import checkpoint, ranks, rng
from agentrl.training.backend import Backend
from agentrl.training.backends import open_backend
from agentrl.training.checkpoint import Checkpoint
from agentrl.training.engine_gaps import EngineGaps, gaps_by_age
from agentrl.training.flops import Meter, open_meter
from agentrl.training.intake import Batch, Intake
from agentrl.training.packing import pack_step, padding_share
from agentrl.training.shares import ShareWriter
from agentrl.training.taken import Taken
from agentrl.weights.push import Push
from agentrl.weights.pusher import Pusher
from agentrl.weights.quiet import quiet
from agentrl.weights.version import Announced, prune, publish_version, reannounce

log = logging.getLogger(__name__)
DONE, SAVED = 0, 75
MAX_BATCHES_WITHOUT_SIGNAL = 25
MAX_STEPS_SKIPPED = 3
"""Of which no gradient was a number, in a row."""


def train(
    config: RunConfig,
    *,
    attempt: int,
    stop: Callable[[], bool],
    events: Writer,
    backend: Backend | None = None,
    address: str = "127.0.0.1",
) -> int:
    """Train until `training.steps`, from the newest good checkpoint or the starting model.

    address: of the interface where groups are taken, if they come by socket.
    Returns 0 when the run is done, 75 when `stop` asked for the end and everything is saved.
    Raises WaitTimeout, NoSignalError, DivergedError, PublishError, CheckpointError.
    """
    check_fit(config)
    intake = Intake(config=config, consumed={}, events=events)  # refuses before ranks are started
    with contextlib.ExitStack() as open_ones:
        if backend is None:
            world = open_ones.enter_context(ranks.started(config))
            backend = open_backend(config, world)
        trainer = _start(intake, attempt, backend)
        device = ranks.pick_device(config)
        trainer.meter = open_meter(Path(config.model.path), device, config.training.ranks)
        if config.weights == "collective":
            trainer.pusher = open_pusher(config, attempt, address)
            open_ones.callback(trainer.pusher.close)
        open_ones.enter_context(trainer.writer)
        open_ones.enter_context(trainer.intake.receiving(attempt, address))
        return _run(trainer, stop)


def _run(trainer: _Trainer, stop: Callable[[], bool]) -> int:
    """Run to the end, and save whatever the end is."""
    try:
        return trainer.run(stop)
    except Interrupted as reason:
        log.info("%s; saving", reason)
        trainer.save()
        return SAVED
    except (WaitTimeout, NoSignalError):
        trainer.save()
        raise


def _start(intake: Intake, attempt: int, backend: Backend) -> _Trainer:
    config, events = intake.config, intake.events
    rng.seed_all(config.seed)
    found = checkpoint.load_latest(config.run_dir / "checkpoints", events)
    trainer = _Trainer(
        config=config, attempt=attempt, events=events, backend=backend, intake=intake
    )
    if found is not None:
        backend.restore(found.backend)
        keep = config.training.keep_checkpoints
        checkpoint.tidy(config.run_dir / "checkpoints", found, keep)
        intake.consumed.update(found.consumed)
        intake.pending.update({name: int(count) for name, count in found.pending.items()})
        trainer.step = trainer.saved_step = found.step
        trainer.saved_draws = len(found.consumed)
        # a crash may have come between the checkpoint and this
        intake.delete(found.consumed.keys())
        log.info("resumed at step %d with %d draws consumed", found.step, len(found.consumed))
    trainer.publish()
    return trainer


class _Clock:
    """Seconds by phase since the last report; a batch passed over adds to the next step's wait."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.started = now()
        self.laps: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, phase: str) -> None:
        """Charge the time since the last lap to `phase`."""
        here = time.monotonic()
        self.laps[phase] = self.laps.get(phase, 0.0) + here - self._last
        self._last = here


@dataclass(kw_only=True)
class _Trainer:
    config: RunConfig
    attempt: int
    events: Writer
    backend: Backend
    intake: Intake
    step: int = 0
    saved_step: int = -1
    saved_draws: int = 0
    announced: Announced | None = None
    pusher: Pusher | None = None
    """None: engines load versions from disk, as they all do when they start."""
    meter: Meter | None = None
    writer: ShareWriter = field(init=False)
    empty_batches: int = 0
    skipped_steps: int = 0
    clock: _Clock = field(default_factory=_Clock)
    engine_gaps: EngineGaps = field(init=False)

    def __post_init__(self) -> None:
        self.writer = ShareWriter(self.longest_write_s)
        self.engine_gaps = EngineGaps(max_drift=self.config.engine.max_drift)

    @property
    def longest_write_s(self) -> float:
        return ranks.longest_write_s(self.config.training)

    @property
    def weights(self) -> Path:
        return self.config.run_dir / "weights"

    def run(self, stop: Callable[[], bool]) -> int:
        self.clock.restart()
        while self.step < self.config.training.steps:
            if stop():
                raise Interrupted(f"stopped at step {self.step}")
            batch = self.intake.wait(self.step, stop, self.announce_consumed)
            self.clock.lap("wait")
            if batch.samples:
                self.take_step(batch)
            else:
                self.pass_over(batch)
        self.save()
        return DONE

    def take_step(self, batch: Batch) -> None:
        batches = pack_step(batch.samples, self.config.training)
        taken = Taken(draws=tuple(batch.outcome), nodes=batch.nodes, version=self.step)
        try:
            with self.intake.reading_ahead():
                learned = self.backend.train_step(batches, taken)
        except DivergedError as error:
            self.skip(batch, error)
            return
        self.step += 1
        self.empty_batches = self.skipped_steps = 0
        self.intake.mark(batch.outcome)
        metrics = {**batch.metrics, **learned, **self.intake.counted()}
        metrics |= {"padding": padding_share(batches), "micro_batches": len(batches)}
        metrics |= self.judge_engines(batch)
        self.clock.lap("update")
        if self.meter is not None:
            metrics |= self.meter.speed(batch.samples, self.clock.laps["update"])
        is_last = self.step >= self.config.training.steps
        if not is_last:
            self.publish()
            self.clock.lap("publish")
        if self.writer.is_done:
            self.saved()  # raises what went wrong with it
        self.report(metrics)  # before the checkpoint from which a next life would not take it again
        if is_last:
            self.save()  # before it is announced as done
            self.publish()
        elif self.step % self.config.training.checkpoint_every == 0:
            self.save(waits=not self.config.training.checkpoint_in_background)
            self.clock.lap("checkpoint")

    def skip(self, batch: Batch, error: DivergedError) -> None:
        """Consume a batch whose gradient is no number; the weights stand. Raises after too many."""
        self.skipped_steps += 1
        log.warning("%s; skipped, %d of %d", error, self.skipped_steps, MAX_STEPS_SKIPPED)
        if self.skipped_steps >= MAX_STEPS_SKIPPED:
            raise error
        for draw in batch.outcome:
            self.intake.drop(draw, "diverged")
        self.announce_consumed()

    def judge_engines(self, batch: Batch) -> dict[str, float]:
        """Ask nodes to quarantine engines that stand out; they look when a version comes."""
        gaps = self.backend.gaps
        self.engine_gaps.take(batch.origins, gaps)
        found = self.engine_gaps.judge()
        attempt_dir = self.config.run_dir / "attempts" / f"{self.attempt:04d}"
        for node, reasons in found.items():
            quarantine.ask(attempt_dir, node, reasons)
        count = sum(map(len, found.values()))
        by_age = gaps_by_age(batch.origins, gaps)
        return by_age | ({"quarantined": float(count)} if count else {})

    def pass_over(self, batch: Batch) -> None:
        """Consume a batch that teaches nothing. Raises NoSignalError after too many in a row."""
        self.intake.mark(batch.outcome)
        self.empty_batches += 1
        if self.empty_batches >= MAX_BATCHES_WITHOUT_SIGNAL:
            raise NoSignalError(
                f"{self.empty_batches} batches in a row at version {self.step} had no group with "
                f"signal; the last one's mean reward is {batch.metrics['reward']:.3f}. Give tasks "
                "that the policy solves sometimes, or raise rollout.attempts_per_task"
            )
        self.announce_consumed()

    def publish(self) -> None:
        """Write and announce the version that stands; then push it to the engines that wait."""
        started = now()
        push: Push | None = None
        is_done = self.step >= self.config.training.steps  # nobody is there to take a push then

        def offer(tensors: dict[str, Tensor]) -> str:
            """Tell the engines that are there what a push will bring; return the transport."""
            nonlocal push
            push = self.pusher.announce(self.step, tensors) if self.pusher else None
            return "collective" if push else "disk"

        with quiet(self.weights):
            self.announced = publish_version(
                self.weights,
                run=self.config.name,
                attempt=self.attempt,
                version=self.step,
                step=self.step,
                tensors=self.backend.export_hf(),
                model_folder=Path(self.config.model.path),
                consumed=self.intake.ranges(),
                done=is_done,
                transport="disk" if is_done else offer,
            )
        prune(self.weights, self.config.training.keep_versions)
        size = sum(self.announced.sizes.values())
        event = VersionEvent(
            version=self.step, phase="published", size=size, start=started, end=now()
        )
        self.events.write(event)
        if push is not None:
            self.send(push, size)

    def send(self, push: Push, size: int) -> None:
        """Push what was announced, gathered anew; what fails, engines load from disk."""
        assert self.pusher is not None
        started = now()
        why = self.pusher.send(push, self.backend.export_hf())
        phase = "push_failed" if why else "pushed"
        self.events.write(
            VersionEvent(version=self.step, phase=phase, size=size, start=started, end=now())
        )

    def announce_consumed(self) -> None:
        if self.announced is not None:
            self.announced = reannounce(self.weights, self.announced, consumed=self.intake.ranges())

    def save(self, *, waits: bool = True) -> None:
        """Checkpoint unless nothing changed since; then delete the spool files that it covers.

        Without `waits` a thread writes it while training goes on.
        """
        self.saved()
        if (self.step, len(self.intake.consumed)) == (self.saved_step, self.saved_draws):
            return
        folder = self.config.run_dir / "checkpoints"
        with quiet(self.weights):
            temporary = checkpoint.begin(folder, self.step, self.attempt)
            state = Checkpoint(
                step=self.step,
                version=self.step,
                backend=self.backend.share(temporary),
                consumed=dict(self.intake.consumed),
                pending=dict(self.intake.pending),
                config_hash=config_hash(self.config),
            )
        self.writer.begin(lambda: self.write(temporary, state))
        self.saved_step, self.saved_draws = self.step, len(self.intake.consumed)
        if waits:
            self.saved()

    def write(self, temporary: Path, state: Checkpoint) -> KeysView[int]:
        """Write a checkpoint that was begun; return the draws that it covers."""
        training = self.config.training
        files = checkpoint.Files(
            model_folder=Path(self.config.model.path),
            keep=training.keep_checkpoints,
            attempt=self.attempt,
            ranks=training.ranks,
            limit_s=training.checkpoint_timeout_s,
        )
        self.events.sync()  # what this checkpoint covers is told, though the node dies
        with quiet(self.weights, longest_s=training.checkpoint_timeout_s):
            checkpoint.complete(temporary, state, files, self.events)
        return state.consumed.keys()

    def saved(self) -> None:
        """Await the checkpoint that is being written, if any, and delete what it covers."""
        covered = self.writer.end(self.longest_write_s)
        if covered is not None:
            self.intake.delete(covered)

    def report(self, metrics: dict[str, float]) -> None:
        laps = self.clock.laps
        event = Step(
            step=self.step,
            version=self.step,
            wait_s=laps.get("wait", 0.0),
            logprob_s=0.0,  # the update's own forward pass gives the old log-probabilities
            update_s=laps.get("update", 0.0),
            publish_s=laps.get("publish", 0.0),
            checkpoint_s=laps.get("checkpoint", 0.0),
            metrics=metrics,
            start=self.clock.started,
            end=now(),
        )
        self.events.write(event)
        log.info(
            "step %d: reward %.3f, loss %.4f, %.1f s",
            self.step,
            metrics["reward"],
            metrics["loss"],
            event.seconds,
        )
        self.clock.restart()


def open_pusher(config: RunConfig, attempt: int, address: str) -> Pusher:
    """Return what pushes weights from this process, on the trainer's device."""
    return Pusher(
        run_dir=config.run_dir,
        attempt=attempt,
        address=address,
        device=ranks.pick_device(config),
        timeout_s=config.push_timeout_s,
        bucket_bytes=config.push_bucket_mb << 20,
        gpus_per_engine=config.engine.gpus_per_engine if config.engine.kind == "sglang" else 1,
    )


def config_hash(config: RunConfig) -> str:
    """Return the sha256 (hex) of the whole resolved config."""
    return hashlib.sha256(agentrl.config.to_yaml(config).encode()).hexdigest()
