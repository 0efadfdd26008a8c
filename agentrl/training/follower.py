"""One further rank of the trainer: started by `ranks.started`, it does what rank 0 tells it.

python -m agentrl.training.follower < CONFIG      with torchrun's variables set
"""

from __future__ import annotations

import logging
import os
import sys

import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from agentrl.config import resolve
from agentrl.training import ranks
from agentrl.training.backends import follow


def main() -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    chosen = OmegaConf.create(sys.stdin.read())
    assert isinstance(chosen, DictConfig)
    config = resolve(chosen, "the config that rank 0 gave")
    world = ranks.join(os.environ, config)
    follow(config, world)
    dist.destroy_process_group()
    logging.shutdown()
    os._exit(0)  # gloo's threads, at times alive still, would abort the interpreter's end


if __name__ == "__main__":
    main()
