"""Length limits of requests that may outgrow the pool.

SGLang clips prompt and output to the pool's size, as if nothing of a request were ever given back.
A request that is pruned to what the pool holds is served to its full length, up to the model's
context; one that is not is refused with what would fit.
"""

from __future__ import annotations

from typing import Any

from vtoken_sglang.core.footprint import fits_private, max_length
from vtoken_sglang.engine.admission.demand import Capacity
from vtoken_sglang.errors import ConfigError
from vtoken_sglang.option_values import request_label
from vtoken_sglang.options import RequestOptions

# As SGLang keeps between the longest prompt and the longest request.
PROMPT_MARGIN = 5


class Lengths:
    """The limits of one scheduler. Scheduler thread only."""

    def __init__(self, scheduler: Any, capacity: Capacity) -> None:
        self._scheduler, self._capacity = scheduler, capacity

    @property
    def longest(self) -> int:
        """Longest request that a row and the model take."""
        return int(self._scheduler.model_config.context_len) - 1

    def prompt_limit(self, request: Any, stock: int) -> int:
        """SGLang's limit on the prompt, or the model's for a request that was let outgrow it."""
        if request.to_finish is not None or self._capacity.options(request) is None:
            return stock
        return max(stock, self.longest - PROMPT_MARGIN)

    def new_tokens(self, request: Any, wanted: int | None, clipped: int) -> int:
        """Tokens the request may generate.

        Args:
            wanted: as asked for, None when the request says nothing. clipped: as SGLang clips it.

        Raises:
            ConfigError: the request is longer than the pool and its budget does not fit.
        """
        options = self._capacity.options(request)
        prompt = len(request.origin_input_ids)
        room = self.longest - prompt - 1
        limit = self._scheduler.max_new_tokens_limit or 0
        most = min(room, limit) if limit > 0 else room
        asked = most if wanted is None else min(wanted, most)
        if options is None or asked <= clipped and prompt < self._scheduler.max_req_input_len:
            return clipped
        if self._capacity.fits(options, prompt, max(asked, 0), published=False):
            return max(asked, 0)
        if wanted is None and prompt < self._scheduler.max_req_input_len:
            return max(clipped, self._longest_fit(options, most + prompt) - prompt)
        raise self._refusal(options, prompt, asked)

    def _longest_fit(self, options: RequestOptions, limit: int) -> int:
        if self._capacity.computes_whole(options):
            limit = min(limit, self._capacity.tokens)
        rule = self._capacity.rule(options, self._capacity.max_waste)
        return max_length(rule, self._capacity.tokens, limit)

    def _refusal(self, options: RequestOptions, prompt: int, asked: int) -> ConfigError:
        """The error that says what would fit."""
        capacity = self._capacity
        rule = capacity.rule(options, capacity.max_waste)
        held = rule.bound(prompt + asked)
        by_budget = options.budget is not None
        field = request_label("budget" if by_budget else "keep")
        fit = self._longest_fit(options, self.longest)
        if fits_private(rule, 1, capacity.tokens) and fit > prompt:
            remedy = f"up to {fit - prompt} new tokens after this prompt would fit"
        elif fit:
            remedy = f"up to {fit} tokens of prompt and answer together would fit"
        else:
            remedy = f"a smaller {request_label('budget')} would"
        rule_text = (
            f"must leave a request that is longer than the pool room in it: {prompt} prompt and "
            f"{asked} new tokens hold up to {held} of {capacity.tokens} tokens at once; {remedy}"
        )
        return ConfigError(field, rule_text, options.budget if by_budget else options.keep)

    def keeps_private(self, request: Any) -> bool:
        """Whether the prompt must stay out of the tree, which would hold it whole: the request is
        longer than the pool, and fits only if its prompt is pruned, too."""
        capacity = self._capacity
        options = capacity.options(request)
        if options is None or not capacity.expects or not capacity.outgrows(request):
            return False
        prompt = len(request.origin_input_ids)
        new = request.sampling_params.max_new_tokens or 0
        return not capacity.fits(options, prompt, new, published=True)
