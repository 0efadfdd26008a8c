"""One-line edits of Python source, found on its AST: what plants a bug, and what may mend one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

_COMPARE: dict[type[ast.AST], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.In: "in",
    ast.NotIn: "not in",
}
_ARITHMETIC: dict[type[ast.AST], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.FloorDiv: "//",
    ast.Mod: "%",
}
_CLASSES = {
    "comparison": ("<", "<=", ">", ">=", "==", "!="),
    "arithmetic": ("+", "-", "*", "//", "%"),
    "logic": ("and", "or"),
    "membership": ("in", "not in"),
    "extremum": ("min(", "max("),
    "boolean": ("True", "False"),
    "update": ("+=", "-="),
}
"""Symbols that replace each other, so that each bug's repair is itself an edit of the family."""
PATTERNS = {
    "comparison": " [<>=!]=\\? ",
    "arithmetic": " [-+*/%][/]\\? ",
    "logic": " [ao][nr]d\\? ",
    "membership": " \\(not \\)\\?in ",
    "extremum": "m[ai][nx](",
    "boolean": "[TF][a-z]*e",
    "update": " [-+]= ",
    "constant": "[0-9][0-9]*",
}
"""What finds any symbol of a class, a basic regular expression for sed: a repair names the class,
and what should stand there, not what does."""
KINDS = tuple(PATTERNS)
_KIND_OF = {symbol: kind for kind, symbols in _CLASSES.items() for symbol in symbols}


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """Replace `old` by `new` at one place."""

    site: int
    """Editable node of the AST, by reading order: an edit, which may change the tree, keeps it."""
    replacement: str
    """What names it beside the site: the new symbol, or the change of a constant."""
    kind: str
    line: int
    """From 1, within the source."""
    column: int
    old: str
    new: str

    def apply(self, source: str) -> str:
        """Return `source` with the edit made."""
        lines = source.splitlines(keepends=True)
        text = lines[self.line - 1]
        end = self.column + len(self.old)
        if text[self.column : end] != self.old:
            raise ValueError(f"line {self.line} has {text[self.column : end]!r}, not {self.old!r}")
        lines[self.line - 1] = text[: self.column] + self.new + text[end:]
        return "".join(lines)

    def reverse(self) -> Edit:
        """Return the edit that takes this one back."""
        back = str(-int(self.replacement)) if self.kind == "constant" else self.old.strip()
        return Edit(
            site=self.site,
            replacement=back if not back.lstrip("-").isdigit() else f"{int(back):+d}",
            kind=self.kind,
            line=self.line,
            column=self.column,
            old=self.new,
            new=self.old,
        )


def edits(source: str) -> list[Edit]:
    """Return every edit of `source`, in reading order."""
    lines = source.splitlines()
    found: list[Edit] = []
    symbols = [item for node in ast.walk(ast.parse(source)) for item in _symbols(node, lines)]
    for site, (line, column, symbol) in enumerate(sorted(symbols)):
        found += _replace(site, line, column, symbol)
    return found


def is_addressable(edit: Edit, source: str) -> bool:
    """Whether `s|pattern|new|` on the line, which takes the first match, makes just this edit."""
    found = _to_python(PATTERNS[edit.kind]).search(source.splitlines()[edit.line - 1])
    return found is not None and found.span() == (edit.column, edit.column + len(edit.old))


@cache
def _to_python(pattern: str) -> re.Pattern[str]:
    """Translate a basic regular expression: its bare brackets are literal, quoted ones group."""
    return re.compile(re.sub(r"\\[?()]|[()]", lambda part: _SWAPPED[part.group()], pattern))


_SWAPPED = {r"\?": "?", r"\(": "(", r"\)": ")", "(": r"\(", ")": r"\)"}


def _replace(site: int, line: int, column: int, symbol: str) -> list[Edit]:
    if symbol.isdigit():
        value = int(symbol)
        return [
            Edit(
                site=site,
                replacement=f"{change:+d}",
                kind="constant",
                line=line,
                column=column,
                old=symbol,
                new=str(value + change),
            )
            for change in (-2, -1, 1, 2)
            if value + change >= 0 and (abs(change) == 1 or min(value, value + change) > 2)
        ]
    if symbol not in _KIND_OF:
        return []
    kind = _KIND_OF[symbol]
    pad = "" if kind in ("extremum", "boolean") else " "
    return [
        Edit(
            site=site,
            replacement=new,
            kind=kind,
            line=line,
            column=column - len(pad),
            old=f"{pad}{symbol}{pad}",
            new=f"{pad}{new}{pad}",
        )
        for new in _CLASSES[kind]
        if new != symbol
    ]


def _symbols(node: ast.AST, lines: list[str]) -> Iterator[tuple[int, int, str]]:
    """Yield (line, column, symbol) of what can be replaced in this one node."""
    if isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        for op, left, right in zip(node.ops, operands, node.comparators, strict=False):
            if type(op) in _COMPARE:
                yield from _between(left, right, _COMPARE[type(op)], lines)
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        yield from _between(node.left, node.right, _ARITHMETIC[type(node.op)], lines)
    elif isinstance(node, ast.BoolOp):
        symbol = "and" if isinstance(node.op, ast.And) else "or"
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield from _between(left, right, symbol, lines)
    elif isinstance(node, ast.AugAssign) and type(node.op) in (ast.Add, ast.Sub):
        yield from _between(node.target, node.value, f"{_ARITHMETIC[type(node.op)]}=", lines)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        yield node.lineno, node.col_offset, str(node.value)
    elif isinstance(node, ast.Name) and node.id in ("min", "max"):
        yield node.lineno, node.col_offset, f"{node.id}("


def _between(
    left: ast.expr, right: ast.expr, symbol: str, lines: list[str]
) -> Iterator[tuple[int, int, str]]:
    """Find `symbol`, set off by blanks, between two operands on one line (ASCII source)."""
    if left.end_lineno != right.lineno or left.end_col_offset is None:
        return
    gap = lines[right.lineno - 1][left.end_col_offset : right.col_offset]
    if f" {symbol} " in gap:
        yield right.lineno, left.end_col_offset + gap.index(f" {symbol} ") + 1, symbol
