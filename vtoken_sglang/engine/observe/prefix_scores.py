"""Scores of cached prefixes: what the request that computed a prefix gathered on it.

A request that hits the prefix cache did not compute the queries of its prefix, so by itself it
would know less of the prefix than of its own tokens. It starts from the scores kept here.

Pages and tree nodes cannot name a prefix (they are reused after eviction), so its content does: a
chain of hashes, block by block, over token ids and everything that keeps prefixes apart in the
tree. Only the request that computed a block stores its scores; followers add nothing, so a hot
prefix does not outweigh what comes after it. Least recently used blocks go first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vtoken_sglang.core.device_work import Arriving, DeviceWork
from vtoken_sglang.engine.request_state import Watched
from vtoken_sglang.policy.base import Gather

MIN_BLOCK = 16
MAX_TOKENS = 1 << 20
"""Tokens whose scores are kept: 4 MiB of scores."""


class PrefixScores:
    """Scores per block of a prefix, host memory.

    Fields:
        block: tokens per block, a multiple of the page size.
    """

    def __init__(self, page_size: int, max_tokens: int = MAX_TOKENS) -> None:
        self.block = -(-MIN_BLOCK // page_size) * page_size
        self._most = max(1, max_tokens // self.block)
        self._blocks: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def names(self, space: str, tokens: Sequence[int], length: int) -> list[bytes]:
        """Name of each whole block of `tokens[:length]`; a name stands for all tokens up to the
        block's end and for `space` (whatever keeps equal tokens apart)."""
        ids = np.asarray(tokens[:length], dtype=np.int64)
        name = hashlib.blake2b(space.encode(), digest_size=16).digest()
        found = []
        for start in range(0, length - self.block + 1, self.block):
            part = ids[start : start + self.block].tobytes()
            name = hashlib.blake2b(name + part, digest_size=16).digest()
            found.append(name)
        return found

    def get(self, names: Sequence[bytes]) -> NDArray[np.float32]:
        """Scores of the leading blocks that are known, float32 [blocks * block]; maybe empty."""
        found = []
        for name in names:
            values = self._blocks.get(name)
            if values is None:
                break
            found.append(values)
        self._touch(names[: len(found)])
        return np.concatenate(found) if found else np.empty(0, np.float32)

    def put(self, names: Sequence[bytes], first: int, values: NDArray[np.float32]) -> None:
        """Keep the scores of the blocks from number `first` on. `values`: float32 [at least
        (len(names) - first) * block], copied."""
        for index, name in enumerate(names[first:]):
            part = values[index * self.block : (index + 1) * self.block]
            self._blocks[name] = np.array(part, np.float32)
        self._touch(names)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def _touch(self, names: Sequence[bytes]) -> None:
        """Used now. The last block first: without its head a chain is of no use to anyone, so the
        tail must go before it."""
        for name in reversed(names):
            if name in self._blocks:
                self._blocks.move_to_end(name)

    def clear(self) -> None:
        """The tree was flushed."""
        self._blocks.clear()


class PrefixScoreKeeper:
    """Takes scores out of the table when a prompt is in the cache, and puts them into the row of
    a request that hits it. Scheduler thread only."""

    def __init__(self, store: PrefixScores, work: DeviceWork) -> None:
        self.store = store
        self._work = work
        self._now = 0
        # (pass that stores it, names, first own block, scores), in that order
        self._arriving: deque[tuple[int, list[bytes], int, Arriving]] = deque()

    def begin(self, request: Any, watched: Watched, start: int, scores: torch.Tensor) -> None:
        """A request enters whose first `start` tokens were cached: add what is known of them.

        `scores`: the table, whose rows of this request are zero. Policies that do not add up over
        queries start from nothing.
        """
        observation = watched.observation
        if observation.gather not in (Gather.TOTAL, Gather.BELOW_UNIFORM):
            watched.kept = True
            return
        space = repr((observation, request.extra_key, request.cache_salt))
        tokens = [*request.origin_input_ids, *request.output_ids]
        watched.blocks = self.store.names(space, tokens, len(tokens))
        watched.first_own = -(-start // self.store.block)
        values = self.store.get(watched.blocks[: start // self.store.block])
        if not len(values):
            return
        block = (len(values) - 1) // observation.window if observation.window else 0
        if observation.gather is Gather.BELOW_UNIFORM:
            watched.block = block
        score_row = watched.score_rows[block % len(watched.score_rows)]
        known = torch.from_numpy(values)
        if scores.is_cuda:
            known = known.pin_memory()
        scores[score_row, : len(values)] = known.to(scores.device, non_blocking=True)
        watched.observed_len = len(values)

    def keep(self, request: Any, watched: Watched, scores: torch.Tensor) -> None:
        """The request's prompt has reached the tree: keep the scores of the blocks it computed."""
        names = watched.blocks[: request.kv.cache_protected_len // self.store.block]
        watched.blocks = []
        if request.skip_radix_cache_insert or watched.first_own >= len(names):
            return
        start, end = (count * self.store.block for count in (watched.first_own, len(names)))
        rows = watched.score_rows
        found = self._work.start(lambda: sum_rows(scores, rows, start, end))
        self._arriving.append((self._now + self._work.lag, names, watched.first_own, found))
        self._store_due()

    def next_pass(self) -> None:
        """An eviction pass begins: store what is due."""
        self._now += 1
        self._store_due()

    def _store_due(self) -> None:
        while self._arriving and self._arriving[0][0] <= self._now:
            _, names, first, found = self._arriving.popleft()
            self.store.put(names, first, found.take())

    def clear(self) -> None:
        """The tree was flushed: nothing is known of any prefix."""
        self._arriving.clear()
        self.store.clear()


def sum_rows(scores: torch.Tensor, rows: Sequence[int], start: int, end: int) -> torch.Tensor:
    """Scores [start, end) of a request, its rows added up; float32 [end - start], a copy."""
    return torch.stack([scores[row, start:end] for row in rows]).sum(dim=0)
