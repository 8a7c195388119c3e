"""The truth about a few requests, in plain dicts: what the core must agree with at any moment."""

from dataclasses import dataclass, field

import numpy as np

from tests.helpers.marked_rows import MarkedRows


@dataclass
class ShadowRequest:
    """One request.

    Fields:
        record: identity token of the request.
        generation: of its row.
        protected: tree-owned positions; their pages are `tree_pages`, with the hashes of their
            slots, never to change.
        length: positions with a slot.
        alive: position -> hash of the bytes the engine wrote for it.
        opened: whether something of it was ever evicted.
    """

    record: object
    generation: int
    protected: int
    length: int
    alive: dict[int, bytes]
    opened: bool = False
    tree_pages: list[int] = field(default_factory=list)
    tree_hashes: dict[int, list[bytes]] = field(default_factory=dict)


@dataclass
class ShadowModel:
    """All requests, and pages held by someone else.

    Fields:
        requests: by row.
        others: page -> hashes of its slots; a neighbour's memory, never to change.
    """

    memory: MarkedRows
    requests: dict[int, ShadowRequest] = field(default_factory=dict)
    others: dict[int, list[bytes]] = field(default_factory=dict)

    def private_row_pages(self, row: int) -> list[int]:
        """Private pages of a row nothing was evicted from: by its page starts."""
        request = self.requests[row]
        size = self.memory.page_size
        entries = self.memory.rows[row, request.protected : request.length : size].numpy()
        return (entries // size).tolist()

    def other_pages(self) -> np.ndarray:
        """Pages that are neither free nor the core's: tree, neighbours, unpruned rows."""
        pages = list(self.others)
        for row, request in self.requests.items():
            pages += request.tree_pages
            if not request.opened:
                pages += self.private_row_pages(row)
        return np.array(pages, np.int64)

    def differences(self) -> list[str]:
        """Where memory, read the way attention reads it, is not what the engine wrote."""
        found: list[str] = []
        for row, request in self.requests.items():
            seen = self.memory.live(row, request.length)
            if seen != request.alive:
                lost = sorted(set(request.alive) - set(seen))
                risen = sorted(set(seen) - set(request.alive))
                both = set(seen) & set(request.alive)
                wrong = sorted(p for p in both if seen[p] != request.alive[p])
                found.append(f"row {row}: lost {lost}, risen {risen}, wrong bytes {wrong}")
        kept = dict(self.others)
        for request in self.requests.values():
            kept |= {page: request.tree_hashes[page] for page in request.tree_pages}
        for page, hashes in kept.items():
            if self.memory.page_digests(page) != hashes:
                found.append(f"page {page} of the tree or a neighbour was overwritten")
        return found
