#!/usr/bin/env python3
"""Check, apply or reverse the SGLang patches: the same as `vtoken-sglang patch`."""

from vtoken_sglang.patching import main

if __name__ == "__main__":
    raise SystemExit(main())
