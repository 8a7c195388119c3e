"""Where a result comes from: versions, commit, machine, command."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = {
    "sglang": "sglang",
    "torch": "torch",
    "transformers": "transformers",
    "vtoken": "vtoken-sglang",
}


def versions() -> dict[str, str | None]:
    """Versions of Python and the packages that matter; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for label, package in PACKAGES.items():
        try:
            found[label] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[label] = None
    return found


def git_commit() -> str | None:
    """Commit of the checkout this file is in, with "-dirty" appended if tracked files differ.

    The figures in docs/results do not count: each measurement changes them, and nothing reads them.
    """
    folder = Path(__file__).resolve().parent

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if not commit:
        return None
    # An installed copy may lie inside some other repository (a virtual environment, say).
    if git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":/!docs/results")
    return commit + ("-dirty" if changed else "")


def cpu_model() -> str:
    """Name of the processor as Linux gives it, else what Python knows."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory_gib() -> float | None:
    """Physical memory in GiB."""
    with contextlib.suppress(OSError, ValueError):
        pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        return round(pages * page / 2**30, 1)
    return None


def machine(device: str) -> dict[str, Any]:
    """The machine and, for device "cuda", its first accelerator."""
    facts: dict[str, Any] = {
        "device": device,
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": memory_gib(),
        "system": platform.platform(terse=True),
    }
    if device == "cuda":
        import torch

        facts["accelerator"] = torch.cuda.get_device_name(0)
        facts["accelerator_count"] = torch.cuda.device_count()
    return facts


def device_label(facts: dict[str, Any]) -> str:
    """One line for a machine, as used in figures files."""
    cpu = f"{facts['cores']} cores of {facts['cpu']}, {facts['memory_gib']} GiB"
    if "accelerator" in facts:
        return f"{facts['accelerator_count']} x {facts['accelerator']}; {cpu}"
    return f"CPU: {cpu}"


def resolve_device(asked: str) -> str:
    """ "cuda" or "cpu": what was asked for, or for "auto" what the machine has."""
    if asked != "auto":
        return asked
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def portable(words: Sequence[str]) -> list[str]:
    """Words of a command with absolute paths cut to their last part, to show and to commit."""
    return [Path(word).name if os.path.isabs(word) else word for word in words]


def portable_command(words: Sequence[str]) -> str:
    """The same as one shell line."""
    return shlex.join(portable(words))


def model_facts(model: str) -> dict[str, Any]:
    """Name of a model and, where its configuration is at hand, its `context` in tokens."""
    folder = Path(model)
    facts: dict[str, Any] = {"name": folder.name or model}
    if not folder.is_dir():
        folder = cached_folder(model)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        facts["context"] = int(config["max_position_embeddings"])
    return facts


def cached_folder(model: str) -> Path:
    """Where the hub's cache keeps the configuration of a model given by name; a folder that does
    not exist if it has none."""
    from huggingface_hub import try_to_load_from_cache

    with contextlib.suppress(OSError, ValueError):  # no name that a hub could know
        found = try_to_load_from_cache(model, "config.json")
        if isinstance(found, str):
            return Path(found).parent
    return Path(model)


def figures_head(module: str, words: Sequence[str], device: str = "cpu") -> dict[str, Any]:
    """Who measured the figures of a file: the command (`python -m module words`), commit, machine
    and versions."""
    return {
        "command": portable_command(["python", "-m", module, *words]),
        "commit": git_commit(),
        "device": device_label(machine(device)),
        "versions": versions(),
    }


def origin(device: str) -> dict[str, Any]:
    """Everything above about this moment: versions, commit, machine."""
    return {
        "versions": versions(),
        "commit": git_commit(),
        "machine": machine(device),
    }
