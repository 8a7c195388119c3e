"""Names of the id spaces the core works in; one meaning each, never mixed.

    row   the request's line in the engine's `req_to_token` table
    pos   logical token position inside a request (its RoPE position)
    slot  physical token index into every K/V buffer; slot 0 is the sink, never allocated,
          so a 0 in a row means "dead"
    page  `page_size` consecutive slots, the unit the engine's allocator hands out; page 0 is
          the sink's page
    code  the table's own name of one page it holds: >= 0 for the page the engine filled at that
          place in position order ("home"), < 0 for a page filled by a repack ("packed")

Arrays of ids keep the same words: `positions`, `slots`, `pages`, `codes`.
"""

from typing import Any, Final, NewType, TypeAlias

import numpy as np
import numpy.typing as npt

Row = NewType("Row", int)
Pos = NewType("Pos", int)
Slot = NewType("Slot", int)
Page = NewType("Page", int)
Code = NewType("Code", int)
Generation = NewType("Generation", int)

Int64Array: TypeAlias = npt.NDArray[np.int64]
Int32Array: TypeAlias = npt.NDArray[np.int32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
IntArray: TypeAlias = npt.NDArray[np.integer[Any]]

SINK_PAGE: Final = Page(0)
DEAD_SLOT: Final = Slot(0)


def page_floor(length: int, page_size: int) -> int:
    """Greatest multiple of `page_size` that is not above `length` (both in tokens)."""
    return length - length % page_size


def page_count(length: int, page_size: int) -> int:
    """Pages needed for `length` tokens."""
    return -(-length // page_size)
