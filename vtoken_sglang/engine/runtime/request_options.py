"""Options of SGLang's requests, resolved once per request."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from vtoken_sglang.options import RequestOptions, VTokenConfig

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class OptionsOf:
    """Callable: the options in force for one request. They were validated when it arrived."""

    def __init__(self, config: VTokenConfig) -> None:
        self._config = config
        self._known: WeakKeyDictionary[Req, RequestOptions] = WeakKeyDictionary()

    def __call__(self, request: Req) -> RequestOptions:
        found = self._known.get(request)
        if found is None:
            raw = (request.sampling_params.custom_params or {}).get("vtoken")
            found = self._known[request] = RequestOptions.resolve(self._config, raw)
        return found
