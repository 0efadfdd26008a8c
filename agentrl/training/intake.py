"""From spool files to the groups of one step, and the one record of what became of each draw."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.config import RunConfig
from agentrl.engine.experts import ModelExperts
from agentrl.errors import Interrupted, RecordError, WaitTimeout
from agentrl.events import Drop, Writer
from agentrl.handoff.replayed import replayed_experts
from agentrl.handoff.socket_receiver import SocketReceiver
from agentrl.handoff.spool import delete, list_files, read_group
from agentrl.handoff.trajectory import Group, Trajectory
from agentrl.hf_shape import read_vocabulary
from agentrl.rollout.draws import DrawSet
from agentrl.training.checkpoint import FILTERED, TRAINED
from agentrl.training.engine_gaps import Origin, origin_of
from agentrl.training.grpo import group_advantages, token_weights
from agentrl.training.packing import Sample

log = logging.getLogger(__name__)
SHORTEST_POLL_S = 0.02
LONGEST_POLL_S = 0.5


@dataclass(kw_only=True, slots=True)
class Batch:
    """The groups of one step, lowest draws first, and what is counted about them."""

    samples: list[Sample]
    """Of the groups with signal; empty when none has any."""
    origins: list[Origin]
    """Of each sample."""
    nodes: tuple[int, ...]
    """That wrote the groups, in the order of `outcome`."""
    outcome: dict[int, str]
    """What its draws become once the step is taken."""
    metrics: dict[str, float]


@dataclass(kw_only=True)
class Intake:
    """Takes finished groups from the spool in the order of their draws.

    A file that cannot be read, a group that its node dropped, one with fewer than min_group graded
    trajectories, and one sampled more than max_trained_staleness versions ago are consumed at once
    as filtered, and do not count among the step's groups. A group older than that bound's inside is
    trained; its importance weights are truncated, and its staleness is reported.

    So is one with what no engine of this model and no grader gives: tokens outside its vocabulary,
    log-probabilities or rewards that are no numbers. One would stop a step, the others spoil it.

    In a run that replays routing every graded trajectory must tell its experts: a group with one
    that doesn't is filtered, for its tokens would go elsewhere than in the engine.
    """

    config: RunConfig
    consumed: dict[int, str]
    events: Writer
    pending: Counter[str] = field(default_factory=Counter)
    """Counts since the last step event: filtered_REASON, infra_CAUSE."""
    _ready: dict[int, Group] = field(default_factory=dict)
    _taken: frozenset[int] = frozenset()
    """Draws of the step under way."""
    _receiver: SocketReceiver | None = None
    _experts: ModelExperts | None = field(init=False)
    _vocabulary: int = field(init=False)

    def __post_init__(self) -> None:
        self._experts = replayed_experts(self.config)
        self._vocabulary = read_vocabulary(Path(self.config.model.path))

    @property
    def spool(self) -> Path:
        return self.config.run_dir / "spool"

    @property
    def ready(self) -> int:
        """Groups read, and not yet taken for a step."""
        return len(self._ready)

    @contextmanager
    def receiving(self, attempt: int, address: str) -> Iterator[None]:
        """Let groups in while the block lasts; what comes by socket is put into the spool.

        address: of the interface to listen on.
        """
        if self.config.handoff == "files":
            yield
            return
        with SocketReceiver(
            spool=self.spool,
            attempt_dir=self.config.run_dir / "attempts" / f"{attempt:04d}",
            run=self.config.name,
            attempt=attempt,
            consumed=self.consumed,
            events=self.events,
            address=address,
        ) as self._receiver:
            yield

    @contextmanager
    def reading_ahead(self) -> Iterator[None]:
        """Read the groups that come while the block lasts, so that the next step finds them read.

        Nothing else of the intake may be called in it.
        """
        ends = threading.Event()
        with ThreadPoolExecutor(1, "reading-ahead") as pool:
            reading = pool.submit(self._read_until, ends)
            try:
                yield
            finally:
                ends.set()
            reading.result()

    def ranges(self) -> list[list[int]]:
        """Return the consumed draws as announcements hold them."""
        return DrawSet(self.consumed).to_ranges()

    def wait(self, version: int, stop: Callable[[], bool], told: Callable[[], None]) -> Batch:
        """Return the next step's groups once there are enough.

        `told` is called whenever draws were filtered meanwhile: nodes start new ones only when they
        know. Raises WaitTimeout with the missing draws, Interrupted when `stop` says so,
        PublishError when what came by socket could not be written.
        """
        wanted = self.config.training.groups_per_step
        limit = self.config.training.wait_timeout_s
        deadline, pause = time.monotonic() + limit, SHORTEST_POLL_S
        while True:
            known, consumed = len(self._ready), len(self.consumed)
            self._poll(version)
            if len(self._ready) >= wanted:
                return self._take(wanted, version)
            if len(self.consumed) > consumed:
                told()
            if stop():
                raise Interrupted(f"stopped while waiting for groups at version {version}")
            if time.monotonic() > deadline:
                raise WaitTimeout(self._missing(wanted, limit))
            pause = SHORTEST_POLL_S if len(self._ready) > known else pause
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL_S)

    def mark(self, outcome: dict[int, str]) -> None:
        self.consumed.update(outcome)
        for why in outcome.values():
            if why != TRAINED:
                self.pending[f"filtered_{why.removeprefix(FILTERED)}"] += 1

    def counted(self) -> dict[str, float]:
        """Return the counts since this was last asked."""
        counts = {name: float(count) for name, count in self.pending.items()}
        self.pending.clear()
        return counts

    def delete(self, covered: Container[int]) -> int:
        """Delete the spool files of draws that a verified checkpoint holds as consumed."""
        gone = [path for draw, path in list_files(self.spool) if draw in covered]
        for path in gone:
            delete(path)
        return len(gone)

    def _poll(self, version: int) -> None:
        if self._receiver is not None:
            self._receiver.check()
        for draw, path in self._unread():
            try:
                self._ready[draw] = self._read(path)
            except FileNotFoundError:
                continue  # listed by a cache that is behind
            except RecordError as error:
                self._refuse(draw, path, str(error))
        for draw, group in list(self._ready.items()):
            if reason := self._reason_against(group, version):
                self.drop(draw, reason)
                del self._ready[draw]

    def _unread(self) -> list[tuple[int, Path]]:
        files = sorted(list_files(self.spool))
        known = self.consumed.keys() | self._ready.keys() | self._taken
        return [(draw, path) for draw, path in files if draw not in known]

    def _read_until(self, ends: threading.Event) -> None:
        """Read what is good; what is not is left to `_poll`, which says so."""
        while not ends.is_set():
            for draw, path in self._unread():
                if ends.is_set():
                    return
                with suppress(FileNotFoundError, RecordError):
                    self._ready[draw] = self._read(path)
            ends.wait(LONGEST_POLL_S)

    def _read(self, path: Path) -> Group:
        group = read_group(path)
        reason = _against_numbers(group, self._vocabulary)
        if not reason and self._experts is not None:
            reason = _against_experts(group, self._experts)
        return replace(group, dropped=group.dropped or reason)

    def _refuse(self, draw: int, path: Path, detail: str) -> None:
        log.warning("draw %d: %s; set aside as %s.bad", draw, detail, path.name)
        os.rename(path, path.with_name(f"{path.name}.bad"))
        self.drop(draw, "unreadable", "spool_file")

    def drop(self, draw: int, reason: str, what: str = "group") -> None:
        """Consume a draw untrained."""
        self.mark({draw: f"{FILTERED}{reason}"})
        self.events.write(Drop(what=what, reason=reason, draw=draw))

    def _reason_against(self, group: Group, version: int) -> str:
        if group.dropped:
            return group.dropped
        if len(_graded(group)) < self.config.rollout.min_group:
            return "few_graded"
        bound = self.config.training.max_trained_staleness
        return "stale" if max(_staleness(group, version)) > bound else ""

    def _take(self, wanted: int, version: int) -> Batch:
        groups = [self._ready.pop(draw) for draw in sorted(self._ready)[:wanted]]
        self._taken = frozenset(group.draw for group in groups)
        return make_batch(groups, version, self.config, self.pending)

    def _missing(self, wanted: int, limit_s: float) -> str:
        absent: list[int] = []
        draw = 0
        while len(absent) < wanted - len(self._ready):
            if draw not in self.consumed and draw not in self._ready:
                absent.append(draw)
            draw += 1
        return (
            f"waited {limit_s:g} s for {wanted} groups in {self.spool}: {len(self._ready)} came; "
            f"the next missing draws are {', '.join(map(str, absent))}. Look at the inference "
            "role's log, or raise training.wait_timeout_s"
        )


def make_batch(groups: list[Group], version: int, config: RunConfig, infra: Counter[str]) -> Batch:
    """Score `groups`; causes of trajectories that were never graded are counted in `infra`.

    A trajectory without a token of the policy counts for its group's mean alone.
    """
    samples: list[Sample] = []
    outcome: dict[int, str] = {}
    rewards: list[float] = []
    origins: list[Origin] = []
    unsampled = 0
    for group in groups:
        graded = _graded(group)
        infra.update(f"infra_{item.cause}" for item in group.trajectories if item.reward is None)
        scores = [float(item.reward) for item in graded if item.reward is not None]
        rewards += scores
        advantages = group_advantages(scores, std_normalize=config.training.std_normalize)
        has_tokens = torch.tensor([bool(item.loss_mask.any()) for item in graded])
        unsampled += int((~has_tokens).sum())
        has_signal = bool(advantages[has_tokens].any())
        outcome[group.draw] = TRAINED if has_signal else f"{FILTERED}zero_signal"
        if has_signal:
            replays = config.engine.sglang.routed_experts
            found = zip(graded, advantages, _staleness(group, version), has_tokens, strict=True)
            for item, advantage, age, is_sampled in found:
                if is_sampled:
                    samples.append(_sample(item, float(advantage), replays=replays))
                    origins.append(origin_of(item, age))
    kind = config.training.aggregation
    weights = token_weights([item.sampled_tokens for item in samples], kind)  # type: ignore[arg-type]
    weighted = enumerate(zip(samples, weights, strict=True))
    ages = [age for group in groups for age in _staleness(group, version)]
    return Batch(
        samples=[item.placed(place, weight) for place, (item, weight) in weighted],
        origins=origins,
        nodes=tuple(group.trajectories[0].node for group in groups),
        outcome=outcome,
        metrics={
            "reward": sum(rewards) / len(rewards),
            "groups": len(groups),
            "zero_signal": sum(why != TRAINED for why in outcome.values()),
            "trajectories": len(samples),
            "unsampled": unsampled,
            "graded": len(rewards),
            "tokens": sum(len(item.tokens) for item in samples),
            "sampled_tokens": sum(item.sampled_tokens for item in samples),
            "staleness_mean": sum(ages) / len(ages),
            "staleness_max": max(ages),
        },
    )


def _sample(item: Trajectory, advantage: float, *, replays: bool) -> Sample:
    return Sample(
        tokens=item.tokens,
        loss_mask=item.loss_mask,
        engine_logprobs=item.logprobs,
        advantage=advantage,
        experts=item.experts if replays else None,
    )


def _against_numbers(group: Group, vocabulary: int) -> str:
    """Return why no step may be taken with a group's numbers; '' when one may."""
    graded = _graded(group)
    if not all(_are_words(item.tokens, vocabulary) for item in graded):
        return "wrong_tokens"
    rewards = np.array([item.reward for item in graded], dtype=np.float64)
    sampled = [item.logprobs[item.loss_mask] for item in graded]
    is_finite = np.isfinite(rewards).all() and all(np.isfinite(one).all() for one in sampled)
    return "" if is_finite else "no_numbers"


def _are_words(tokens: NDArray[np.int32], vocabulary: int) -> bool:
    return bool(len(tokens) and tokens.min() >= 0 and tokens.max() < vocabulary)


def _against_experts(group: Group, experts: ModelExperts) -> str:
    """Return why a group's tokens cannot be sent where the engine sent them; '' when they can."""
    graded = _graded(group)
    if not all(item.experts.size for item in graded):
        return "no_experts"
    return (
        ""
        if all(experts.fit(item.experts, len(item.tokens)) for item in graded)
        else "wrong_experts"
    )


def _graded(group: Group) -> list[Trajectory]:
    return [item for item in group.trajectories if item.reward is not None]


def _staleness(group: Group, version: int) -> list[int]:
    """Return, for each graded trajectory, how many versions back its oldest token is.

    After a resume, versions newer than the trainer's may be in the spool: these count as 0.
    """
    return [
        max(0, version - min((span.version for span in item.versions), default=version))
        for item in _graded(group)
    ]
