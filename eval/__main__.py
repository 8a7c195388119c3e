"""`python -m vtoken_sglang_eval ...`, the same as `vtoken-sglang eval ...`."""

from __future__ import annotations

import sys

from .main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
