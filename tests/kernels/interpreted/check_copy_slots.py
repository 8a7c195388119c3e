"""`copy_slots` in Triton against its reference: dtypes, row sizes, mixed buffers, odd counts."""

from __future__ import annotations

import pytest
import torch

from vtoken_sglang.kernels.copy_slots import triton as triton_copy_slots
from vtoken_sglang.kernels.copy_slots.reference import copy_slots_reference
from vtoken_sglang.kernels.copy_slots.triton import copy_slots_triton, launch_shape, warm_up

DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
]
# (kv_heads, key dim, value dim); rows of 24 bytes and of 6 take smaller words.
HEADS = [(8, 128, 128), (3, 64, 64), (1, 16, 16), (2, 24, 16), (3, 2, 2), (5, 80, 96)]


def random_bytes(
    num_slots: int, heads: int, dim: int, dtype: torch.dtype, seed: int
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size()
    shape = (num_slots, heads, dim * size)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).view(dtype)


def slots_of(num_slots: int, n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    order = torch.randperm(num_slots, generator=torch.Generator().manual_seed(seed))
    return order[:n].clone(), order[n : 2 * n].clone()


def check(buffers: list[torch.Tensor], n: int, seed: int = 0) -> None:
    expected = [buffer.view(torch.uint8).clone() for buffer in buffers]
    src, dst = slots_of(buffers[0].shape[0], n, seed)
    copy_slots_reference(expected, src, dst)
    copy_slots_triton(buffers, src, dst)
    for buffer, wanted in zip(buffers, expected, strict=True):
        assert torch.equal(buffer.view(torch.uint8), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_every_layer_in_one_call(dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
    kv_heads, key_dim, value_dim = heads
    keys = [random_bytes(64, kv_heads, key_dim, dtype, seed) for seed in range(3)]
    values = [random_bytes(64, kv_heads, value_dim, dtype, 10 + seed) for seed in range(3)]
    check([*keys, *values], 13)


@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 31])
def test_counts_around_the_block(n: int) -> None:
    check([random_bytes(64, 8, 16, torch.bfloat16, 1)], n, seed=n)


def test_nothing_to_copy() -> None:
    buffer = random_bytes(8, 2, 16, torch.float32, 1)
    before = buffer.clone()
    empty = torch.empty(0, dtype=torch.int64)
    copy_slots_triton([buffer], empty, empty)
    copy_slots_triton([], empty, empty)
    assert torch.equal(buffer, before)


def test_warm_up_prepares_these_buffers_and_changes_nothing() -> None:
    buffers = [random_bytes(8, heads, 16, torch.bfloat16, heads) for heads in (1, 2, 2)]
    before = [buffer.view(torch.uint8).clone() for buffer in buffers]
    warm_up(buffers)
    assert (
        tuple((each.data_ptr(), each[0].nbytes) for each in buffers) in triton_copy_slots._groups_of
    )
    for buffer, bytes_before in zip(buffers, before, strict=True):
        assert torch.equal(buffer.view(torch.uint8), bytes_before)


def test_offsets_beyond_32_bits() -> None:
    """A row of an odd size is moved in 1-byte words: more than 2^31 of them lie before it."""
    buffer = torch.empty(3_000_000, 1, 1023, dtype=torch.uint8)
    src, dst = torch.tensor([2_900_001]), torch.tensor([2_900_003])
    buffer[2_900_001], buffer[2_900_003] = 7, 0
    copy_slots_triton([buffer], src, dst)
    assert int(buffer[2_900_003].min()) == 7


def test_buffers_that_start_anywhere() -> None:
    storage = random_bytes(65, 1, 96, torch.uint8, 3).view(-1)
    check(
        [storage[1 : 1 + 64 * 96].view(64, 1, 96), storage[8 : 8 + 64 * 96].view(64, 1, 96)][:1], 9
    )


def test_not_contiguous_is_refused() -> None:
    buffer = torch.zeros(8, 4, 16).transpose(1, 2)
    slots = torch.tensor([1])
    with pytest.raises(ValueError, match="contiguous"):
        copy_slots_triton([buffer], slots, slots + 1)


@pytest.mark.parametrize(
    ("row_bytes", "alignment", "word", "common"),
    [(2048, 512, 8, 16), (24, 512, 8, 8), (6, 512, 2, 2), (2048, 1, 1, 1), (16, 16, 8, 16)],
)
def test_words_fit_rows_and_addresses(
    row_bytes: int, alignment: int, word: int, common: int
) -> None:
    shape = launch_shape(row_bytes, alignment)
    assert (shape.word_bytes, shape.alignment) == (word, common)
    assert shape.row_words * shape.word_bytes == row_bytes


@pytest.mark.parametrize("row_bytes", [128, 2048, 4096, 8192, 16384])
def test_any_number_of_slots_fits_a_launch(row_bytes: int) -> None:
    """A GPU takes 65,535 programs along all but the first axis; a fork copies a whole prefix."""
    first, second = launch_shape(row_bytes, 256).grid(2 * 80, 4_000_000)
    assert second == 2 * 80
    assert first * launch_shape(row_bytes, 256).block_slots >= 4_000_000
    assert first < 2**31
