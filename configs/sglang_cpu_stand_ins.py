"""Makes an installed SGLang import on a CPU: stand-ins for what has no build there, two lines of
packages that assume CUDA. Run by the interpreter that has SGLang; running it again changes nothing.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

KERNEL = '''"""Stand-in: sgl_kernel has no build for this CPU. A call says which op was wanted."""

__version__ = "0.4.10"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def op(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel has no CPU build: {name} was called")

    return op
'''
KERNEL_MODULES = (
    *("allreduce", "attention", "elementwise", "flash_attn", "gemm", "kvcacheio", "mamba"),
    *("memory", "moe", "quantization", "sampling", "speculative", "top_k", "utils"),
)
DISPLAY = '''"""Stand-in: a server shows nothing."""


class HTML: ...


def display(*args, **kwargs): ...


def clear_output(*args, **kwargs): ...
'''
FILES = {
    "sgl_kernel/__init__.py": KERNEL,
    **{f"sgl_kernel/{name}.py": KERNEL for name in KERNEL_MODULES},
    "IPython/__init__.py": "from . import display\n",
    "IPython/display.py": DISPLAY,
    "soundfile.py": '"""Stand-in: no audio model is served."""\n',
}
POOL = "    # Avoid oversized cudaHostRegister calls on large host pools.\n"
CHANGES = (
    # torchvision's compiled ops are of CUDA's torch; its transforms, all that is used, are Python
    (
        "torchvision/__init__.py",
        "    _meta_registrations,\n",
        "    # _meta_registrations is left out\n",
    ),
    # --enable-return-routed-experts registers its host memory with CUDA
    (
        "sglang/srt/mem_cache/pool_host/common.py",
        POOL,
        f"    if not torch.cuda.is_available():\n        return\n{POOL}",
    ),
)


def change(path: Path, old: str, new: str) -> None:
    """Replace the one place that says `old`, unless it says `new` already."""
    text = path.read_text()
    if new in text:
        return
    if text.count(old) != 1:
        sys.exit(f"{path}: {old!r} is there {text.count(old)} times, not once: another version?")
    path.write_text(text.replace(old, new))


def main() -> None:
    site = Path(sysconfig.get_paths()["purelib"])
    for name, text in FILES.items():
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(text)
    for name, old, new in CHANGES:
        change(site / name, old, new)


if __name__ == "__main__":
    main()
