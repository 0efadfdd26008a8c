"""Continuous batching: one thread that owns the model and takes all requests and commands."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import torch

from agentrl.engine.batch import Batch, Ended
from agentrl.engine.requests import Answer, Request
from agentrl.errors import RecordError
from agentrl.weights.version import tensor_checksum

log = logging.getLogger(__name__)
COMPUTE_FAILED = 70
"""Exit code of a server whose compute thread failed."""
PauseMode = Literal["abort", "in_place", "retract"]
Result = TypeVar("Result")


@dataclass(slots=True)
class Counters:
    """Since the start; read by other threads, written by the compute thread."""

    requests: int = 0
    aborted: int = 0
    retracted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    busy_s: float = 0.0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Update:
    """A wanted exchange of the weights."""

    load: Callable[[], None]
    """Raises RecordError or OSError, and then changed nothing."""
    version: str
    is_flushing: bool
    done: Future[tuple[bool, str]] = field(default_factory=Future)


class Scheduler:
    """Runs `batch` on a thread of its own; every method but `run` may be called from any thread."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.counters = Counters()
        self.paused: PauseMode | None = None
        self.waiting: list[Request] = []
        self._held: list[Request] = []
        """Arrived after an update that waits for the running ones."""
        self._updates: list[Update] = []
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_stopping = False
        self._thread = threading.Thread(target=self.run, name="compute", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; requests that it holds get no answer."""
        self._call(self._stop)
        self._thread.join()

    def submit(self, request: Request) -> None:
        self._inbox.put(lambda: self._accept(request))

    def abort(self, prefix: str, *, everything: bool = False) -> Future[int]:
        """End all requests whose rid starts with `prefix`; returns how many."""
        return self._call(
            lambda: self._abort(lambda request: everything or request.rid.startswith(prefix))
        )

    def cancel(self, request: Request) -> None:
        """End this very request, whose client is gone."""
        self._inbox.put(lambda: self._cancel(request))

    def pause(self, mode: PauseMode) -> Future[None]:
        return self._call(lambda: self._pause(mode))

    def resume(self) -> Future[None]:
        return self._call(self._resume)

    def flush(self) -> Future[bool]:
        """Drop all kept prefixes; False while requests run or wait."""
        return self._call(self._flush)

    def update(self, folder: Path, version: str, *, is_flushing: bool) -> Future[tuple[bool, str]]:
        """Exchange the weights: at once while paused, else when what was accepted has ended."""
        return self._want(
            lambda: self.batch.model.load(folder, version=version), version, is_flushing
        )

    def exchange(
        self, tensors: dict[str, torch.Tensor], version: str | None, *, is_flushing: bool
    ) -> Future[tuple[bool, str]]:
        """The same with tensors that came some other way; None keeps the label."""
        model = self.batch.model
        label = model.version if version is None else version
        return self._want(
            lambda: model.take(tensors, version=label, where="of a push"), label, is_flushing
        )

    def _want(
        self, load: Callable[[], None], version: str, is_flushing: bool
    ) -> Future[tuple[bool, str]]:
        update = Update(load, version, is_flushing)
        self._inbox.put(lambda: self._updates.append(update))
        return update.done

    def checksum(self) -> Future[tuple[str, dict[str, str]]]:
        """Hash what memory holds: over all tensors, and each by name."""
        return self._call(self._checksum)

    def ping(self) -> Future[None]:
        """Done once the compute thread has come by."""
        return self._call(lambda: None)

    @property
    def queued(self) -> int:
        return len(self.waiting) + len(self._held)

    def run(self) -> None:
        try:
            self._run()
        except BaseException:
            log.exception("the compute thread failed; the engine ends, for nothing can answer now")
            os._exit(COMPUTE_FAILED)

    def _run(self) -> None:
        with torch.inference_mode():
            while not self._is_stopping:
                self._read_inbox(block=not self._has_work())
                self._apply_updates()
                if self.paused is None and (self.waiting or len(self.batch)):
                    self._compute()

    def _has_work(self) -> bool:
        if self.paused is not None:
            return bool(self._updates)
        return bool(self.waiting or len(self.batch) or self._updates)

    def _compute(self) -> None:
        began = time.perf_counter()
        ended: list[Ended] = []
        before = len(self.batch)
        if self.waiting and before < self.batch.max_running:
            self.waiting, ended = self.batch.join(self.waiting)
            self.counters.generated_tokens += len(self.batch) + len(ended) - before
        else:
            ended = self.batch.step()
            self.counters.generated_tokens += before
        self.counters.steps += 1
        for request, finish in ended:
            self._deliver(request, finish)
        self.counters.busy_s += time.perf_counter() - began

    def _read_inbox(self, *, block: bool) -> None:
        if block:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _accept(self, request: Request) -> None:
        self.counters.requests += 1
        self.counters.prompt_tokens += len(request.prompt)
        if request.params.max_new_tokens == 0:
            request.mark(self.batch.model.version, 0)
            self._deliver(request, {"type": "length", "length": 0})
        elif self._updates and self.paused is None:
            self._held.append(request)
        else:
            self.waiting.append(request)

    def _deliver(self, request: Request, finish: dict[str, object]) -> None:
        self.counters.cached_tokens += request.cached
        request.deliver(Answer(request, finish, self.batch.model.version))

    def _cancel(self, request: Request) -> None:
        self._abort(lambda other: other is request)

    def _abort(self, is_meant: Callable[[Request], bool]) -> int:
        gone = [request for request in (*self.waiting, *self._held) if is_meant(request)]
        self.waiting = [request for request in self.waiting if not is_meant(request)]
        self._held = [request for request in self._held if not is_meant(request)]
        for row in reversed(range(len(self.batch))):
            if is_meant(self.batch.requests[row]):
                gone.append(self.batch.remove(row))
        for request in gone:
            request.mark(self.batch.model.version, len(request.logprobs))
            self._deliver(request, {"type": "abort", "message": "Abort in progress"})
        self.counters.aborted += len(gone)
        return len(gone)

    def _pause(self, mode: PauseMode) -> None:
        if mode == "abort":
            self._abort(lambda request: True)
        if mode == "retract":
            self._retract()
        self.paused = mode

    def _retract(self) -> None:
        taken = [self.batch.remove(row) for row in reversed(range(len(self.batch)))]
        for request in taken:
            request.retractions += 1
        self.counters.retracted += len(taken)
        self.waiting = taken[::-1] + self.waiting

    def _resume(self) -> None:
        self.paused = None

    def _flush(self) -> bool:
        if len(self.batch) or (self.waiting and self.paused != "retract"):
            return False
        self.batch.flush()
        return True

    def _apply_updates(self) -> None:
        """Load what was asked for, oldest first, once nothing runs or the engine is paused."""
        while self._updates and (self.paused or not (self.waiting or len(self.batch))):
            update = self._updates.pop(0)
            if update.done.set_running_or_notify_cancel():  # else who asked has left
                update.done.set_result(self._load(update))
        if not self._updates and self._held:
            self.waiting += self._held
            self._held = []

    def _load(self, update: Update) -> tuple[bool, str]:
        try:
            update.load()
        except (RecordError, OSError) as error:
            log.warning("version %s refused: %s", update.version, error)
            return False, str(error)
        self.batch.relabel()
        if update.is_flushing and not self._flush():
            return False, (
                "The weights are updated, but the cache was not flushed: requests are running. "
                "Pause with mode=retract, or send flush_cache=false."
            )
        return True, f"Succeeded to update model weights to version {update.version}."

    def _checksum(self) -> tuple[str, dict[str, str]]:
        named = self.batch.model.named_tensors()
        each = {name: tensor_checksum([(name, tensor)]) for name, tensor in named.items()}
        return tensor_checksum(named.items()), each

    def _stop(self) -> None:
        self._is_stopping = True

    def _call(self, action: Callable[[], Result]) -> Future[Result]:
        future: Future[Result] = Future()

        def act() -> None:
            if not future.set_running_or_notify_cancel():
                return  # who asked has left, as a probe does that nobody answered in time
            try:
                future.set_result(action())
            except Exception as error:  # the caller's to handle: it waits on the future
                future.set_exception(error)

        self._inbox.put(act)
        return future
