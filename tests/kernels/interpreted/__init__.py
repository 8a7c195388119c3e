"""Checks of the Triton kernels in Triton's interpreter.

Triton decides at import time whether it interprets, so these files are not collected with the
suite: `tests/kernels/test_triton_interpreted.py` runs each in a process of its own.
"""
