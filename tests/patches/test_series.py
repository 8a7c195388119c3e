"""The series fits the released SGLang, is undone byte for byte, and is inert until it is set."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.patched_sglang import PATCHES, patch, stage, touched_files
from vtoken_sglang import SUPPORTED_SGLANG_VERSION
from vtoken_sglang.engine.plugin.installation import package_root
from vtoken_sglang.engine.plugin.upstream import PATCHED_SHA256, UPSTREAM_SHA256

PROBE = """
import json
from types import SimpleNamespace
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components import pool_stats_observer as observer
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

scheduler, record = Scheduler.__new__(Scheduler), ReqKvInfo(kv_allocated_len=33)
found = {"file": observer.__file__, "stock": observer.kv_private_tokens(record, 16)}
found["unset"] = [Scheduler.forward_launched_listener, ForwardBatch.kv_lens_of]
scheduler._notify_forward_launched("batch")
observer.private_tokens_of = lambda kv: 7 if kv is record else None
found["asked"] = [observer.kv_private_tokens(kv, 16) for kv in (record, ReqKvInfo())]
heard = []
Scheduler.forward_launched_listener = lambda *arguments: heard.append(arguments)
scheduler._notify_forward_launched("batch")
found["heard"] = heard == [(scheduler, "batch")]
print(json.dumps(found))
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with the touched files of the installed SGLang, as a checkout has them."""
    for name in touched_files():
        target = tmp_path / "checkout" / "python" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(package_root().parent / name, target)
    return tmp_path / "checkout"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def released_sha256() -> dict[str, str]:
    """Of every file of the wheel, hex, from what its installer recorded."""
    record = importlib.metadata.distribution("sglang").read_text("RECORD") or ""
    rows = [(path, digest) for path, digest, _size in csv.reader(record.splitlines()) if digest]
    return {
        path: base64.urlsafe_b64decode(digest.removeprefix("sha256=") + "=").hex()
        for path, digest in rows
    }


def test_the_hashes_are_those_of_the_released_wheel() -> None:
    release, *lines = (PATCHES / "UPSTREAM").read_text().splitlines()
    assert release == f"sglang {SUPPORTED_SGLANG_VERSION}"
    recorded = released_sha256()
    assert {name: digest for digest, name in map(str.split, lines)} == {
        name: recorded[name] for name in touched_files()
    }
    for source, digest in UPSTREAM_SHA256.items():
        assert recorded[f"sglang/{source}"] == digest, source


def test_every_patch_is_listed_and_gives_its_reason() -> None:
    listed = (PATCHES / "series").read_text().split()
    assert sorted(listed) == sorted(path.name for path in PATCHES.glob("*.patch"))
    for name in listed:
        header, _, diff = (PATCHES / name).read_text().partition("\ndiff --git ")
        fields, _, reason = header.partition("\n\n")
        assert "\nSubject: [PATCH] " in fields, name
        assert len(reason.split()) > 40, name
        assert diff.count("\n+") + diff.count("\n-") < 50, name


def test_git_am_takes_the_series(copy: Path) -> None:
    identity = {
        "EMAIL": "tester@example.invalid",
        "GIT_AUTHOR_NAME": "t",
        "GIT_COMMITTER_NAME": "t",
    }

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=copy, env={**os.environ, **identity},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "released")
    names = (PATCHES / "series").read_text().split()
    git("am", "--quiet", "--directory=python", *(str(PATCHES / name) for name in names))
    assert git("log", "--oneline").count("\n") == 1 + len(names)
    assert patched_sha256(copy / "python") == PATCHED_SHA256


def patched_sha256(root: Path) -> dict[str, str]:
    return {
        name.removeprefix("sglang/"): hashlib.sha256((root / name).read_bytes()).hexdigest()
        for name in touched_files()
    }


def test_apply_and_reverse(copy: Path) -> None:
    before = contents(copy)
    assert patch("--check", copy).returncode == 0
    assert contents(copy) == before
    assert patch(copy).returncode == 0
    assert patched_sha256(copy / "python") == PATCHED_SHA256
    for again in ((copy,), ("--check", copy)):
        done = patch(*again)
        assert done.returncode == 1
        assert "scheduler.py (sha256 " in done.stderr
    assert patch("--reverse", copy).returncode == 0
    assert contents(copy) == before


def test_a_folder_inside_a_repository_is_patched_all_the_same(copy: Path) -> None:
    """git would skip the patches of a folder below a repository's top without a word."""
    subprocess.run(["git", "init", "--quiet"], cwd=copy.parent, check=True)
    assert patch(copy / "python").returncode == 0
    assert patched_sha256(copy / "python") == PATCHED_SHA256


def test_another_release_is_refused_whole(copy: Path) -> None:
    changed = copy / "python" / touched_files()[-1]
    changed.write_bytes(changed.read_bytes() + b"# another release\n")
    before = contents(copy)
    done = patch(copy)
    assert done.returncode == 1
    assert (
        f"not sglang {SUPPORTED_SGLANG_VERSION} as released: {touched_files()[-1]}" in done.stderr
    )
    assert contents(copy) == before


def test_links_to_other_copies_keep_the_release(copy: Path, tmp_path: Path) -> None:
    """Package caches share files between environments by hard links."""
    name = touched_files()[0]
    os.link(copy / "python" / name, tmp_path / "shared.py")
    before = (tmp_path / "shared.py").read_bytes()
    assert patch(copy).returncode == 0
    assert (tmp_path / "shared.py").read_bytes() == before


def test_a_patched_sglang_is_inert_until_a_call_out_is_set(tmp_path: Path) -> None:
    folder = stage(tmp_path)
    assert patch(folder).returncode == 0
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("file").startswith(str(folder))
    assert found == {"stock": 48, "unset": [None, None], "asked": [7, 0], "heard": True}
