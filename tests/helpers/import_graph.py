"""Who imports whom, read from the source by `ast`, so that lazy imports count as well."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_LOADERS = {"import_module", "__import__", "run_module", "find_spec"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One import statement or literal loader call.

    Fields:
        module: absolute dotted name that is imported.
        names: what a `from` import takes out of it; empty otherwise.
        lazy: it stands inside a function.
        line: 1-based.
    """

    module: str
    names: tuple[str, ...]
    lazy: bool
    line: int

    def is_of(self, package: str) -> bool:
        return self.module == package or self.module.startswith(package + ".")


def modules_of(folder: Path, package: str) -> dict[str, Path]:
    """Dotted name -> file of every module of `package`, whose sources lie in `folder`."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        found[".".join((package, *parts))] = path
    return found


def imports_of(path: Path, module: str) -> list[Import]:
    """Every import in `path`, which is module `module` (needed for relative imports)."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return list(_walk(tree, package, lazy=False))


def dependencies(modules: Mapping[str, Path], *, lazy: bool = True) -> dict[str, set[str]]:
    """Module -> modules of the same mapping that it imports; without `lazy`, when it loads."""
    edges: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for entry in imports_of(path, name):
            if entry.lazy and not lazy:
                continue
            inner = {f"{entry.module}.{part}" for part in entry.names} & modules.keys()
            # `from package import submodule` needs the submodule; anything else the module.
            takes_own = not entry.names or len(inner) < len(entry.names)
            if takes_own and entry.module in modules:
                inner.add(entry.module)
            edges[name] |= inner - {name}
    return edges


def find_cycle(edges: Mapping[str, set[str]]) -> list[str]:
    """One cycle as a list of modules, first repeated at the end; empty when there is none."""
    done: set[str] = set()

    def visit(node: str, trail: list[str]) -> list[str]:
        if node in trail:
            return [*trail[trail.index(node) :], node]
        if node in done:
            return []
        for following in sorted(edges.get(node, ())):
            if cycle := visit(following, [*trail, node]):
                return cycle
        done.add(node)
        return []

    for start in sorted(edges):
        if cycle := visit(start, []):
            return cycle
    return []


def _walk(node: ast.AST, package: str, *, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        inside = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _read(child, package, lazy=inside)
        yield from _walk(child, package, lazy=inside)


def _read(node: ast.AST, package: str, *, lazy: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(module=alias.name, names=(), lazy=lazy, line=node.lineno)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*parents, base] if base else parents)
        names = tuple(alias.name for alias in node.names)
        yield Import(module=base, names=names, lazy=lazy, line=node.lineno)
    elif isinstance(node, ast.Call) and node.args:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else None
        called = node.func.id if isinstance(node.func, ast.Name) else called
        target = node.args[0]
        if (
            called in _LOADERS
            and isinstance(target, ast.Constant)
            and isinstance(target.value, str)
            and not (called == "find_spec" and "." not in target.value)  # locates, runs nothing
        ):
            yield Import(module=target.value, names=(), lazy=lazy, line=node.lineno)
