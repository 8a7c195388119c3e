"""Hooks of the scheduler process."""

from __future__ import annotations

from typing import Any

from vtoken_sglang.config import from_environment
from vtoken_sglang.engine.attestation import ATTESTATION_KEY, expected_attestation
from vtoken_sglang.engine.backends import verify_backend
from vtoken_sglang.engine.installation import is_verified, refuse
from vtoken_sglang.errors import SeamError, VTokenError


def attest(info: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    """AFTER `Scheduler.get_init_info`: verify the built objects, then attest to the launcher."""
    from vtoken_sglang.engine.compat import refuse_runtime

    config = from_environment()
    if config is None:
        return info
    try:
        if not is_verified():
            raise SeamError("scheduler", "the hooks of this process were never verified")
        refuse_runtime(scheduler)
        verify_backend(scheduler.tp_worker.model_runner)
    except VTokenError as error:
        refuse(error)
    info[ATTESTATION_KEY] = expected_attestation(config)
    return info
