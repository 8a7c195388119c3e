"""SGLang's own radix tree, rows and allocator under the plugin's runtime, without a scheduler.

The test drives them in the order of SGLang's loop: safe point, decode, checkpoint of what was
prefilled. The K/V bytes of a token are made from everything before it, so two requests with the
same prefix write the same bytes, as a model would, and every slot can be compared with what must
be in it, whoever computed or copied it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from sglang.srt.managers.scheduler_components.pool_stats_observer import kv_private_tokens
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import match_kv_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from tests.helpers.fake_fence import ManualCopyEngine
from tests.helpers.tree_request import TreeRequest
from vtoken_sglang.core.types import LAG
from vtoken_sglang.engine.hooks import scheduler as scheduler_hooks
from vtoken_sglang.engine.runtime import current
from vtoken_sglang.engine.runtime import runtime as runtime_module
from vtoken_sglang.engine.runtime.runtime import Runtime
from vtoken_sglang.options import VTokenConfig

ROWS, WIDTH = 12, 512


class PrefixEngine:
    """One runtime over a real tree.

    Fields:
        running: requests that decode, the fresh ones included.
        copies: every submitted copy, to be run by the test.
        total: tokens of the pool.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        config: VTokenConfig,
        *,
        page_size: int,
        pages: int,
        core: str,
    ) -> None:
        self.page_size, self.total, self.core = page_size, page_size * pages, core
        self.copies = ManualCopyEngine()
        slots = self.total + page_size
        buffers = [torch.zeros(slots, 1, 2, dtype=torch.float64) for _ in range(2)]
        self.kv_cache: Any = SimpleNamespace(k_buffer=buffers[:1], v_buffer=buffers[1:])
        common = (torch.float64, "cpu", self.kv_cache, False)
        if page_size == 1:
            self.allocator: Any = TokenToKVPoolAllocator(self.total, *common)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(self.total, page_size, *common)
        self.rows = ReqToTokenPool(ROWS, WIDTH, "cpu", enable_memory_saver=False)
        self.tree = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page_size,
                tree_components=(ComponentType.FULL,),
                tree_core_backend=core,
            )
        )
        self.running: list[TreeRequest] = []
        self.scheduler: Any = SimpleNamespace(
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.tree,
            chunked_req=None,
            dp_tp_group=SimpleNamespace(world_size=1),
            chunked_prefill_size=32,
            waiting_queue=[],
            running_batch=SimpleNamespace(reqs=self.running),
            max_total_num_tokens=self.total,
            is_fully_idle=lambda **_: not self.running,
            _engine_paused=False,
        )
        monkeypatch.setattr(runtime_module, "make_copy_engine", lambda *_: self.copies)
        self.runtime = Runtime(self.scheduler, config)
        monkeypatch.setattr(current, "_runtime", self.runtime)

    # -- the life of a request ------------------------------------------------------------------

    def admit(
        self,
        rid: str,
        prompt: Sequence[int],
        *,
        new_tokens: int = 400,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        **options: Any,
    ) -> TreeRequest | None:
        """Queue a request, match, lock and compute its prompt; None if the pool is too full."""
        request = self.queue(rid, prompt, new_tokens, extra_key, cache_salt, **options)
        return request if self.enter(request) else None

    def queue(
        self,
        rid: str,
        prompt: Sequence[int],
        new_tokens: int,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        **options: Any,
    ) -> TreeRequest:
        """Queue a request with these options."""
        parameters = SimpleNamespace(
            custom_params={"vtoken": options}, max_new_tokens=new_tokens, ignore_eos=False
        )
        request = TreeRequest(rid, array("q", prompt), parameters, extra_key, cache_salt)
        scheduler_hooks.keep_prompt_private(None, self.scheduler, request)
        return request

    def enter(self, request: TreeRequest) -> bool:
        """What SGLang does from the waiting queue to the launch of the prefill."""
        match_kv_cache(request, self.tree, max_prefix_len=len(request.tokens) - 1)
        request.kv.cache_protected_len = request.prefix_len
        request.lock = self.tree.lock(request.last_node)
        need = self._pages(len(request.tokens)) - self._pages(request.prefix_len)
        if not self.rows.available_size() or not self.make_room(need):
            self.tree.unlock(request.lock)
            request.lock, request.kv.cache_protected_len = None, 0
            return False
        request.extend_end = len(request.tokens)
        self.prefill(request)
        return True

    def prefill(self, request: TreeRequest) -> None:
        """Compute what was matched, locked and found room, up to `extend_end`: all that is left,
        after which the request decodes, or a chunk."""
        kv = request.kv
        if not kv.holds_kv:
            (kv.req_pool_idx,) = self.rows.alloc_rows(1)
            matched = self.tree.path_device_indices(request.last_node)
            self.rows.req_to_token[kv.req_pool_idx, : request.prefix_len] = matched.to(torch.int32)
            kv.kv_allocated_len = request.prefix_len
            if not request.retracted_stain:
                request.cached_tokens = request.prefix_len
        self._extend(request, request.extend_end)
        if request.extend_end == len(request.tokens):
            request.fresh = True
            self.running.append(request)

    def make_room(self, pages: int) -> bool:
        """Evict from the tree until `pages` pages are free; False if they cannot be."""
        short = pages * self.page_size - self.allocator.available_size()
        if short > 0:
            self.tree.evict(EvictParams(num_tokens=int(short)))
        return bool(self.allocator.available_size() >= pages * self.page_size)

    def step(self) -> list[TreeRequest]:
        """One turn of SGLang's loop; returns the requests that were retracted for lack of room."""
        self.safe_point()
        retracted: list[TreeRequest] = []
        while not self.make_room(sum(len(r.tokens) % self.page_size == 0 for r in self.running)):
            retracted.append(self.retract(self.running[-1]))
        self.decode(*self.running)
        self.publish_fresh(self.running)
        return retracted

    def decode(self, *requests: TreeRequest) -> None:
        """One decode step: one new token each."""
        for request in requests:
            request.decode_batch_idx += 1
            token = crc32(f"{request.rid} {len(request.tokens)}".encode()) % 997
            request.output_ids.append(token)
            self._extend(request, len(request.tokens))

    def safe_point(self, last: list[TreeRequest] | None = None) -> None:
        """Entry of `get_next_batch_to_run`. `last`: requests of the last batch, if it was an
        extend."""
        batch = self.scheduler.running_batch
        scheduler_hooks.before_schedule(
            lambda *_, **__: None,
            self.scheduler,
            running_batch=batch,
            last_batch=SimpleNamespace(reqs=last) if last else batch,
        )

    def publish_fresh(self, requests: Iterable[TreeRequest]) -> None:
        """The checkpoint after a prefill, when its result is processed: one decode is in flight."""
        for request in requests:
            if request.fresh:
                request.fresh = False
                if not request.skip_radix_cache_insert:
                    self.tree.checkpoint(request, up_to=request.extend_end)

    def finish(self, request: TreeRequest, checkpoint: bool = True) -> None:
        """SGLang's `release_kv_cache`, step by step."""
        kv = request.kv
        request.ended = True
        if request in self.running:
            self.running.remove(request)
        self.allocator.free_group_begin()
        if checkpoint and not request.skip_radix_cache_insert:
            self.tree.checkpoint(request, up_to=kv.kv_committed_len)
        ranges = [(kv.cache_protected_len, kv.kv_committed_len)]
        scheduler_hooks.free_row_segments(BasePrefixCache.free_kv_row, self.tree, kv, ranges)
        self.tree.unlock(request.lock)
        request.lock = None
        scheduler_hooks.free_request_row(ReqToTokenPool.free, self.rows, request)
        kv.mark_kv_released()
        self.allocator.free_group_end()

    def retract(self, request: TreeRequest) -> TreeRequest:
        """Release without publishing; the request may `enter` again later."""
        self.finish(request, checkpoint=False)
        request.ended = request.fresh = False
        request.retracted_stain = True
        request.kv.cache_protected_len = request.kv.kv_committed_len = 0
        request.prefix_len = request.decode_batch_idx = 0
        request.last_node = None
        scheduler_hooks.keep_prompt_private(None, self.scheduler, request)
        return request

    def run_copies(self) -> None:
        for copy in self.copies.waiting:
            copy.finish()

    def until_due(self) -> None:
        """Safe points up to the one at which a copy of the last one is due."""
        for _ in range(LAG):
            self.safe_point()

    def steps(self, count: int) -> None:
        """`count` turns; every copy is over by the next one."""
        for _ in range(count):
            assert self.step() == []
            self.run_copies()

    # -- K/V ------------------------------------------------------------------------------------

    def _pages(self, length: int) -> int:
        return -(-length // self.page_size)

    def _extend(self, request: TreeRequest, end: int) -> None:
        kv = request.kv
        row = self.rows.req_to_token[kv.req_pool_idx]
        values = self.values(request, end)
        for pos in range(kv.kv_allocated_len, end):
            if pos % self.page_size == 0:
                slot = int(self.allocator.alloc(self.page_size)[0])
            else:
                slot = int(row[pos - 1]) + 1  # as SGLang's allocators do
            row[pos] = slot
            for number, buffer in enumerate((*self.kv_cache.k_buffer, *self.kv_cache.v_buffer)):
                buffer[slot] = values[pos] + number
        kv.kv_allocated_len = kv.kv_committed_len = end

    @staticmethod
    def values(request: TreeRequest, end: int) -> list[int]:
        """What the model computes at each position below `end`: it depends on the namespace and
        every token so far."""
        if not request.marks:
            request.marks.append(crc32(f"{request.extra_key} {request.cache_salt}".encode()))
        for token in request.tokens[len(request.marks) - 1 : end]:
            request.marks.append(crc32(token.to_bytes(8, "little"), request.marks[-1]))
        return request.marks[1 : end + 1]

    def seen(self, request: TreeRequest) -> list[int]:
        """Positions that attention reads, ascending; AssertionError if one holds other bytes."""
        row = self.rows.req_to_token[request.kv.req_pool_idx, : request.kv.kv_allocated_len]
        positions: list[int] = row.nonzero().flatten().tolist()
        values = self.values(request, request.kv.kv_allocated_len)
        wanted = torch.tensor([values[pos] for pos in positions], dtype=torch.float64)
        for number, buffer in enumerate((*self.kv_cache.k_buffer, *self.kv_cache.v_buffer)):
            got = buffer[row[positions].long()].flatten(1)
            wrong = (got != (wanted + number)[:, None]).any(1).nonzero().flatten().tolist()
            assert not wrong, (request.rid, [positions[i] for i in wrong])
        return positions

    # -- what must add up -----------------------------------------------------------------------

    def tree_pages(self) -> list[int]:
        """Ids of the pages the tree holds, ascending; each once."""
        values = self.tree.all_values_flatten().long()
        pages: list[int] = (values[:: self.page_size] // self.page_size).sort().values.tolist()
        assert len(set(pages)) == len(pages), "a page is in the tree twice"
        return pages

    def memory(self) -> np.ndarray:
        """A copy of K and V of every page, float64 [pages + 1, ...]."""
        joined = torch.cat([*self.kv_cache.k_buffer, *self.kv_cache.v_buffer], dim=1)
        pages: np.ndarray = joined.numpy().reshape(-1, self.page_size, joined[0].numel()).copy()
        return pages

    def accounted(self) -> int:
        """SGLang's check of a busy step; equals `total` unless something leaked."""
        private = sum(
            scheduler_hooks.count_private_tokens(kv_private_tokens, request.kv, self.page_size)
            for request in self.owners()
        )
        private, _ = scheduler_hooks.count_orphans((private, 0), None)
        tree = self.tree.evictable_size() + self.tree.protected_size()
        return int(self.allocator.available_size()) + int(tree) + int(private)

    def owners(self) -> Iterator[TreeRequest]:
        """Requests with a row."""
        yield from self.running
        if self.scheduler.chunked_req is not None:
            yield self.scheduler.chunked_req

    def lock_counts(self) -> dict[int, int]:
        """Lock count by page id, from the nodes of the Python tree core."""
        assert self.core == "python", "the Rust core shows no lock counts"
        counts: dict[int, int] = {}
        nodes = list(self.tree.tree_core.root_node.children.values())
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            data = node.component_data[ComponentType.FULL]
            for slot in data.value[:: self.page_size].tolist():
                counts[slot // self.page_size] = data.lock_ref
        return counts

    def holder_counts(self) -> np.ndarray:
        """The plugin's count of holders by page id."""
        holders = self.runtime.forks.holders
        states = self.runtime.states
        holders.update(self.runtime.state_of(request) for request in self.running)
        assert holders.violations(states.values()) == []
        return np.append(holders.total, 0)
