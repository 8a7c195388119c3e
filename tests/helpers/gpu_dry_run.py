"""The dry run of `scripts/gpu_check.sh`: its FlashInfer code runs on the stand-in."""

from __future__ import annotations

import sys

from eval.bench.gpu_check import main
from tests.helpers import flashinfer_stand_in

if __name__ == "__main__":
    sys.exit(main(stand_in=flashinfer_stand_in))
