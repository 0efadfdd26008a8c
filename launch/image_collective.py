"""`python image_collective.py BACKEND SIZE STORE`: sum over SIZE processes of this node."""

from __future__ import annotations

import multiprocessing
import sys


def rank(index: int, backend: str, size: int, store: str) -> None:
    """Take part as one process; an answer that is wrong raises."""
    import torch
    import torch.distributed as dist

    device = torch.device(f"cuda:{index}" if backend == "nccl" else "cpu")
    dist.init_process_group(backend, init_method=f"file://{store}", rank=index, world_size=size)
    found = torch.full((1 << 20,), float(index + 1), device=device)
    dist.all_reduce(found)
    wanted = size * (size + 1) / 2
    if not bool((found == wanted).all()):
        raise ArithmeticError(f"{backend} over {size}: the sum is {float(found[0])}, not {wanted}")
    dist.destroy_process_group()


if __name__ == "__main__":
    backend, size, store = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    context = multiprocessing.get_context("spawn")
    given = [(index, backend, size, store) for index in range(size)]
    processes = [context.Process(target=rank, args=words) for words in given]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))
