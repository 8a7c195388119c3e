#!/usr/bin/env python3
"""Apply the series of patches/ to a git checkout of SGLang, an unpacked wheel, or a copy of either.

Nothing needs it to run: the plugin hooks the released SGLang. All patches are applied or none.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
from pathlib import Path

PATCHES = Path(__file__).resolve().parents[1] / "patches"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="folder that holds sglang/ or python/sglang/")
    change = parser.add_mutually_exclusive_group()
    change.add_argument("--check", action="store_true", help="say whether it fits, change nothing")
    change.add_argument("--reverse", action="store_true", help="back to the release")
    arguments = parser.parse_args()
    checkout = arguments.checkout.resolve()
    root = checkout / "python" if (checkout / "python/sglang").is_dir() else checkout
    release, *lines = (PATCHES / "UPSTREAM").read_text().splitlines()

    def changed() -> list[str]:
        """Touched files that are not as released, with both hashes."""
        found = []
        for expected, name in (line.split() for line in lines):
            path = root / name
            got = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "no file"
            if got != expected:
                found.append(f"{name} (sha256 {got[:12]}, expected {expected[:12]})")
        return found

    if not arguments.reverse and (found := changed()):
        parser.exit(1, f"{parser.prog}: not {release} as released: {', '.join(found)}\n")
    patches = [str(PATCHES / name) for name in (PATCHES / "series").read_text().split()]
    flag = "--check" if arguments.check else "--reverse" if arguments.reverse else "--verbose"
    # A repository around the folder would make git skip, without a word, what lies outside of it.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(root.parent)}
    done = subprocess.run(["git", "apply", flag, *patches], cwd=root, env=environment, check=False)
    if done.returncode == 0 and arguments.reverse and (found := changed()):
        parser.exit(1, f"{parser.prog}: still not {release} as released: {', '.join(found)}\n")
    return done.returncode


if __name__ == "__main__":
    raise SystemExit(main())
