"""Checks that run SGLang's own Triton attention in Triton's interpreter, outside the suite's
process (see `tests/helpers/interpreted.py`)."""
