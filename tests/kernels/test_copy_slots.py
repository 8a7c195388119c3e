import pytest
import torch

from vtoken_sglang.kernels.copy_slots import copy_slots
from vtoken_sglang.kernels.copy_slots.cpu import copy_slots_cpu
from vtoken_sglang.kernels.copy_slots.reference import copy_slots_reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.uint8]


def buffers_of(dtype: torch.dtype, slots: int = 480) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(slots, 3, 8), (slots, 1, 5)]
    return [
        torch.randint(
            0, 256, (*s[:2], s[2] * dtype.itemsize), dtype=torch.uint8, generator=generator
        )
        .view(dtype)
        .clone()
        for s in shapes
    ]


@pytest.mark.parametrize("copy", [copy_slots, copy_slots_cpu, copy_slots_reference])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", ["scattered", "runs", "one", "descending", "long", "two_runs"])
def test_is_the_plain_loop_byte_for_byte(copy, dtype: torch.dtype, pattern: str) -> None:  # type: ignore[no-untyped-def]
    source = {
        "scattered": [7, 3, 19, 1, 30, 5],
        "runs": [4, 5, 6, 7, 16, 17, 18, 19],
        "one": [9],
        "descending": [12, 11, 10, 9],
        "long": list(range(3, 153, 2)),
        "two_runs": list(range(200, 0, -1)),
    }[pattern]
    src = torch.tensor(source)
    dst = torch.arange(240, 240 + len(source))
    if pattern == "two_runs":
        dst[90:] += 30
    if pattern == "scattered":
        dst = torch.tensor([250, 241, 263, 232, 245, 260])
    buffers = buffers_of(dtype)
    expected = [buffer.view(torch.uint8).clone() for buffer in buffers]
    for old in expected:
        for i in range(len(src)):
            old[dst[i]] = old[src[i]]
    copy(buffers, src, dst)
    for buffer, old in zip(buffers, expected, strict=True):
        assert buffer.view(torch.uint8).equal(old)


def test_a_buffer_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        copy_slots([torch.zeros(8, 4, 4).transpose(1, 2)], torch.tensor([1]), torch.tensor([2]))


def test_nothing_to_copy() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    copy_slots(buffers_of(torch.float32), empty, empty)
    copy_slots([], torch.tensor([1]), torch.tensor([2]))


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (torch.tensor([1], dtype=torch.int32), torch.tensor([2])),
        (torch.tensor([1]), torch.tensor([2.0])),
        (torch.tensor([[1]]), torch.tensor([[2]])),
        (torch.tensor([1, 2]), torch.tensor([3])),
        (torch.tensor([1]), torch.tensor([2], device="meta")),
    ],
)
def test_bad_slots_are_refused(src: torch.Tensor, dst: torch.Tensor) -> None:
    with pytest.raises(ValueError):
        copy_slots(buffers_of(torch.float32), src, dst)
