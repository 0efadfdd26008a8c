"""The executor for one request, in a machine where none can stay: a process for each command.

Part of the program that runs inside. The request is a frame in base64, and so is the reply, on
stdout's last line. What a command leaves running is known by a variable in its environment.
"""

from __future__ import annotations

import binascii
import os
import select
import sys

from agentrl.sandbox.confine import set_limits
from agentrl.sandbox.executor import Executor
from agentrl.sandbox.frames import pack, unpack

MARK = "AGENTRL_SANDBOX"


def main(argv: list[str]) -> None:
    """argv: the mark, shell, memory_mb, cpu_s, processes, file_mb, total_memory_mb, the request."""
    mark, shell = argv[:2]
    memory_mb, cpu_s, processes, file_mb, total_mb = map(int, argv[2:7])
    request = unpack(binascii.a2b_base64(argv[7]))
    os.makedirs("/testbed", exist_ok=True)
    os.chdir("/testbed")
    # an end of file on stdin would be the owner's end: here it only holds for one request
    waiting, held = os.pipe()
    os.dup2(waiting, 0)
    set_limits(memory_mb, file_mb, 0)
    os.environ[MARK] = mark
    executor = Executor(
        is_init=False,
        shell=shell,
        processes=processes,
        cpu_s=cpu_s,
        total_mb=total_mb,
        mark=f"{MARK}={mark}".encode(),
    )
    reply = executor.answer(request)
    os.close(held)
    sys.stdout.write("\n" + binascii.b2a_base64(pack(reply)[4:], newline=False).decode() + "\n")
    sys.stdout.flush()
    if executor.leftovers and os.fork() == 0:
        drain(executor.leftovers)


def drain(pipes: list[int]) -> None:
    """Read on what background children write, who would die of a closed pipe; then leave."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    poll = select.poll()
    for pipe in pipes:
        poll.register(pipe, select.POLLIN)
    left = set(pipes)
    while left:
        for pipe, _ in poll.poll():
            if not os.read(pipe, 65536):
                poll.unregister(pipe)
                left.discard(pipe)
    os._exit(0)
