"""The functions that bugs are planted in: read from functions.txt, rendered with new names."""

from __future__ import annotations

import builtins
import io
import keyword
import random
import re
import tokenize
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import pairwise

_SYLLABLES = "ba be bo da de du fa fi fo ga gu ka ki ko la li lu ma mi mo na ne no pa"
SYLLABLES = tuple(_SYLLABLES.split(" "))
"""Every identifier is two of these, so that a tokenizer always splits it in the same way."""
CONSTANTS = (3, 39)
_FIXED = frozenset(dir(builtins)) | frozenset(keyword.kwlist)
_CONSTANT = re.compile(r"K\d?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """One function of the library."""

    module: str
    name: str
    kinds: tuple[str, ...]
    """What each argument is: int, few, ints, word, words or bool."""
    pieces: tuple[str, ...]
    """Its source, cut so that every name and constant to be replaced is a piece of its own."""
    names: tuple[str, ...]
    constants: tuple[str, ...]

    def render(self, names: dict[str, str], constants: dict[str, int]) -> str:
        """Return the source with its names and constants replaced; ends with a newline."""
        return "".join(
            names.get(piece) or (str(constants[piece]) if piece in constants else piece)
            for piece in self.pieces
        )


@cache
def library() -> dict[str, Template]:
    """Return every template by name, in the order of the file."""
    text = (resources.files("agentrl.tasks") / "functions.txt").read_text()
    found: dict[str, Template] = {}
    for section in text.split("\n## ")[1:]:
        module, _, body = section.partition("\n")
        for block in body.strip().split("\n\n"):
            template = _parse(module.strip(), block.strip())
            found[template.name] = template
    return found


def new_names(rng: random.Random, count: int, allowed: tuple[str, ...]) -> list[str]:
    """Return `count` different identifiers out of `allowed`."""
    return rng.sample(allowed, count)


@cache
def all_names() -> tuple[str, ...]:
    """Return every identifier that two syllables make, those that Python has taken left out."""
    pairs = (first + second for first in SYLLABLES for second in SYLLABLES if first != second)
    return tuple(name for name in pairs if name not in _FIXED)


def _parse(module: str, block: str) -> Template:
    header, _, source = block.partition("\n")
    pieces = _cut(source + "\n")
    replaced = [piece for piece in pieces if _is_replaced(piece)]
    constants = tuple(dict.fromkeys(name for name in replaced if _CONSTANT.fullmatch(name)))
    return Template(
        module=module,
        name=source.split("(")[0].removeprefix("def "),
        kinds=tuple(header.removeprefix("#").split()),
        pieces=tuple(pieces),
        names=tuple(dict.fromkeys(name for name in replaced if name not in constants)),
        constants=constants,
    )


def _cut(source: str) -> list[str]:
    """Cut at names; a method's name stays glued to its dot, so it is never replaced."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    cuts = {0, len(source)}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        begin = starts[token.start[0] - 1] + token.start[1]
        if token.type == tokenize.NAME and source[begin - 1 : begin] != ".":
            cuts |= {begin, begin + len(token.string)}
    edges = sorted(cuts)
    return [source[a:b] for a, b in pairwise(edges)]


def _is_replaced(piece: str) -> bool:
    return piece.isidentifier() and piece not in _FIXED
