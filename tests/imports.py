"""The imports between the modules of gossamer, read from their source."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"


@dataclass(frozen=True)
class Import:
    """One module importing another."""

    importer: str
    imported: str
    inside_a_function: bool


def modules() -> dict[str, Path]:
    """All modules of the package by dotted name."""
    found = {}
    for path in sorted((SOURCE / "gossamer").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> Iterator[Import]:
    """What a module imports from the package. Imports for type checkers alone do not count."""

    def visit(node: ast.AST, inside: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                dotted = f"{node.module}.{alias.name}"
                target = dotted if dotted in known else node.module
                if target in known and target != name:
                    yield Import(name, target, inside)
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in known and alias.name != name:
                    yield Import(name, alias.name, inside)
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    yield from visit(ast.parse(path.read_text()), False)


def room(name: str) -> str:
    """The part of the package that a module belongs to: library, deployment, lab or cli."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ("deployment", "lab", "cli") else "library"


def package(name: str, known: dict[str, Path]) -> str:
    """The package that a module lies in; a package is its own."""
    return name if known[name].name == "__init__.py" else name.rpartition(".")[0]
