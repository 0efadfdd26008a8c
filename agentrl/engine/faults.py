"""What a line of an engine's log says of it: pure, from the words of drivers and of SGLang."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal[
    "memory_access",
    "gpu_hang",
    "graph",
    "hardware",
    "gpu_lost",
    "out_of_memory",
    "port",
    "import",
    "model",
    "collective",
    "watchdog",
    "kernel",
    "scheduler",
]
HOST_KINDS: frozenset[Kind] = frozenset({"hardware", "gpu_lost"})
"""The GPU or its node is broken: one is enough to make the node a suspect."""
WEAK_KINDS: frozenset[Kind] = frozenset({"import", "model", "port", "scheduler"})
"""Said of an end they explain it; said of an engine that goes on they mean nothing."""
LASTING_KINDS: frozenset[Kind] = frozenset({"import", "model"})
"""The next start meets the same: restarting cannot help."""

# In this order: the first that matches names the line, so causes come before their consequences.
_PATTERNS: tuple[tuple[Kind, str], ...] = (
    # NVIDIA's Xid numbers: docs.nvidia.com/deploy/xid-errors
    ("hardware", r"NVRM: Xid \([^)]*\): (?:48|63|64|74|92|94|95|140),"),
    ("gpu_lost", r"NVRM: Xid \([^)]*\): (?:79|119|120|154),|fallen off the bus"),
    ("gpu_hang", r"NVRM: Xid \([^)]*\): (?:8|109),"),
    ("memory_access", r"NVRM: Xid \([^)]*\): (?:13|31|43|45),"),
    (
        "gpu_lost",
        r"cudaErrorDevicesUnavailable|hipErrorNoDevice|No (?:HIP|CUDA) GPUs are available",
    ),
    ("hardware", r"[Uu]ncorrectable (?:ECC|error)|(?:cuda|hip)ErrorECC(?:Uncorrectable|Not)"),
    ("out_of_memory", r"(?:CUDA|HIP) out of memory|OutOfMemoryError|ErrorOutOfMemory\b"),
    ("out_of_memory", r"hipErrorMemoryAllocation|HSA_STATUS_ERROR_OUT_OF_RESOURCES"),
    ("out_of_memory", r"Not enough memory\. Please|DefaultCPUAllocator: can't allocate memory"),
    ("gpu_hang", r"HW Exception by GPU node|GPU Hang\b|amdgpu: GPU reset begin"),
    ("gpu_hang", r"cudaErrorLaunchTimeout|launch timed out and was terminated"),
    ("graph", r"hipErrorCapturedEvent|(?:cuda|hip)ErrorStreamCapture\w+"),
    ("graph", r"operation not permitted (?:when stream is capturing|on an event last recorded in)"),
    ("graph", r"(?:hip|cuda)Graph(?:Launch|Instantiate|Exec)\w*\b.*(?i:fail|error|fault)"),
    ("graph", r"(?i:\bgraph (?:replay|capture) (?:failed|error)|capture \w+ graph failed)"),
    ("memory_access", r"Memory access fault by GPU node|illegal memory access"),
    ("memory_access", r"(?:cuda|hip)Error(?:IllegalAddress|MisalignedAddress|LaunchFailure)\b"),
    ("memory_access", r"unspecified launch failure|HSA_STATUS_ERROR_MEMORY_APERTURE_VIOLATION"),
    ("kernel", r"HSA_STATUS_ERROR\w*|device-side assert"),
    ("port", r"[Aa]ddress already in use|EADDRINUSE|[Pp]ort (?:\d+ )?is already in use"),
    # at its start: servers report optional imports that failed, within lines of their log
    ("import", r"^(?:ModuleNotFoundError|ImportError): |^\S*python\S*: No module named "),
    ("import", r"^\S*python\S*: Error while finding module specification for "),
    ("model", r"size mismatch for |does not appear to have a file named|Unrecognized model in"),
    ("model", r"AssertionError: (?:Attempted to load weight |self\.org_vocab_size=)"),
    ("model", r"Cannot find any model weights|is not a local folder and is not a valid model"),
    ("collective", r"(?:NCCL|RCCL) error|nccl(?:System|UnhandledCuda|Internal|Remote)Error"),
    ("collective", r"Watchdog caught collective operation timeout"),
    ("watchdog", r"watchdog timeout \(self\.watchdog_timeout=\S+, self\.soft=False"),
    ("scheduler", r"Scheduler hit an exception: |scheduler died during initialization"),
)
_COMPILED = tuple((kind, re.compile(pattern)) for kind, pattern in _PATTERNS)
_HINT = re.compile(
    r"rror|xception|ault|Hang|NVRM|NOT_|captur|emory|timed|timeout|fail|lost|bus|reset|module|"
    r"mismatch|appear|symbol|model|use|assert|died"
)
"""In every line that a pattern matches: most lines of a busy server's log are passed over by it."""
_ODD = re.compile(r"rror|xception|ault|CRITICAL|FATAL|SIG|Abort|dumped|Traceback")
_SUSPICIOUS = re.compile(
    r"\b(?:Traceback \(most recent|[A-Z]\w*(?:Error|Exception)\b|CRITICAL|FATAL|[Ff]ault\b|"
    r"SIGABRT|SIGSEGV|Aborted|core dumped)"
)
_HARMLESS = re.compile(r"self\.soft=True|\b(?:WARNING|INFO)\b|\b\w*Warning\b")
HALF_LINE = 4000
"""Characters that are read at each end of a line: patterns take more than linear time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultLine:
    kind: Kind
    text: str

    @property
    def is_lasting(self) -> bool:
        return self.kind in LASTING_KINDS


def classify(line: str) -> FaultLine | None:
    """Return what `line` says is broken, None for a line of no fault."""
    if not _HINT.search(line):
        return None
    for kind, pattern in _COMPILED:
        if pattern.search(line):
            return FaultLine(kind=kind, text=line.strip()[:500])
    return None


@dataclass(slots=True)
class LogReader:
    """Takes a log in pieces as it grows; remembers its faults and counts odd lines."""

    acting: FaultLine | None = None
    """The first fault that an engine does not survive, or will not."""
    cause: FaultLine | None = None
    """What an end would be called: that, or else the last of the weak kinds."""
    kinds: Counter[Kind] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    """Lines that look like errors and fit nothing above, digits left out, at most 100 of them."""
    _rest: str = ""
    _is_up: bool = False

    def feed(self, text: str) -> FaultLine | None:
        """Take the next piece; return the first fault that the engine does not survive."""
        *lines, self._rest = (self._rest + text).split("\n")
        self._take(lines)
        self._rest = self._rest[-HALF_LINE:]  # a progress bar may never end its line
        return self.acting

    def end(self) -> FaultLine | None:
        """Take a last line without an end."""
        self._take([self._rest])
        self._rest = ""
        return self.cause

    def forget(self) -> None:
        """The engine came up: what it said on the way there explains nothing later.

        Nor will a module or a model that it misses from now on: another start does without too.
        """
        self.acting = self.cause = None
        self._is_up = True

    def _explain(self, found: FaultLine) -> None:
        """Take a weak kind: it names an end for which there is no better word."""
        if found.is_lasting and self._is_up:
            return
        if self.acting is None or self.acting.kind == "scheduler":
            self.cause = found

    def _take(self, lines: Iterable[str]) -> None:
        for whole in lines:
            line = whole if len(whole) <= 2 * HALF_LINE else whole[:HALF_LINE] + whole[-HALF_LINE:]
            if (found := classify(line)) is not None:
                self.kinds[found.kind] += 1
                if found.kind != "scheduler" and found.kind in WEAK_KINDS:
                    self._explain(found)
                    continue
                self.acting = self.acting or found
                if self.cause is None or self.cause.kind in WEAK_KINDS:
                    self.cause = found
            elif _ODD.search(line) and _SUSPICIOUS.search(line) and not _HARMLESS.search(line):
                shape = re.sub(r"\d+", "N", line.strip())[:200]
                if shape in self.unknown or len(self.unknown) < 100:
                    self.unknown[shape] += 1
