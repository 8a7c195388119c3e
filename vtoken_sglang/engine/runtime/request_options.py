"""Options of SGLang's requests, resolved once per kind of request."""

from __future__ import annotations

from typing import Any, Final

from vtoken_sglang.options import RequestOptions, VTokenConfig

MAX_KINDS: Final = 1024


class OptionsOf:
    """Callable: the options in force for one request. They were validated when it arrived."""

    def __init__(self, config: VTokenConfig) -> None:
        self._config = config
        self._known: dict[str, RequestOptions] = {}

    def __call__(self, request: Any) -> RequestOptions:
        raw = (request.sampling_params.custom_params or {}).get("vtoken")
        kind = repr(raw)
        found = self._known.get(kind)
        if found is None:
            if len(self._known) >= MAX_KINDS:
                self._known.clear()
            found = self._known[kind] = RequestOptions.resolve(self._config, raw)
        return found
