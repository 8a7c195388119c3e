"""A request as SGLang's radix tree, its admission and the plugin's runtime see it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.managers.schedule_batch import ReqKvInfo


@dataclass(eq=False)
class TreeRequest:
    """What they read and write of SGLang's `Req`.

    Fields:
        fresh: prefilled, its checkpoint still to come.
        marks: K/V content by position, after one for the namespace.
    """

    rid: str
    origin_input_ids: array[int]
    sampling_params: Any
    extra_key: str | None = None
    cache_salt: str | None = None
    output_ids: array[int] = field(default_factory=lambda: array("q"))
    kv: ReqKvInfo = field(default_factory=ReqKvInfo)
    lock: Any = None
    last_node: Any = None
    prefix_len: int = 0
    cached_tokens: int = 0  # of the prompt, found in the tree at first
    extend_end: int = 0
    decode_batch_idx: int = 0
    to_finish: Any = None
    skip_radix_cache_insert: bool = False
    ended: bool = False
    fresh: bool = True
    marks: list[int] = field(default_factory=list)
    priority: int = 0
    session: Any = None
    session_id: Any = None
    kv_rotation_base: Any = None
    return_logprob: bool = False
    retracted_stain: bool = False
    inflight_middle_chunks: int = 0
    auxiliary_swa_host_hit_length: int = 0

    def finished(self) -> bool:
        return self.ended

    @property
    def tokens(self) -> array[int]:
        return self.origin_input_ids + self.output_ids

    @property
    def full_untruncated_fill_ids(self) -> array[int]:
        return self.tokens

    @property
    def extend_len(self) -> int:
        return self.extend_end - self.prefix_len

    def needs_host_load_back(self) -> bool:
        return False

    def _compute_max_prefix_len(self, length: int) -> int:
        return max(0, length - 1)
