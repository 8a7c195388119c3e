"""What a scheduler says in its ready message so that the launcher knows the product is in place."""

from __future__ import annotations

import hashlib

from vtoken_sglang import __version__
from vtoken_sglang.options import VTokenConfig

ATTESTATION_KEY = "vtoken"


def expected_attestation(config: VTokenConfig) -> dict[str, str]:
    """The attestation of a scheduler that runs this version with this config."""
    digest = hashlib.sha256(config.to_json().encode()).hexdigest()
    return {"version": __version__, "config": digest}
