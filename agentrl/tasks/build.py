"""Makes the rows of a split: draws plans, has probe processes run them, keeps what proves."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice

import msgspec

from agentrl.errors import TaskError
from agentrl.tasks.probe import Draft, Proved
from agentrl.tasks.repair import Plan, Row, finish, plan
from agentrl.tasks.splits import Partition, wanted

PROBES = 2
_BATCH = 16
"""Drafts in one message: on a busy machine each message costs a wait for the scheduler."""
_AHEAD = 2
"""Batches that each probe has been sent and not answered; answers stay under a pipe's 64 KiB."""
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(list[Proved | None])


class Probe:
    """One process that runs drafts; a context manager."""

    def __enter__(self) -> Probe:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "agentrl.tasks.probe"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        return self

    def __exit__(self, *reason: object) -> None:
        self._process.kill()  # it holds nothing but drafts that nobody wants any more
        self._process.communicate()

    def send(self, drafts: list[Draft]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(_encoder.encode(drafts) + b"\n")
        self._process.stdin.flush()

    def receive(self) -> list[Proved | None]:
        """Return the next batch's answers. Raises TaskError when the process died."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise TaskError(f"probe process ended with {self._process.wait()} before it answered")
        return _decoder.decode(line)


def build(part: Partition, split: str, functions: int, seed: int) -> Iterator[Row]:
    """Yield proved rows of `split` without end, the same ones for the same seed."""
    rng = random.Random(f"{split} {seed}")
    drawn = filter(None, (plan(want, rng) for want in wanted(part, split, functions, rng)))
    seen: set[str] = set()
    with ExitStack() as stack:
        probes = [stack.enter_context(Probe()) for _ in range(PROBES)]
        sent: deque[tuple[list[Plan], Probe]] = deque()
        for probe in probes * _AHEAD:
            _send(list(islice(drawn, _BATCH)), probe, sent)
        while True:
            batch, probe = sent.popleft()
            answers = probe.receive()
            _send(list(islice(drawn, _BATCH)), probe, sent)
            for made, proved in zip(batch, answers, strict=True):
                if proved and made.draft.bug not in seen:
                    seen.add(made.draft.bug)
                    yield finish(made, proved, f"repair__{split}")


def _send(batch: list[Plan], probe: Probe, sent: deque[tuple[list[Plan], Probe]]) -> None:
    probe.send([made.draft for made in batch])
    sent.append((batch, probe))
