"""How long a pruned request may become.

SGLang clips a request to the pool's size, as if nothing of it were ever given back. A pruned one is
served as long as the pool takes what it holds, up to the model's context, and its answer is clipped
there. It is refused only when its prompt leaves no room for an answer, with the longest that would.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from vtoken_sglang.core.footprint import (
    Prefill,
    largest,
    private_need,
    published_need,
)
from vtoken_sglang.core.types import page_floor
from vtoken_sglang.engine.admission.demand import Demand, waits_for_prompt_end
from vtoken_sglang.errors import ConfigError
from vtoken_sglang.option_values import request_label
from vtoken_sglang.options import RequestOptions

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

# As SGLang keeps between the longest prompt and the longest request.
PROMPT_MARGIN = 5


class LengthLimits:
    """The limits of one scheduler. Scheduler thread only."""

    def __init__(self, scheduler: Scheduler, demand: Demand) -> None:
        self._scheduler, self._demand = scheduler, demand

    @property
    def _context(self) -> int:
        """Tokens of the longest request that a row and the model take."""
        return int(self._scheduler.model_config.context_len) - 1

    def serves(self, options: RequestOptions, prompt: int, new: int) -> bool:
        """Whether an otherwise empty pool serves a prompt of so many tokens and `new` more to the
        end. If it does, it serves fewer of either, too."""
        return self._fits_whole(prompt, new) or self._fits_pruned(options, prompt + new)

    def new_tokens(self, request: Req, wanted: int | None) -> int | None:
        """Tokens the request may generate; None where SGLang's own clip is right.

        Args:
            wanted: as asked for, None when the request says nothing.

        Raises:
            ConfigError: its prompt does not fit, or no answer after it.
        """
        options = self._demand.options(request)
        if options is None:
            return None
        prompt = len(request.origin_input_ids)
        limit = self._context - prompt - 1
        if wanted is not None:
            limit = min(limit, wanted)
        if (for_all := self._scheduler.max_new_tokens_limit or 0) > 0:
            limit = min(limit, for_all)
        limit = max(0, limit)
        allowed = largest(partial(self.serves, options, prompt), limit)
        if not allowed and (limit or allowed is None):
            raise self._refusal(options, prompt, min(limit, 1))
        return allowed

    def prompt_limit(self, request: Req, stock: int) -> int:
        """SGLang's limit on the prompt, or the model's for a request that `new_tokens` passed."""
        if request.to_finish is not None or self._demand.options(request) is None:
            return stock
        return max(stock, self._context - PROMPT_MARGIN)

    def keeps_private(self, request: Req) -> bool:
        """Whether the prompt must stay out of the tree, which would hold it whole: the request is
        longer than the pool, and fits only if its prompt is pruned, too."""
        options = self._demand.options(request)
        if options is None or not self._demand.expects or not self._demand.outgrows(request):
            return False
        case = Prefill(
            length=len(request.origin_input_ids),
            cached=0,
            new=request.sampling_params.max_new_tokens or 0,
            published=True,
            forks=options.shared == "cow",  # under auto not while others hold its prompt, too
            chunk=None,
        )
        rule = self._demand.rule(options, self._demand.max_waste)
        return published_need(rule, case) > self._demand.tokens

    def longest_match(self, request: Req) -> int | None:
        """Maximum tokens of the cached prefix that a request longer than the pool may lock: what it
        locks is not given back while it lives. None for any other request."""
        options = self._demand.options(request)
        if options is None or not self._demand.outgrows(request):
            return None
        length = len(request.origin_input_ids) + (request.sampling_params.max_new_tokens or 0)
        spare = self._demand.tokens - self._private_need(options, length)
        return max(0, page_floor(spare, self._demand.page_size))

    def _fits_whole(self, prompt: int, new: int) -> bool:
        """Whether SGLang would take it without giving anything back."""
        scheduler = self._scheduler
        if prompt >= min(scheduler.max_req_input_len, self._demand.tokens):
            return False  # of prompts up to `max_req_input_len` SGLang lets some wait for ever
        room = scheduler.token_to_kv_pool_allocator.max_new_tokens_for_memory(
            prompt,
            scheduler.max_req_len - prompt - 1,
            token_capacity=scheduler.max_total_num_tokens,
            sliding_window_size=scheduler.sliding_window_size,
            chunk_size=scheduler.chunked_prefill_size,
        )
        return room is not None and new <= room

    def _fits_pruned(self, options: RequestOptions, length: int) -> bool:
        """Whether the pool takes it to `length`, whatever goes wrong: a retraction makes prompt and
        output one private prompt."""
        if self._holds_whole(options) is not None and length > self._demand.tokens:
            return False
        return self._private_need(options, length) <= self._demand.tokens

    def _private_need(self, options: RequestOptions, length: int) -> int:
        return private_need(self._demand.rule(options, self._demand.max_waste), length)

    def _holds_whole(self, options: RequestOptions) -> str | None:
        """Why a private prompt is there whole at some time; None when it never is."""
        if waits_for_prompt_end(options):
            return f"{options.policy} prunes a prompt when all of it was computed"
        if self._scheduler.chunked_prefill_size is None:
            return "without chunked prefill a prompt is computed at once"
        return None

    def _refusal(self, options: RequestOptions, prompt: int, new: int) -> ConfigError:
        """The error that says why a prompt and `new` tokens more do not fit, and what would."""
        tokens = self._demand.tokens
        longest = self._context - PROMPT_MARGIN - 1
        fit = largest(lambda length: self.serves(options, length, new), longest)
        why = self._holds_whole(options)
        if why is not None and prompt + new > tokens:
            field = "policy"
            why = f"{why}, so that the pool must hold it whole"
        else:
            field = "keep" if options.budget is None else "budget"
            why = f"it needs up to {self._private_need(options, prompt + new)} tokens at once"
        return ConfigError(
            request_label(field),
            f"must leave a prompt of {prompt} tokens room in the {tokens} of the pool: {why}; "
            f"a prompt of up to {fit} tokens would fit",
            getattr(options, field),
        )
