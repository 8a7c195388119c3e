"""The cache of pinned package files, with a real pip and a wheel made here; no network."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from pathlib import Path

import pytest
from vtoken_sglang_eval import package_files
from vtoken_sglang_eval.package_files import (
    MANIFEST,
    PackageFile,
    PackageFileError,
    cache_root,
    ensure_entry,
    fetch,
    sha256_of,
)

TEXT = b"a few bytes\n"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackageFile:
    """A wheel that pip finds in a folder, and nowhere else."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    wheel = shelf / "tiny_pack-1.0-py3-none-any.whl"
    info = "tiny_pack-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_pack/data.txt", TEXT)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-pack\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return PackageFile(
        package="tiny-pack", version="1.0", sha256=sha256_of(wheel), member="tiny_pack/data.txt"
    )


@dataclasses.dataclass
class Builder:
    """Counts how often the entry was really built."""

    source: PackageFile
    built: int = 0

    def ensure(self, recipe: int = 1) -> Path:
        def build(folder: Path) -> None:
            self.built += 1
            fetch(self.source, folder)

        return ensure_entry("tiny", self.source, recipe, build, lambda line: None)


def test_an_entry_is_built_once_and_then_reused(source: PackageFile) -> None:
    builder = Builder(source)
    entry = builder.ensure()
    assert entry == cache_root() / "tiny"
    assert (entry / "data.txt").read_bytes() == TEXT
    assert builder.ensure() == entry
    assert builder.built == 1


@pytest.mark.parametrize("damage", ["changed file", "missing file", "no manifest", "bad manifest"])
def test_a_damaged_entry_is_built_again(source: PackageFile, damage: str) -> None:
    builder = Builder(source)
    entry = builder.ensure()
    if damage == "changed file":
        (entry / "data.txt").write_bytes(b"other bytes\n")
    elif damage == "missing file":
        (entry / "data.txt").unlink()
    elif damage == "no manifest":
        (entry / MANIFEST).unlink()
    else:
        (entry / MANIFEST).write_text("{", encoding="utf-8")
    assert (builder.ensure() / "data.txt").read_bytes() == TEXT
    assert builder.built == 2


def test_another_recipe_builds_again(source: PackageFile) -> None:
    builder = Builder(source)
    builder.ensure(recipe=1)
    entry = builder.ensure(recipe=2)
    assert builder.built == 2
    assert json.loads((entry / MANIFEST).read_text(encoding="utf-8"))["recipe"] == 2


def test_a_wheel_that_is_not_the_pinned_one_is_refused(source: PackageFile) -> None:
    other = dataclasses.replace(source, sha256="0" * 64)
    with pytest.raises(PackageFileError, match=f"sha256 must be {'0' * 64}, got {source.sha256}"):
        Builder(other).ensure()
    assert not (cache_root() / "tiny").exists()
    assert [path.name for path in cache_root().iterdir()] == ["tiny.lock"]


def test_a_version_that_does_not_exist_is_said(source: PackageFile) -> None:
    other = dataclasses.replace(source, version="9.9")
    with pytest.raises(
        PackageFileError, match=r"pip download tiny-pack==9\.9 failed: .*No matching"
    ):
        Builder(other).ensure()


def test_a_file_the_wheel_lacks_is_said(source: PackageFile) -> None:
    other = dataclasses.replace(source, member="tiny_pack/none.txt")
    with pytest.raises(PackageFileError, match="holds no file tiny_pack/none.txt"):
        Builder(other).ensure()


def test_a_build_that_fails_leaves_no_entry_and_is_cleaned_up(source: PackageFile) -> None:
    def build(folder: Path) -> None:
        (folder / "half").write_bytes(b"")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        ensure_entry("tiny", source, 1, build, lambda line: None)
    assert [path.name for path in cache_root().iterdir()] == ["tiny.lock"]


def test_what_a_killed_build_left_is_removed(source: PackageFile) -> None:
    abandoned = cache_root() / "tiny.abandoned"
    abandoned.mkdir(parents=True)
    (abandoned / "half").write_bytes(b"")
    Builder(source).ensure()
    assert not abandoned.exists()


def test_the_cache_follows_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert package_files.cache_root() == tmp_path / ".cache" / "vtoken_sglang"
