"""Triton kernel of `copy_slots`: K and V of every layer in one launch.

    grid = (blocks of slots) x (buffers of one row size)
    program: for its slots, row of `src` -> row of `dst`, as 16-byte words

The kernel sees bytes, so every dtype is the same kernel. The addresses of the buffers come from a
table on the device that is built once per set of buffers. Nothing waits for the host.
"""

# Arguments of a kernel are tensors to Triton, not to mypy.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

# Words that one program moves: 8 per thread at 4 warps, enough loads in flight to fill the bus.
TILE_WORDS = 1024
NUM_WARPS = 4
_WORD_TYPES = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit(do_not_specialize=["n"])
def copy_slots_kernel(
    addresses,  # in: int64 [buffers], first byte of each buffer
    src_slots,  # in: int64 [n]
    dst_slots,  # in: int64 [n]
    n,  # in: int32
    ROW_WORDS: tl.constexpr,  # words of one slot's row
    WORD: tl.constexpr,  # integer type of a word
    ALIGNMENT: tl.constexpr,  # bytes every buffer's address is a multiple of
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,  # power of two, at least ROW_WORDS
):
    address = tl.multiple_of(tl.load(addresses + tl.program_id(1)), ALIGNMENT)
    buffer = tl.multiple_of(address.to(tl.pointer_type(WORD)), ALIGNMENT)
    lane = tl.program_id(0) * BLOCK_SLOTS + tl.arange(0, BLOCK_SLOTS)
    inside = lane < n
    src = tl.load(src_slots + lane, mask=inside, other=0)
    dst = tl.load(dst_slots + lane, mask=inside, other=0)
    word = tl.arange(0, BLOCK_WORDS)
    mask = inside[:, None] & (word < ROW_WORDS)[None, :]
    # The product of a slot and the row's words is 64-bit: a pool has more than 2^31 words.
    row = tl.load(buffer + src[:, None] * ROW_WORDS + word[None, :], mask=mask)
    tl.store(buffer + dst[:, None] * ROW_WORDS + word[None, :], row, mask=mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchShape:
    """Compile-time constants of one launch.

    Fields:
        row_bytes: bytes of one slot's row.
        word_bytes: bytes of a word; two 8-byte words of one thread make a 16-byte access.
        alignment: bytes that every address and row start is a multiple of, at most 16.
        block_slots: slots of one program.
        block_words: words of a row, rounded up to a power of two.
    """

    row_bytes: int
    word_bytes: int
    alignment: int
    block_slots: int
    block_words: int

    @property
    def row_words(self) -> int:
        """Words of one slot's row."""
        return self.row_bytes // self.word_bytes

    def grid(self, buffers: int, n: int) -> tuple[int, int]:
        """Programs for `n` slots of `buffers` buffers. Slots come first: a GPU takes 2^31 - 1
        programs along the first axis and 65,535 along the others."""
        return triton.cdiv(n, self.block_slots), buffers

    def constants(self) -> dict[str, object]:
        """Values of the kernel's constexpr arguments."""
        return {
            "ROW_WORDS": self.row_words,
            "WORD": _WORD_TYPES[self.word_bytes],
            "ALIGNMENT": self.alignment,
            "BLOCK_SLOTS": self.block_slots,
            "BLOCK_WORDS": self.block_words,
        }


def launch_shape(row_bytes: int, alignment: int) -> LaunchShape:
    """Choose words and tile for rows of `row_bytes` bytes in buffers aligned to `alignment`."""
    common = min(row_bytes & -row_bytes, alignment & -alignment, 16)
    word_bytes = min(common, 8)
    block_words = triton.next_power_of_2(row_bytes // word_bytes)
    return LaunchShape(
        row_bytes=row_bytes,
        word_bytes=word_bytes,
        alignment=common,
        block_slots=max(1, TILE_WORDS // block_words),
        block_words=block_words,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Buffers of one row size. `addresses`: int64 [buffers], on their device."""

    addresses: torch.Tensor
    shape: LaunchShape


_groups_of: dict[tuple[tuple[int, int], ...], tuple[_Group, ...]] = {}


def copy_slots_triton(
    buffers: Sequence[torch.Tensor], src_slots: torch.Tensor, dst_slots: torch.Tensor
) -> None:
    """See `copy_slots`; on this stream. Buffers whose rows have the same size
    share one launch. The table of addresses is kept for as long as the process lives; it is keyed
    by the addresses, so buffers that moved get a new one.
    """
    n = src_slots.numel()
    if not n or not buffers:
        return
    key = tuple((buffer.data_ptr(), _row_bytes(buffer)) for buffer in buffers)
    groups = _groups_of.get(key)
    if groups is None:
        groups = _groups_of[key] = _build_groups(buffers)
    for group in groups:
        copy_slots_kernel[group.shape.grid(group.addresses.numel(), n)](
            group.addresses, src_slots, dst_slots, n, num_warps=NUM_WARPS, **group.shape.constants()
        )


def warm_up(buffers: Sequence[torch.Tensor]) -> None:
    """Compile the variant for these buffers, so that no request waits for it. Copies slot 0, which
    engines keep for padding, to itself."""
    slot = torch.zeros(1, dtype=torch.int64, device=buffers[0].device)
    copy_slots_triton(buffers, slot, slot)


def _row_bytes(buffer: torch.Tensor) -> int:
    return buffer.stride(0) * buffer.element_size()


def _build_groups(buffers: Sequence[torch.Tensor]) -> tuple[_Group, ...]:
    by_size: dict[int, list[int]] = {}
    for index, buffer in enumerate(buffers):
        if not buffer.is_contiguous():
            raise ValueError(
                f"buffers: contiguous, got strides {buffer.stride()} for shape "
                f"{tuple(buffer.shape)} at {index}"
            )
        by_size.setdefault(_row_bytes(buffer), []).append(buffer.data_ptr())
    device = buffers[0].device
    groups = []
    for row_bytes, addresses in by_size.items():
        alignment = min(16, *(address & -address for address in addresses))
        table = torch.tensor(addresses, dtype=torch.int64, device=device)
        groups.append(_Group(addresses=table, shape=launch_shape(row_bytes, alignment)))
    if device.type == "cuda":
        # Once per set of buffers: later launches may be on any stream.
        torch.cuda.current_stream(device).synchronize()
    return tuple(groups)
