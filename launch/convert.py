"""`agentrl convert FOLDER OUT`: a model folder in Hugging Face's layout to Megatron's, or back."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from launch.command import guard, parser, say
from slurm.exit_record import DONE


def main(argv: Sequence[str]) -> int:
    """Convert by what FOLDER is: one with layout.json is Megatron's. No GPU is needed."""
    arguments = parser("convert", __doc__ or "")
    arguments.add_argument("source", metavar="FOLDER", type=Path, help="model folder to read")
    arguments.add_argument("out", metavar="OUT", type=Path, help="folder to write; must not exist")
    for name, about in (("tp", "tensor"), ("ep", "expert"), ("pp", "pipeline")):
        arguments.add_argument(
            f"--{name}", type=int, default=1, help=f"{about} parallel size of the Megatron model"
        )
    arguments.add_argument(
        "--spec", choices=("local", "te"), default="local", help="whose parameter names"
    )
    arguments.add_argument(
        "--fused-experts", action="store_true", help="back: experts as transformers 5 holds them"
    )
    arguments.add_argument("--bucket-mb", type=int, default=512, help="largest file, MiB")
    given = arguments.parse_args(argv)
    from agentrl.hf_shape import Layout
    from agentrl.training import convert

    if (given.source / convert.LAYOUT).is_file():
        count = convert.to_hf(
            given.source, given.out, bucket_mb=given.bucket_mb, fuses_experts=given.fused_experts
        )
    else:
        layout = Layout(tp=given.tp, ep=given.ep, pp=given.pp, spec=given.spec)
        count = convert.to_megatron(given.source, given.out, layout, bucket_mb=given.bucket_mb)
    say(f"{given.out}: {count} tensors")
    return DONE


if __name__ == "__main__":
    sys.exit(guard(main))
