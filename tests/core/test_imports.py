"""The core must run without an engine."""

import pkgutil
import subprocess
import sys

import vtoken_sglang.core


def test_core_imports_neither_engine_nor_triton() -> None:
    modules = [
        f"vtoken_sglang.core.{m.name}" for m in pkgutil.iter_modules(vtoken_sglang.core.__path__)
    ]
    assert len(modules) > 10
    program = (
        f"import sys, {', '.join(modules)}\n"
        "bad = [name for name in ('sglang', 'triton', 'flashinfer') if name in sys.modules]\n"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
