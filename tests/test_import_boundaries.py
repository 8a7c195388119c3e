"""The engine is imported by `engine/` alone, layers point one way, files stay small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.import_graph import dependencies, find_cycle, imports_of, modules_of

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 350
PRODUCT = modules_of(ROOT / "vtoken_sglang", "vtoken_sglang")
ENGINE = "vtoken_sglang.engine"
# SGLang's own kernel, measured beside ours.
MEASURES_SGLANG = ("vtoken_sglang_eval.bench.stock_index",)
# What a layer may import of the product, itself and `errors` aside.
LAYERS = {
    "vtoken_sglang.errors": (),
    "vtoken_sglang.kernels": (),
    "vtoken_sglang.core": ("vtoken_sglang.kernels",),
    "vtoken_sglang.policy": ("vtoken_sglang.options", "vtoken_sglang.option_values"),
    "vtoken_sglang.option_values": (),
    "vtoken_sglang.options": ("vtoken_sglang.option_values",),
    "vtoken_sglang.option_flags": ("vtoken_sglang.options", "vtoken_sglang.policy.names"),
}


def in_package(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def loaded_after_importing(*modules: str) -> set[str]:
    """Top-level packages in a fresh process once `modules` are imported."""
    script = (
        "import importlib, json, sys\n"
        "for name in json.loads(sys.argv[1]): importlib.import_module(name)\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(modules)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def without_engine() -> list[str]:
    return [name for name in PRODUCT if not in_package(name, ENGINE)]


def test_nothing_outside_engine_loads_sglang() -> None:
    names = without_engine()
    for needed in (
        "options",
        "cli",
        "core.types",
        "kernels.pack_live",
        "policy.registry",
    ):
        assert f"vtoken_sglang.{needed}" in names
    assert "sglang" not in loaded_after_importing(*names)


def test_config_and_policy_names_need_the_standard_library_only() -> None:
    loaded = loaded_after_importing("vtoken_sglang.options", "vtoken_sglang.policy.names")
    assert "vtoken_sglang" in loaded
    assert not loaded & {"torch", "numpy", "sglang", "transformers", "triton"}


def test_the_fresh_process_would_show_torch() -> None:
    assert {"torch", "numpy"} <= loaded_after_importing("vtoken_sglang.policy.base")


def test_only_engine_names_sglang_in_an_import() -> None:
    files = {name: path for name, path in PRODUCT.items() if not in_package(name, ENGINE)}
    for folder, package in (
        ("eval", "vtoken_sglang_eval"),
        ("scripts", "scripts"),
    ):
        files |= modules_of(ROOT / folder, package)
    found = [
        f"{path.relative_to(ROOT)}:{entry.line} imports {entry.module}"
        for name, path in files.items()
        for entry in imports_of(path, name)
        if entry.is_of("sglang") and name not in MEASURES_SGLANG
    ]
    assert found == []


def test_only_the_command_line_reaches_into_engine_and_only_lazily() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{entry.line}"
        for name, path in PRODUCT.items()
        if not in_package(name, ENGINE)
        for entry in imports_of(path, name)
        if (entry.is_of(ENGINE) or "engine" in entry.names)
        and not (name == "vtoken_sglang.cli" and entry.lazy)
    ]
    assert found == []


# Folders of the engine and which of its folders each may import; modules beside them are open to
# all but import none of them (`serve` starts the server and is imported by the command line only).
ROOMS: dict[str, tuple[str, ...]] = {
    "observe": (),
    "sharing": (),
    "admission": (),
    "compat": (),
    "attention": ("observe",),
    "plugin": ("attention", "compat"),
    "runtime": ("attention", "observe", "sharing", "admission", "plugin", "compat"),
    "hooks": ("runtime", "plugin"),
}


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_rooms_of_the_engine_import_along_the_data_flow(room: str) -> None:
    edges = dependencies(PRODUCT)
    allowed = (room, *ROOMS[room])
    members = [name for name in PRODUCT if in_package(name, f"{ENGINE}.{room}")]
    assert members
    found = [
        f"{name} -> {other}"
        for name in members
        for other in sorted(edges[name])
        if other.startswith(f"{ENGINE}.")
        and (other.split(".")[2] in ROOMS and other.split(".")[2] not in allowed)
    ]
    assert found == []


def test_every_folder_of_the_engine_is_a_room() -> None:
    folders = {path.name for path in (ROOT / "vtoken_sglang/engine").iterdir() if path.is_dir()}
    assert folders - {"__pycache__"} == set(ROOMS)


@pytest.mark.parametrize("layer", sorted(LAYERS))
def test_layers_point_one_way(layer: str) -> None:
    allowed = (layer, "vtoken_sglang.errors", *LAYERS[layer])
    edges = dependencies(PRODUCT)
    members = [name for name in PRODUCT if in_package(name, layer)]
    assert members
    found = [
        f"{name} -> {other}"
        for name in members
        for other in sorted(edges[name])
        if not any(in_package(other, package) for package in allowed)
    ]
    assert found == []


def test_the_product_has_no_import_cycle_lazy_ones_included() -> None:
    assert find_cycle(dependencies(PRODUCT)) == []


def test_the_evaluation_has_no_cycle_when_it_loads() -> None:
    modules = modules_of(ROOT / "eval", "vtoken_sglang_eval")
    assert find_cycle(dependencies(modules, lazy=False)) == []


def test_no_file_is_too_long() -> None:
    folders = ("vtoken_sglang", "eval", "scripts", "tests")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    assert len(sizes) > 20
    found = [
        f"{path.relative_to(ROOT)}: {size}" for path, size in sizes.items() if size > MAX_LINES
    ]
    assert found == []


# --- the checks above can fail ------------------------------------------------------------------


def write_package(folder: Path, sources: dict[str, str]) -> dict[str, Path]:
    for name, source in sources.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return modules_of(folder, "toy")


def test_a_cycle_is_found_even_through_a_lazy_relative_import(tmp_path: Path) -> None:
    modules = write_package(
        tmp_path,
        {
            "__init__.py": "",
            "a.py": "from toy.inner import b\n",
            "inner/__init__.py": "",
            "inner/b.py": "def late():\n    from ..a import x\n    return x\n",
        },
    )
    edges = dependencies(modules)
    assert edges["toy.a"] == {"toy.inner.b"}
    assert edges["toy.inner.b"] == {"toy.a"}
    assert find_cycle(edges) == ["toy.a", "toy.inner.b", "toy.a"]
    assert find_cycle(dependencies(modules, lazy=False)) == []


@pytest.mark.parametrize(
    ("source", "lazy"),
    [
        ("import sglang.srt as engine\n", False),
        ("from sglang import srt\n", False),
        ("def f():\n    import sglang\n", True),
        ("import importlib\nimportlib.import_module('sglang.srt')\n", False),
        ("import runpy\nrunpy.run_module('sglang.launch_server')\n", False),
    ],
)
def test_every_way_to_import_sglang_is_seen(tmp_path: Path, source: str, lazy: bool) -> None:
    ((name, path),) = write_package(tmp_path, {"a.py": source}).items()
    found = [entry for entry in imports_of(path, name) if entry.is_of("sglang")]
    assert [entry.lazy for entry in found] == [lazy]


def test_the_products_own_name_is_not_sglang(tmp_path: Path) -> None:
    ((name, path),) = write_package(tmp_path, {"a.py": "import vtoken_sglang.errors\n"}).items()
    assert not any(entry.is_of("sglang") for entry in imports_of(path, name))
