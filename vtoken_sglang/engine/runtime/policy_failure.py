"""The end of a request whose policy failed; the server and every other request go on."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING

from vtoken_sglang.policy.base import PolicyError

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)


def end_request(scheduler: Scheduler, request: Req, error: PolicyError) -> None:
    """Abort a request that holds a row, at the safe point, with status 500 and the error's text.

    A running one ends as SGLang ends those that a client aborts, with the output of the step in
    flight. The chunked one would first be computed to its end, and unpruned it may not fit: SGLang
    takes it out before it forms the next batch.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    logger.error("request %s was ended: %s", request.rid, error, exc_info=error)
    reason = FINISH_ABORT(str(error), HTTPStatus.INTERNAL_SERVER_ERROR, type(error).__name__)
    if request is scheduler.chunked_req:
        request.discard_output_reason = reason
        scheduler._pending_chunked_abort_req = request
    else:
        request.to_finish = reason
