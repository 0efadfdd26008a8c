"""slime's and miles' trainer log (`perf 3: {…}`, `rollout 3: {…}`, `step 3: {…}`), rollout dumps.

Ray puts `(Actor pid=…) ` before a line and newer versions `[time] file.py:44 - `; the dictionaries
are Python literals. Dumps are read as JSON lines of `Sample.to_dict()`; slime's own `.pt` dumps are
pickles, which are not opened here.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from agentrl import events
from analysis.sources.adapted import Adapted

_LINE = re.compile(
    r"(?:\[(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[^\]]*\] )?(?:\S+\.py:\d+ - )?"
    r"(?P<what>perf|rollout|step|eval) (?P<number>\d{1,12}): (?P<values>\{.*\})\s*$"
)
_NOT_A_NUMBER = re.compile(r"(?<=: )-?(?:nan|inf)\b")
_PASSED = {
    "timers": re.compile(r"Timer \S+ (?:start|end)|timer\.py"),
    "HTTP access": re.compile(r"INFO:\s+\S+ - \"|HTTP Request"),
    "engine batches": re.compile(r"(?:Decode|Prefill) batch"),
    "Ray": re.compile(r"\braylet\b|ray\.init|Started a local Ray|worker\.py:"),
    "weights and rollouts": re.compile(r"[Uu]pdate weights|Abort request|Finish rollout|sglang_"),
}
METRICS = {
    "reward": ("rollout/raw_reward", "rollout/rewards"),
    "loss": ("train/loss", "train/pg_loss"),
    "grad_norm": ("train/grad_norm",),
    "entropy": ("train/entropy_loss",),
    "gap": ("train/train_rollout_logprob_abs_diff",),
    "clip_fraction": ("train/pg_clipfrac",),
    "ess": ("train/ess", "train/tis_ess"),
    "lr": ("train/lr-pg_0", "train/lr"),
    "sampled_tokens": ("rollout/response_len/mean", "rollout/response_lengths"),
    "staleness_mean": ("staleness/total/mean", "rollout/fully_async/avg_staleness"),
    "staleness_max": ("staleness/total/max", "rollout/fully_async/max_staleness"),
}
"""Our metric → theirs, the first that is there."""
Values = Mapping[str, float]
LARGEST = 1e300
"""Numbers past this, and NaN, are left out."""


class SlimeLog:
    """A trainer's log."""

    name = "slime or miles log"

    def fits(self, path: Path, head: str) -> bool:
        del path
        return any(_LINE.search(line) for line in head.splitlines())

    def read(self, paths: Iterable[Path], into: Adapted) -> None:
        """Add one step a `perf` line of the trainer, with the metrics of the same number."""
        for path in paths:
            self._file(path, into)

    def _file(self, path: Path, into: Adapted) -> None:
        found: dict[str, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
        times: dict[int, float] = {}
        with path.open(errors="replace") as file:
            for text in file:
                into.lines += 1
                line = _LINE.search(text)
                values = _values(line["values"]) if line else None
                if line is None or values is None:
                    self._other(text, into)
                    continue
                into.known += 1
                number = int(line["number"])
                found[line["what"]][number].update(values)
                if line["time"] and "perf/step_time" in values:
                    at = into.moment(line["time"], text)
                    times |= {number: at} if at is not None else {}
        into.events += _steps(found, times, into)

    def _other(self, text: str, into: Adapted) -> None:
        kind = next((name for name, sign in _PASSED.items() if sign.search(text)), "")
        if kind or not text.strip():
            into.passed[kind or "empty lines"] += 1
        else:
            into.refuse("no known line of slime", text)


class RolloutDump:
    """Samples, a JSON object a line."""

    name = "slime or miles rollout dump"

    def fits(self, path: Path, head: str) -> bool:
        first = head.partition("\n")[0]
        return path.suffix in (".jsonl", ".json") and all(
            f'"{key}"' in first for key in ("response_length", "reward", "status")
        )

    def read(self, paths: Iterable[Path], into: Adapted) -> None:
        """Add one trajectory a sample; a dump holds no times, so none are given."""
        for path in paths:
            with path.open("rb") as file:
                for line in file:
                    into.lines += 1
                    sample = into.decoded(line, _Sample, line.decode(errors="replace"))
                    if sample is not None:
                        into.known += 1
                        into.events.append(_trajectory(sample))
        into.notes.append("dumps hold no times: their trajectories are left out of time figures.")


class _Sample(msgspec.Struct, frozen=True):
    """The keys of `Sample.to_dict()` that are used."""

    status: str
    group_index: int | None = None
    index: int | None = None
    reward: float | dict[str, object] | None = None
    """A number, or a map of several where slime was told a reward key."""
    response_length: int = 0
    tokens: list[int] = []
    metadata: dict[str, object] | None = None


def _trajectory(sample: _Sample) -> events.TrajectoryEvent:
    status = sample.status.rpartition(".")[2].lower()
    cause = {"completed": "submitted", "truncated": "token_limit", "aborted": "cancelled"}
    reward = sample.reward if isinstance(sample.reward, float) else None
    return events.TrajectoryEvent(
        trajectory=f"{sample.group_index}/{sample.index}",
        draw=sample.group_index or 0,
        task=str((sample.metadata or {}).get("instance_id", "")),
        attempt=sample.index or 0,
        cause=cause.get(status, "infra"),
        reward=reward if status in ("completed", "truncated") else None,
        sampled_tokens=sample.response_length,
        tokens=len(sample.tokens),
    )


def _values(text: str) -> dict[str, float] | None:
    try:
        found = ast.literal_eval(_NOT_A_NUMBER.sub("None", text))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None  # not one of theirs after all: the line is counted
    if not isinstance(found, dict):
        return None
    return {str(key): float(value) for key, value in found.items() if _is_number(value)}


def _is_number(value: object) -> bool:
    is_true = isinstance(value, bool)
    return isinstance(value, (int, float)) and not is_true and abs(value) < LARGEST


def _steps(
    found: Mapping[str, Mapping[int, Values]], times: Mapping[int, float], into: Adapted
) -> Iterable[events.Step]:
    trainer = {n: v for n, v in found.get("perf", {}).items() if "perf/step_time" in v}
    per_step = found.get("step", {})
    if per_step and trainer and len(per_step) > len(trainer) + 1:
        into.notes.append(
            f"{len(per_step)} step lines for {len(trainer)} rollouts: not one each, so losses and "
            "gradient norms were left out."
        )
        per_step = {}
    if trainer and not times:
        into.notes.append("its lines carry no time: steps are put one after another.")
    clock = 0.0
    for number in sorted(trainer):
        values = trainer[number]
        others = {**found.get("rollout", {}).get(number, {}), **per_step.get(number, {})}
        publish = values.get("perf/update_weights_time", 0.0)
        end = times.get(number, clock + values["perf/step_time"] + publish)
        clock = end
        yield _step(number, values, others, end)


def _step(number: int, values: Values, others: Values, end: float) -> events.Step:
    whole = {**values, **others}
    metrics = {
        ours: next(whole[name] for name in theirs if name in whole)
        for ours, theirs in METRICS.items()
        if any(name in whole for name in theirs)
    }
    zero = [value for key, value in whole.items() if key.startswith("rollout/zero_std/count_")]
    if zero:
        metrics["zero_signal"] = sum(zero)
    if "sampled_tokens" in metrics:
        metrics["trajectories"] = 1.0  # theirs is a mean of one
    publish = values.get("perf/update_weights_time", 0.0)
    save = values.get("perf/save_model_time", 0.0)
    return events.Step(
        step=number,
        version=number,
        wait_s=values.get("perf/train_wait_time", 0.0),
        logprob_s=sum(values.get(f"perf/{x}log_probs_time", 0.0) for x in ("", "ref_")),
        update_s=values.get("perf/actor_train_time", values.get("perf/train_time", 0.0)),
        publish_s=publish,
        checkpoint_s=save,
        metrics=metrics,
        start=end - values["perf/step_time"] - publish - save,
        end=end,
    )
