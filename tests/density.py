"""How much code a file holds and how packed it is, whatever its lines look like.

    python tests/density.py FILES

Tokens are those of Python's tokenize without layout, comments, docstrings and the annotations of
functions, which help a reader. Code lines are lines that bear a token. Packed constructs are
comprehensions and generators, conditional expressions, walruses, chained assignments,
`a, b = x, y`, lambdas and starred items. The tokens of a function include those of the functions
inside of it.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path
from typing import Iterator, NamedTuple

LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
LAYOUT |= {tokenize.ENDMARKER}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
PACKED = (*COMPREHENSIONS, ast.IfExp, ast.NamedExpr, ast.Lambda, ast.Starred)
Place = tuple[int, int]  # (line from 1 on, column in characters)


class Figures(NamedTuple):
    """What a file's text holds."""

    lines: int
    code_lines: int
    tokens: int
    packed: int  # constructs
    functions: dict[str, int]  # "Class.function:line" -> tokens

    @property
    def tokens_per_line(self) -> float:
        return self.tokens / max(self.code_lines, 1)

    @property
    def packed_per_thousand(self) -> float:
        return 1000 * self.packed / max(self.tokens, 1)


def measure(source: str) -> Figures:
    """The figures of one file's text."""
    tree = ast.parse(source)
    tokens = counted_tokens(source, tree)
    code_lines = set()
    for token in tokens:
        code_lines.update(range(token.start[0], token.end[0] + 1))
    return Figures(
        lines=source.count("\n"),
        code_lines=len(code_lines),
        tokens=len(tokens),
        packed=sum(packed_in(node) for node in ast.walk(tree)),
        functions=dict(functions_of(tree, tokens)),
    )


def counted_tokens(source: str, tree: ast.Module) -> list[tokenize.TokenInfo]:
    """The tokens that count; an f-string is one, as before Python 3.12."""
    docstrings = docstring_places(tree)
    annotations = annotation_spans(source, tree)
    tokens = []
    depth = 0  # of f-strings
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "FSTRING_END":
            depth -= 1
            continue
        is_inside = depth > 0
        if kind == "FSTRING_START":
            depth += 1
        if is_inside or token.type in LAYOUT:
            continue
        if token.type == tokenize.STRING and token.start in docstrings:
            continue
        if not any(begin <= token.start < end for begin, end in annotations):
            tokens.append(token)
    return tokens


def docstring_places(tree: ast.Module) -> set[Place]:
    """Where the strings begin that stand alone in modules, classes and functions."""
    places = set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)):
            continue
        for child in node.body:
            value = child.value if isinstance(child, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                places.add((child.lineno, child.col_offset))
    return places


def annotation_spans(source: str, tree: ast.Module) -> list[tuple[Place, Place]]:
    """Where the annotations of functions begin and end, with the colon or the arrow."""
    rows = source.split("\n")
    spans = []
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation:
            begin = (node.lineno, node.col_offset + len(node.arg))
            spans.append((begin, end_of(node.annotation)))
        if isinstance(node, FUNCTIONS) and node.returns:
            spans.append((arrow_before(rows, node.returns), end_of(node.returns)))
    return spans


def end_of(node: ast.expr) -> Place:
    return node.end_lineno, node.end_col_offset


def arrow_before(rows: list[str], annotation: ast.expr) -> Place:
    """Where the -> of a function stands: the last one before its annotation."""
    line = annotation.lineno
    text = rows[line - 1].encode()[: annotation.col_offset].decode()
    while "->" not in text:
        line -= 1
        text = rows[line - 1]
    return line, text.rfind("->")


def packed_in(node: ast.AST) -> int:
    """The number of packed constructs that a node is, without its children."""
    if isinstance(node, PACKED):
        return 1
    if not isinstance(node, ast.Assign):
        return 0
    is_chained = len(node.targets) > 1
    is_pair = isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
    return is_chained + is_pair


def functions_of(
    node: ast.AST, tokens: list[tokenize.TokenInfo], prefix: str = ""
) -> Iterator[tuple[str, int]]:
    """("Class.function:line", tokens) of each function below a node."""
    for child in ast.iter_child_nodes(node):
        inside = prefix
        if isinstance(child, (ast.ClassDef, *FUNCTIONS)):
            inside = f"{prefix}{child.name}."
        if isinstance(child, FUNCTIONS):
            lines = range(child.lineno, child.end_lineno + 1)
            num = sum(token.start[0] in lines for token in tokens)
            yield f"{prefix}{child.name}:{child.lineno}", num
        yield from functions_of(child, tokens, inside)


def describe(figures: Figures, path: str) -> str:
    """One line about a file."""
    longest = sorted(figures.functions.items(), key=lambda item: -item[1])[:3]
    names = ", ".join(f"{function} {num}" for function, num in longest)
    return (
        f"{path}: {figures.lines} lines, {figures.code_lines} of code, {figures.tokens} tokens, "
        f"{figures.tokens_per_line:.1f} a line, {figures.packed_per_thousand:.1f} packed per "
        f"1,000; longest: {names}"
    )


if __name__ == "__main__":
    for path in sys.argv[1:]:
        print(describe(measure(Path(path).read_text()), path))
