"""A real worker thread beside the scheduler: copies in pieces, rows that end meanwhile, pages that
are reused at once. Every live token is read back after every step."""

import time
from collections.abc import Sequence

import numpy as np
import torch

from tests.helpers.marked_rows import MarkedRows
from vtoken_sglang.core.copy_engine import ThreadCopyEngine
from vtoken_sglang.core.reclaimer import Reclaimer
from vtoken_sglang.core.rows import RequestRows
from vtoken_sglang.core.types import Generation, ReclaimSettings, Row
from vtoken_sglang.kernels.copy_slots import copy_slots


def copy_in_pieces(
    buffers: Sequence[torch.Tensor], src_slots: torch.Tensor, dst_slots: torch.Tensor
) -> None:
    for start in range(0, len(src_slots), 8):
        copy_slots(buffers, src_slots[start : start + 8], dst_slots[start : start + 8])
        time.sleep(0.0005)


def test_worker_beside_the_scheduler() -> None:
    random = np.random.default_rng(11)
    memory = MarkedRows(page_size=4, pages=150, width=256)
    copier = ThreadCopyEngine(copy_in_pieces)
    reclaimer = Reclaimer(
        rows=RequestRows(memory.rows),
        buffers=memory.buffers,
        pool=memory.pool,
        copier=copier,
        settings=ReclaimSettings(check=True, hysteresis=0.0),
    )
    alive: dict[int, dict[int, bytes]] = {}
    lengths: dict[int, int] = {}
    committed = abandoned = 0
    for step in range(500):
        for row in (1, 2, 3, 4):
            if row not in lengths:
                length = int(random.integers(20, 120))
                if not memory.grow(row, 0, length):
                    continue
                reclaimer.open(Row(row), Generation(step), None, 0, length)
                lengths[row], alive[row] = length, memory.live(row, length)
            elif random.random() < 0.03:
                abandoned += Row(row) in reclaimer.copies.pending
                memory.rows[row] = 0
                memory.pool.release(reclaimer.close(Row(row)))
                del lengths[row], alive[row]
            elif lengths[row] < 250 and memory.grow(row, lengths[row], lengths[row] + 1):
                lengths[row] += 1
                reclaimer.sync_new_tokens(Row(row), lengths[row])
                pos = lengths[row] - 1
                alive[row][pos] = memory.digests([int(memory.rows[row, pos])])[0]
        for row, length in lengths.items():
            open_start = (length - 1) // 4 * 4
            evicted = np.flatnonzero(random.random(open_start) < 0.03)
            reclaimer.evict_tokens(Row(row), evicted)
            for pos in evicted.tolist():
                alive[row].pop(pos, None)
        sealed = {Row(row): (length - 1) // 4 * 4 for row, length in lengths.items()}
        committed += reclaimer.step(sealed_upto=sealed, pressure=step % 3 == 0).committed
        for row, length in lengths.items():
            assert memory.live(row, length) == alive[row]
        other = np.zeros(0, np.int64)
        free = memory.pool.free_array()
        assert reclaimer.violations(free, other_pages=other, total_pages=150) == []
    assert reclaimer.settle(10.0).held_pages == 0
    assert committed > 10
    assert abandoned > 0
