"""A scheduler's memory without a scheduler: SGLang's own rows, allocator and records, driven by the
test step by step in the order of SGLang's loop. Values in K/V name the token that was written, so
what attention would read can be compared with what was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.managers.scheduler_components.pool_stats_observer import kv_private_tokens
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

from tests.helpers.fake_fence import ManualCopyEngine
from vtoken_sglang.core.types import LAG
from vtoken_sglang.engine.hooks import scheduler as scheduler_hooks
from vtoken_sglang.engine.runtime import current
from vtoken_sglang.engine.runtime import runtime as runtime_module
from vtoken_sglang.engine.runtime.runtime import Runtime
from vtoken_sglang.options import VTokenConfig

# There is no tree to fork from.
WINDOW: dict[str, Any] = {
    "policy": "streaming_llm",
    "budget": 48,
    "sink": 4,
    "recent": 8,
    "shared": "mask",
}
THINNED: dict[str, Any] = {"policy": "random", "keep": 0.5, "sink": 0, "recent": 8}
LAYERS, HEADS, DIM, ROWS, WIDTH = 2, 2, 4, 8, 512
_MARKS_PER_TOKEN = 8  # one per buffer, with room; whole numbers that float32 holds exactly


@dataclass(eq=False)
class FakeRequest:
    """What the runtime reads and writes of SGLang's `Req`."""

    rid: str
    sampling_params: Any
    prompt_len: int = 0
    kv: ReqKvInfo = field(default_factory=ReqKvInfo)
    prefix_len: int = 0
    cached_tokens: int = 0  # of the prompt, found in the tree
    decode_batch_idx: int = 0
    to_finish: Any = None
    skip_radix_cache_insert: bool = False
    ended: bool = False
    tree_pages: torch.Tensor | None = None  # int64, pages that the radix tree took over

    def finished(self) -> bool:
        return self.ended

    @property
    def origin_input_ids(self) -> range:
        return range(self.prompt_len)

    @property
    def full_untruncated_fill_ids(self) -> range:
        return range(self.prompt_len + len(self.output_ids))

    @property
    def output_ids(self) -> range:
        return range(max(0, self.kv.kv_committed_len - self.prompt_len))


class FakeTree:
    """A tree that holds what requests published until they end, and evicts nothing."""

    disable = False

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    def evictable_size(self) -> int:
        return 0

    def evict(self, _params: Any) -> None:
        pass

    def all_values_flatten(self) -> torch.Tensor:
        held = [r.tree_pages for r in self._engine.owners() if r.tree_pages is not None]
        return torch.cat([torch.zeros(0, dtype=torch.int64), *held]) * self._engine.page_size


