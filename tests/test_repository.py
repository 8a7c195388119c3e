"""The repository as a whole: nothing of one machine in it, files small, layout as documented."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Spelled in two parts so that this file does not hold what it looks for.
FOREIGN = {
    "a registry host": [
        "pypi" + ".org",
        "python" + "hosted",
        "registry." + "npmjs",
        "deb." + "debian",
        "huggingface" + ".co",
    ],
    "a path of one machine": [
        "/wo" + "rk/",
        "/opt/" + "wheels",
        "/opt/" + "pypi",
        "/tm" + "p/",
        "/ro" + "ot/",
        "/ho" + "me/",
    ],
}

LONGEST_FILE = 350
LARGEST_FILE = 5 << 18  # the sample report is the largest


def kept_files() -> list[Path]:
    """Every file that is in the repository or would be with the next commit."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in listed.split("\0") if name]
    return [path for path in paths if path.is_file()]


def texts() -> dict[str, str]:
    found = {}
    for path in kept_files():
        try:
            found[str(path.relative_to(ROOT))] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
    return found


@pytest.mark.parametrize("kind", FOREIGN)
def test_no_file_names(kind: str) -> None:
    pattern = re.compile("|".join(map(re.escape, FOREIGN[kind])), re.IGNORECASE)
    everything = texts()
    assert "pyproject.toml" in everything
    hits = [
        f"{name}: {line.strip()[:100]}"
        for name, text in everything.items()
        for line in text.splitlines()
        if pattern.search(line)
    ]
    assert hits == []


def test_no_lock_file_and_nothing_large() -> None:
    assert not [path for path in kept_files() if path.name in {"uv.lock", "poetry.lock"}]
    large = {path.name for path in kept_files() if path.stat().st_size > LARGEST_FILE}
    assert large == set()


def test_python_files_are_short() -> None:
    long = {
        name: length
        for name, text in texts().items()
        if name.endswith(".py") and (length := text.count("\n")) > LONGEST_FILE
    }
    assert long == {}


def test_every_package_folder_is_declared() -> None:
    """A folder missing from pyproject works in a checkout and is absent from the wheel."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    declared = set(settings["tool"]["setuptools"]["packages"])
    renamed = settings["tool"]["setuptools"]["package-dir"]
    folders = {folder: name for name, folder in renamed.items()}
    found = set()
    for path in kept_files():
        relative = path.relative_to(ROOT)
        if path.suffix != ".py" or relative.parts[0] not in {"vtoken_sglang", *folders}:
            continue
        top, *rest = relative.parent.parts
        found.add(".".join([folders.get(top, top), *rest]))
    assert found == declared


def test_the_layout_is_the_documented_one() -> None:
    for name in ("core", "kernels", "policy", "engine"):
        assert (ROOT / "vtoken_sglang" / name / "__init__.py").is_file()
    for name in ("patches/series", "patches/UPSTREAM", "scripts/demo.sh", "scripts/test.sh"):
        assert (ROOT / name).is_file(), name
    for name in ("scripts/demo.sh", "scripts/test.sh", ".ci/run"):
        assert (ROOT / name).stat().st_mode & 0o111, f"{name} is not executable"
