"""How long a pruned request may become: SGLang's own clip, lifted; refused only for its prompt."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("sglang", reason="needs SGLang")

from sglang.srt.managers.scheduler import Scheduler

from tests.helpers.admission import ask, budget_of, set_lengths, waiting
from tests.helpers.fake_engine import FakeEngine, FakeRequest, MakeEngine
from vtoken_sglang.engine.hooks import admission as capacity_hooks
from vtoken_sglang.engine.hooks import scheduler as scheduler_hooks
from vtoken_sglang.options import VTokenConfig

CONTEXT = 8192


def arrives(
    sim: FakeEngine, prompt: int, new: int | None, minimum: int = 0, **options: Any
) -> FakeRequest:
    """A request as far as the queue; `to_finish` is the refusal, if it is refused."""
    request: Any = waiting(sim, "a", prompt, 0, **options)
    request.set_finish_with_abort = lambda message: setattr(request, "to_finish", message)
    parameters = request.sampling_params
    parameters.max_new_tokens, parameters.min_new_tokens = new, minimum
    capacity_hooks.lift_length(Scheduler.init_req_max_new_tokens, sim.scheduler, request)
    scheduler_hooks.keep_prompt_private(None, sim.scheduler, request)
    found: FakeRequest = request
    return found


def served(sim: FakeEngine, prompt: int, new: int | None, **options: Any) -> int:
    """Tokens it may generate."""
    request = arrives(sim, prompt, new, **options)
    assert request.to_finish is None
    return int(request.sampling_params.max_new_tokens)


def refusal(sim: FakeEngine, prompt: int, new: int | None, **options: Any) -> str:
    message = arrives(sim, prompt, new, **options).to_finish
    assert isinstance(message, str)
    return message


def named_limit(message: str) -> int:
    """Tokens of the longest prompt that a refusal says would fit."""
    found = re.search(r"a prompt of up to (\d+) tokens would fit", message)
    assert found is not None, message
    return int(found[1])


def limited(engine: MakeEngine, pool: int, chunk: int | None = 64, **options: Any) -> FakeEngine:
    sim = engine(pages=pool // 16, **options)
    set_lengths(sim, chunk, CONTEXT)
    return sim


def test_a_request_whose_budget_fits_may_outgrow_the_pool(engine: MakeEngine) -> None:
    sim = limited(engine, 512)
    assert served(sim, 100, 3000) == 3000
    assert served(sim, 3000, 100) == 100
    assert sim.runtime.statistics.outgrown_requests == 2
    for unsaid in (100_000, None):
        assert served(sim, 100, unsaid) == CONTEXT - 1 - 100 - 1  # a row's width
    sim.scheduler.max_new_tokens_limit = 700
    assert served(sim, 100, 3000) == 700


@pytest.mark.parametrize(
    ("pool", "prompt", "new", "fits"),
    [(1280, 700, 560, 559), (1280, 914, 336, 335), (4096, 3000, 2000, 1071)],
)
def test_an_answer_is_clipped_to_what_fits(
    engine: MakeEngine, pool: int, prompt: int, new: int, fits: int
) -> None:
    """Where pruning gives no more room, at what SGLang clips an unpruned request to."""
    sim = limited(engine, pool, chunk=128)
    much = {"policy": "random", "keep": 0.9}
    for options in (much, {"policy": "none"}):
        for wanted in (new, fits, None):
            assert served(sim, prompt, wanted, **options) == fits
    assert served(sim, prompt, new, policy="random", budget=128) == new
    # A minimum that the clip cannot hold goes with it; one that it can is kept.
    clipped = arrives(sim, prompt, new, minimum=new, **much)
    assert clipped.sampling_params.min_new_tokens == fits
    assert arrives(sim, prompt, new, minimum=5, **much).sampling_params.min_new_tokens == 5


def test_only_a_prompt_is_refused_and_the_longest_that_fits_is_named(engine: MakeEngine) -> None:
    sim = limited(engine, 512)
    message = refusal(sim, 600, 10, policy="random", keep=0.9)
    assert message.startswith("vtoken.keep: must leave a prompt of 600 tokens room in the 496 of")
    assert message.endswith("got 0.9")
    fit = named_limit(message)
    needed = re.search(r"needs up to (\d+) tokens at once", message)
    assert needed is not None
    assert int(needed[1]) > 496
    assert served(sim, fit, 10, policy="random", keep=0.9) > 0
    assert named_limit(refusal(sim, fit + 1, 10, policy="random", keep=0.9)) == fit
    assert refusal(sim, 600, 10, budget=600).startswith("vtoken.budget: ")
    # Nothing to answer is less to hold.
    assert served(sim, 495, 0, policy="random", keep=0.9) == 0
    assert fit < named_limit(refusal(sim, 496, 0, policy="random", keep=0.9)) == 495


@pytest.mark.parametrize(("policy", "chunk"), [("streaming_llm", None), ("snapkv", 64)])
def test_what_is_there_whole_at_some_time_does_not_outgrow_the_pool(
    engine: MakeEngine, policy: str, chunk: int | None
) -> None:
    """After a retraction prompt and output are one prompt: in one chunk, or not pruned before its
    end."""
    sim = limited(engine, 512, chunk)
    assert served(sim, 100, 3000, policy=policy) == 512 - 16 - 100
    message = refusal(sim, 1400, 10, policy=policy)
    assert message.startswith("vtoken.policy: ")
    assert "the pool must hold it whole" in message
    assert named_limit(message) == 512 - 16 - 1


@pytest.mark.parametrize(("options", "limit"), [({}, CONTEXT - 6), ({"policy": "none"}, 506)])
def test_sglangs_limit_on_prompts_is_lifted_for_those_that_fit(
    engine: MakeEngine, options: dict[str, Any], limit: int
) -> None:
    sim = limited(engine, 512)
    seen: list[int] = []
    request = arrives(sim, 3000, 10, **options)
    capacity_hooks.lift_prompt(lambda _, found, __: seen.append(found), request, 506, False)
    assert seen == [limit]


def test_a_prompt_the_tree_could_not_hold_stays_private(engine: MakeEngine) -> None:
    sim = limited(engine, 512)
    limits = sim.runtime.limits
    long, short = waiting(sim, "long", 900, 10), waiting(sim, "short", 100, 3000)
    assert limits.keeps_private(long)
    assert not limits.keeps_private(short)
    # Under auto others may hold its prompt, too, and then it is never given back.
    grows = waiting(sim, "grows", 200, 400, keep=0.4, shared="auto")
    assert limits.keeps_private(grows)
    # Nor may it lock so much of the cache that the rest finds no room.
    assert limits.longest_match(long) == 512 - 16 - 96 - 64
    assert limits.longest_match(waiting(sim, "fits", 100, 100)) is None


amounts = st.one_of(
    st.builds(lambda keep: {"keep": keep}, st.sampled_from([0.1, 0.5, 0.9, 1.0])),
    st.builds(lambda budget: {"budget": budget}, st.integers(1, 1500)),
)


@settings(max_examples=300, deadline=None)
@given(
    policy=st.sampled_from(["random", "streaming_llm", "snapkv"]),
    amount=amounts,
    sink=st.integers(0, 40),
    recent=st.integers(0, 100),
    interval=st.sampled_from([1, 16, 300]),
    shared=st.sampled_from(["skip", "mask", "cow", "auto"]),
    page_size=st.sampled_from([1, 16, 64]),
    pool=st.integers(10, 24).map(lambda pages: pages * 64),
    chunk=st.sampled_from([None, 16, 128, 4096]),
    prompt=st.integers(1, 2500),
    new=st.integers(1, 2500),
)
def test_what_is_named_is_accepted_and_one_more_is_not(
    policy: str,
    amount: dict[str, Any],
    sink: int,
    recent: int,
    interval: int,
    shared: str,
    page_size: int,
    pool: int,
    chunk: int | None,
    prompt: int,
    new: int,
) -> None:
    config = VTokenConfig(policy="random", keep=0.5)
    options = {"policy": policy, "sink": sink, "recent": recent, "interval": interval}
    options |= {"shared": shared, **amount}
    with pytest.MonkeyPatch.context() as patch:
        sim = FakeEngine(patch, config, page_size, pool // page_size)
        set_lengths(sim, chunk, CONTEXT)
        request = arrives(sim, prompt, new, **options)
        if request.to_finish is not None:
            fit = named_limit(str(request.to_finish))
            assert fit < prompt
            assert named_limit(refusal(sim, fit + 1, new, **options)) == fit
            prompt = fit
        longest = served(sim, prompt, None, **options)
        assert longest > 0
        assert longest >= served(sim, prompt, None, policy="none")
        for wanted in (new, longest, longest + 1):
            request = arrives(sim, prompt, wanted, **options)
            assert request.sampling_params.max_new_tokens == min(wanted, longest)
            assert ask(budget_of(sim), request, chunk=chunk), "an empty pool admits it"