class FakeEngine:
    """The scheduler of one runtime.

    Fields:
        copies: every submitted copy, to be run, lost or torn by the test.
        tree_tokens: tokens that belong to the radix tree.
        total: tokens of the pool.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, config: VTokenConfig, page_size: int, pages: int
    ) -> None:
        self.page_size, self.total = page_size, page_size * pages
        self.copies = ManualCopyEngine()
        self.tree_tokens = 0
        slots = self.total + page_size
        buffers = [torch.zeros(slots, HEADS, DIM) for _ in range(2 * LAYERS)]
        self.kv_cache: Any = SimpleNamespace(k_buffer=buffers[:LAYERS], v_buffer=buffers[LAYERS:])
        common = (torch.float32, "cpu", self.kv_cache, False)
        if page_size == 1:
            self.allocator: Any = TokenToKVPoolAllocator(self.total, *common)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(self.total, page_size, *common)
        self.rows = ReqToTokenPool(ROWS, WIDTH, "cpu", enable_memory_saver=False)
        self.running: list[FakeRequest] = []
        self.scheduler: Any = SimpleNamespace(
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            tree_cache=FakeTree(self),
            chunked_req=None,
            dp_tp_group=SimpleNamespace(world_size=1),
            chunked_prefill_size=64,
            running_batch=SimpleNamespace(reqs=self.running),
            max_total_num_tokens=self.total,
            is_fully_idle=lambda **_: not self.running,
            _engine_paused=False,
        )
        monkeypatch.setattr(runtime_module, "make_copy_engine", lambda *_: self.copies)
        self.runtime = Runtime(self.scheduler, config)
        monkeypatch.setattr(current, "_runtime", self.runtime)

    # -- the life of a request ------------------------------------------------------------------

    def admit(self, rid: str, prompt_len: int, **options: Any) -> FakeRequest:
        """Queue a request and give it a row; nothing is computed yet."""
        request = self.queue(rid, **options)
        request.prompt_len = prompt_len
        self.enter(request)
        return request

    def queue(self, rid: str, **options: Any) -> FakeRequest:
        """Queue a request with these options."""
        parameters = SimpleNamespace(custom_params={"vtoken": options}, max_new_tokens=None)
        request = FakeRequest(rid, parameters)
        scheduler_hooks.keep_prompt_private(None, self.scheduler, request)
        return request

    def enter(self, request: FakeRequest) -> None:
        """Give a queued request a row."""
        (request.kv.req_pool_idx,) = self.rows.alloc_rows(1) or [None]

    def extend(self, request: FakeRequest, end: int) -> None:
        """Compute positions up to `end`: a chunk of the prompt, or all of it."""
        kv = request.kv
        request.prefix_len = kv.kv_allocated_len
        for pos in range(kv.kv_allocated_len, end):
            self._write(request, pos)
        kv.kv_allocated_len = kv.kv_committed_len = end

    def publish(self, request: FakeRequest) -> None:
        """The checkpoint after prefill: whole pages of the prompt become the tree's."""
        owned = request.prompt_len // self.page_size * self.page_size
        row = self.rows.req_to_token[request.kv.req_pool_idx]
        request.tree_pages = row[: owned : self.page_size].long() // self.page_size
        self.tree_tokens += owned
        request.kv.cache_protected_len = owned

    def prefill(self, request: FakeRequest, published: bool = False) -> None:
        """The whole prompt at once; then the request decodes."""
        self.extend(request, request.prompt_len)
        if published:
            self.publish(request)
        self.running.append(request)

    def decode(self, *requests: FakeRequest) -> None:
        """One decode step: one new token each."""
        for request in requests:
            request.decode_batch_idx += 1
            self._write(request, request.kv.kv_allocated_len)
            request.kv.kv_allocated_len += 1
            request.kv.kv_committed_len += 1

    def _write(self, request: FakeRequest, pos: int) -> None:
        row = self.rows.req_to_token[request.kv.req_pool_idx]
        if pos % self.page_size == 0:
            slot = int(self.allocator.alloc(self.page_size)[0])
        else:
            slot = int(row[pos - 1]) + 1  # as SGLang's allocators do
        row[pos] = slot
        for number, buffer in enumerate((*self.kv_cache.k_buffer, *self.kv_cache.v_buffer)):
            buffer[slot] = self.mark(request, pos) + number

    @staticmethod
    def mark(request: FakeRequest, pos: int) -> float:
        return float(crc32(request.rid.encode()) % 1000 * 4096 + pos * _MARKS_PER_TOKEN)

    def finish(self, request: FakeRequest) -> None:
        """SGLang's `release_kv_cache`: free the row's slots, the overshoot, then the row."""
        kv = request.kv
        request.ended = True
        if request in self.running:
            self.running.remove(request)
        self.allocator.free_group_begin()
        owned = kv.kv_committed_len
        ranges = [(kv.cache_protected_len, owned)]
        scheduler_hooks.free_row_segments(self._stock_free, None, kv, ranges)
        overshoot = -(-owned // self.page_size) * self.page_size
        if overshoot < kv.kv_allocated_len:
            ranges = [(overshoot, kv.kv_allocated_len)]
            scheduler_hooks.free_row_segments(self._stock_free, None, kv, ranges)
        scheduler_hooks.free_request_row(ReqToTokenPool.free, self.rows, request)
        kv.mark_kv_released()
        if request.tree_pages is not None:  # no one else holds them: evicted at once
            self.allocator.free_page_ids(request.tree_pages)
            self.tree_tokens -= len(request.tree_pages) * self.page_size
            request.tree_pages = None
        self.allocator.free_group_end()

    def retract(self, request: FakeRequest) -> None:
        """Release without publishing and queue again, as after memory ran out."""
        self.finish(request)
        request.ended = False
        request.kv.cache_protected_len = request.kv.kv_committed_len = 0
        request.prefix_len = request.decode_batch_idx = 0
        scheduler_hooks.keep_prompt_private(None, self.scheduler, request)

    def _stock_free(self, _tree: None, kv: ReqKvInfo, ranges: list[tuple[int, int]]) -> None:
        row = self.rows.req_to_token[kv.req_pool_idx]
        for start, end in ranges:
            starts = row[start : end : self.page_size].long()
            self.allocator.free_page_ids(starts // self.page_size)

    # -- steps and looks ------------------------------------------------------------------------

    def safe_point(self, last: list[FakeRequest] | None = None) -> None:
        """Entry of `get_next_batch_to_run`. `last`: requests of the last batch, if it was an
        extend; a chunked request is in neither batch."""
        batch = SimpleNamespace(reqs=last) if last is not None else None
        scheduler_hooks.before_schedule(
            lambda *_, **__: None,
            self.scheduler,
            running_batch=self.scheduler.running_batch,
            last_batch=batch,
        )

    def until_due(self, last: Sequence[FakeRequest] | None = None) -> None:
        """Safe points up to the one at which a copy of the last one is due."""
        for _ in range(LAG):
            self.safe_point(last)

    def cycle(self, *requests: FakeRequest, count: int = 1) -> None:
        """`count` times: the safe point, then one decode of `requests`; every copy is run."""
        for _ in range(count):
            self.safe_point()
            self.decode(*requests)
            for copy in self.copies.waiting:
                copy.finish()

    def accounted(self) -> int:
        """What SGLang's check of every step adds up to; equals `total` unless something leaked.

        Without the tree: tree-owned tokens stay where they are.
        """
        private = sum(
            scheduler_hooks.count_private_tokens(kv_private_tokens, request.kv, self.page_size)
            for request in self.owners()
        )
        private, _ = scheduler_hooks.count_orphans((private, 0), None)
        return int(self.allocator.available_size()) + self.tree_tokens + private

    def owners(self) -> Iterator[FakeRequest]:
        """Requests with a row."""
        yield from self.running
        if self.scheduler.chunked_req is not None:
            yield self.scheduler.chunked_req

    def seen(self, request: FakeRequest) -> list[int]:
        """Positions that attention reads, ascending; AssertionError if one holds other bytes."""
        row = self.rows.req_to_token[request.kv.req_pool_idx, : request.kv.kv_allocated_len]
        positions = row.nonzero().flatten()
        slots = row[positions].long()
        written = self.mark(request, 0) + positions.float() * _MARKS_PER_TOKEN
        for number, buffer in enumerate((*self.kv_cache.k_buffer, *self.kv_cache.v_buffer)):
            wrong = (buffer[slots] != (written + number)[:, None, None]).any(dim=(1, 2))
            assert not bool(wrong.any()), (request.rid, number, positions[wrong].tolist())
        found: list[int] = positions.tolist()
        return found


MakeEngine = Callable[..., FakeEngine]
