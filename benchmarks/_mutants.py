"""Programs with one changed operator (mutants), and a list of equivalent mutants."""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.GtE, ast.LtE),
    ast.LtE: (ast.Gt, ast.Lt),
    ast.Gt: (ast.LtE, ast.GtE),
    ast.GtE: (ast.Lt, ast.Gt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
}


@dataclass(frozen=True, slots=True)
class Mutant:
    change: str  # line, column, what was there, and what is there now
    source: str


def mutants(source: str, first_line: int, rng: random.Random) -> Iterator[Mutant]:
    """Yield all mutants from `first_line` on, in an order drawn from `rng`.

    Each changes one comparison, arithmetic operator, boolean or number. Without any of these, it changes a text;
    without texts, the returned value."""
    tree = ast.parse(source)
    nodes = [(place, node) for place, node in enumerate(ast.walk(tree)) if getattr(node, "lineno", 0) >= first_line]
    kinds = (_operator, _text, _returned)
    found = ([(place, new) for place, node in nodes for new in kind(node)] for kind in kinds)
    left = next(changes for changes in found if changes)
    while left:
        place, new = left.pop(rng.randrange(len(left)))
        yield _mutant(tree, place, new, first_line)


def _mutant(tree: ast.Module, place: int, new: ast.AST, first_line: int) -> Mutant:
    tree = copy.deepcopy(tree)
    old = list(ast.walk(tree))[place]
    was, (line, column) = ast.unparse(old), (getattr(old, "lineno", 0), getattr(old, "col_offset", 0))
    _replace(tree, old, new)
    return Mutant(f"{line - first_line + 1}:{column} {was} -> {ast.unparse(new)}", ast.unparse(tree) + "\n")


def _operator(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare():
            for index, operator in enumerate(node.ops):
                for new in _COMPARISONS[type(operator)]:
                    yield _with(node, ops=[*node.ops[:index], new(), *node.ops[index + 1 :]])
        case ast.BinOp() | ast.AugAssign() if type(node.op) in _ARITHMETIC:
            yield _with(node, op=_ARITHMETIC[type(node.op)]())
        case ast.BoolOp():
            yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.Constant(value=bool() as value):
            yield _with(node, value=not value)
        case ast.Constant(value=int() | float() as value):
            yield _with(node, value=value + 1)


def _text(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield _with(node, value=node.value + "x")


def _returned(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Return):
        yield _with(node, value=ast.Constant(None))


def _with(node: ast.AST, **fields: object) -> ast.AST:
    return type(node)(
        **{**dict(ast.iter_fields(node)), **fields},
        **{name: getattr(node, name) for name in ("lineno", "col_offset", "end_lineno", "end_col_offset")},
    )


def _replace(tree: ast.AST, old: ast.AST, new: ast.AST) -> None:
    class Replaced(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return new if node is old else self.generic_visit(node)

    Replaced().visit(tree)


EQUIVALENT = {  # problem, change: why it makes no difference
    ("own/2", "1:41 1 -> 2"): "no number is divisible by the next one",
    ("HumanEval/25", "11:11 1 -> 2"): "n never stays 2: the loop divides by i = 2, which n = 2 still allows",
    ("HumanEval/35", "3:11 e > m -> e >= m"): "replaces a value by an equal one",
    ("HumanEval/89", "5:33 2 * 2 -> 2 + 2"): "both are 4",
    ("HumanEval/99", "14:9 len(value) > 0 -> len(value) >= 0"): "float('') has raised before",
    ("HumanEval/114", "5:16 0 -> 1"): "the sums are integers: below 1 means below 0, or 0, which becomes 0",
    (
        "HumanEval/116",
        "1:52 2 -> 3",
    ): "the numbers are not negative: each counts 1 less except 0, which comes first anyway",
    ("HumanEval/135", "4:9 arr[i] < arr[i - 1] -> arr[i] <= arr[i - 1]"): "the task excludes duplicate values",
    ("HumanEval/139", "3:19 1 -> 2"): "the first round multiplies by 1",
    ("HumanEval/154", "4:27 1 -> 2"): "the last slice is shorter than the compared text",
    ("HumanEval/163", "2:16 8 -> 9"): "9 is not even",
}
