"""The end of a request whose policy failed; the server and every other request go on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from vtoken_sglang.policy.base import PolicyError

logger = logging.getLogger(__name__)


def ending(scheduler: Any) -> Callable[[Any, PolicyError], None]:
    """(request, error) -> aborts a request that holds a row, at the safe point, with status 500 and
    the error's text.

    A running one ends as SGLang ends those that a client aborts, with the output of the step in
    flight. The chunked one would first be computed to its end, and unpruned it may not fit: SGLang
    takes it out before it forms the next batch.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    def end(request: Any, error: PolicyError) -> None:
        logger.error("request %s was ended: %s", request.rid, error, exc_info=error)
        status = HTTPStatus.INTERNAL_SERVER_ERROR
        reason = FINISH_ABORT(str(error), status, type(error).__name__)
        if request is scheduler.chunked_req:
            request.discard_output_reason = reason
            scheduler._pending_chunked_abort_req = request
        else:
            request.to_finish = reason

    return end
