"""Python in a process of its own, as each of SGLang's is."""

from __future__ import annotations

import os
import subprocess
import sys

CHECK = "from vtoken_sglang.cli import main; raise SystemExit(main(['check']))"


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
