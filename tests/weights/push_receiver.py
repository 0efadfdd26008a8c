"""One rank of a push as an engine would be: `push_receiver.py WEIGHTS DEVICE BUCKETS`.

Takes that many buckets of what PUSH.json tells, and prints the sum of all it got; when more were
announced it kills itself in the middle.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch.distributed as dist

from agentrl.weights import group as groups
from agentrl.weights.push import read_push
from agentrl.weights.pusher import room_for


def main(weights: Path, device: str, wanted: int) -> None:
    push = read_push(weights)
    assert push is not None
    store = groups.visit(push.address, push.port, push.size, 60)
    group = groups.join(
        store, push.group, rank=1, size=push.size, backend=push.backend, timeout_s=60
    )
    total = 0.0
    for bucket in push.buckets[:wanted]:
        flat, tensors = room_for(bucket.dtypes, bucket.shapes, device)
        work = dist.broadcast(flat, 0, group=group, async_op=True)
        assert work is not None
        work.wait()
        total += float(sum(tensor.double().sum() for tensor in tensors))
    print(total, flush=True)
    if wanted < len(push.buckets):
        os.kill(os.getpid(), signal.SIGKILL)
    groups.leave(group)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
