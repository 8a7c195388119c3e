"""Random operation sequences against a dict-based shadow model.

Requests start (with and without a tree-owned prefix), grow, lose tokens, finish, abort, retract;
copies are late, partial, torn, lost or fail; requests end under a copy, plans go stale; a neighbour
takes and returns pages. After every single operation: each live token's bytes, read through the
row, are the ones the engine wrote for it; evicted tokens stay evicted; nobody else's page changed;
`violations()` is empty; every page of the pool is accounted for exactly once.
"""

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.core.fuzz_machine import CoreMachine, counted, events

OPERATIONS_PER_PAGE_SIZE = 7000
STEPS = 70


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_fuzz(page_size: int) -> None:
    machine = type(f"CoreMachine{page_size}", (CoreMachine,), {"page_size": page_size})
    counted[page_size] = 0
    for round_seed in range(40):
        run = seed(round_seed)(machine)
        run_state_machine_as_test(
            run,
            settings=settings(
                max_examples=20,
                stateful_step_count=STEPS,
                deadline=None,
                database=None,
                phases=(Phase.generate, Phase.shrink),
                suppress_health_check=list(HealthCheck),
            ),
        )
        if counted[page_size] >= OPERATIONS_PER_PAGE_SIZE:
            break
    assert counted[page_size] >= OPERATIONS_PER_PAGE_SIZE


def test_fuzz_reached_everything() -> None:
    """Runs after the three above: at least 20,000 operations, and no kind of event was missed."""
    if not all(counted.values()):
        pytest.skip("needs the fuzz of every page size in the same session")
    assert sum(counted.values()) >= 20_000
    assert all(count > 10 for count in events.values()), events
