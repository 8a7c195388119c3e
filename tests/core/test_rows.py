import numpy as np
import pytest
import torch

from vtoken_sglang.core.commit import row_hashes
from vtoken_sglang.core.rows import RequestRows
from vtoken_sglang.core.types import Row
from vtoken_sglang.errors import InvariantError


def both_paths() -> list[RequestRows]:
    """The direct path of host tensors, and the path device tensors take."""
    made = [RequestRows(torch.arange(40, dtype=torch.int32).view(4, 10).clone()) for _ in range(2)]
    made[1]._host = None
    return made


def test_reads_and_writes_agree_on_both_paths() -> None:
    for rows in both_paths():
        assert rows.read(Row(1), 2, 9, 3).tolist() == [12, 15, 18]
        where = np.array([0, 3]), np.array([9, 1])
        assert rows.gather(*where).tolist() == [9, 31]
        where = np.array([1, 3]), np.array([9, 1])
        rows.write(*where, np.array([70, 71]))
        assert rows.gather(*where).tolist() == [70, 71]
        rows.write(*where, np.array([19, 31]))
        rows.zero(Row(2), np.array([0, 5]))
        assert rows.tensor[2].tolist() == [0, 21, 22, 23, 24, 0, 26, 27, 28, 29]
        assert rows.tensor[1].tolist() == list(range(10, 20))
        assert len(rows) == 4


def test_only_an_int32_table_is_taken() -> None:
    with pytest.raises(InvariantError, match="int32"):
        RequestRows(torch.zeros(4, 10, dtype=torch.int64))
    with pytest.raises(InvariantError):
        RequestRows(torch.zeros(40, dtype=torch.int32))


@pytest.mark.parametrize("shape", [(8, 2, 4), (8, 1, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_hashes_tell_any_byte_and_any_buffer_apart(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    buffers = [torch.randint(0, 200, shape, generator=generator).to(dtype) for _ in range(3)]
    slots = np.arange(8)
    before = row_hashes(buffers, slots)
    assert len(set(before.tolist())) == 8
    assert row_hashes(buffers, slots[::-1].copy()).tolist() == before.tolist()[::-1]
    buffers[1].view(torch.uint8).view(8, -1)[5, -1] ^= 1
    changed = (row_hashes(buffers, slots) != before).tolist()
    assert changed == [slot == 5 for slot in range(8)]
    swapped = row_hashes([buffers[1], buffers[0], buffers[2]], slots)
    assert (swapped != row_hashes(buffers, slots)).all()


def test_hashes_of_nan_are_equal_for_equal_bytes() -> None:
    buffer = torch.full((4, 1, 4), float("nan"))
    hashes = row_hashes([buffer], np.arange(4))
    assert len(set(hashes.tolist())) == 1
