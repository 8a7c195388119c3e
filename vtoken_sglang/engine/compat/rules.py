"""The two tables: what is refused, and what looks close to it and is let through on purpose."""

from __future__ import annotations

from vtoken_sglang.engine.compat.rule import Allowed, Rule
from vtoken_sglang.engine.compat.rules_engine import ENGINE_RULES
from vtoken_sglang.engine.compat.rules_kv import KV_RULES
from vtoken_sglang.engine.compat.triggers import ask

FLAG_RULES: tuple[Rule, ...] = ENGINE_RULES + KV_RULES
"""Every refused server argument. Order is the order of the message and of the table."""


ALLOWED: tuple[Allowed, ...] = (
    Allowed(
        flag="--disable-radix-cache",
        why="same cache class with its tree off; every page is private",
        asks=(ask("--disable-radix-cache"),),
    ),
    Allowed(
        flag="--enable-mixed-chunk, --chunked-prefill-size",
        why="lengths are substituted per request, whatever the batch holds",
        asks=(ask("--enable-mixed-chunk --chunked-prefill-size 64"),),
    ),
    Allowed(
        flag="--disable-overlap-schedule",
        why="same safe point in both event loops",
        asks=(ask("--disable-overlap-schedule"),),
    ),
    Allowed(
        flag="--page-size",
        why="any size",
        asks=(ask("--page-size 16"),),
    ),
    Allowed(
        flag="--dp-size",
        why="schedulers are independent; each prunes its own requests",
        asks=(ask("--dp-size 2"),),
    ),
    Allowed(
        flag="--enable-priority-scheduling",
        why="preemption releases a request as retraction does",
        asks=(ask("--enable-priority-scheduling"),),
    ),
    Allowed(
        flag="--grammar-backend",
        why="structured output works on token ids, not on KV",
        asks=(ask("--grammar-backend xgrammar"),),
    ),
    Allowed(
        flag="--enable-return-hidden-states, --enable-return-aux-hidden-states",
        why="they come from the forward, not from KV",
        asks=(
            ask("--enable-return-hidden-states"),
            ask("--speculative-algorithm EAGLE3 --enable-return-aux-hidden-states"),
        ),
    ),
    Allowed(
        flag="--enable-lora, --lora-paths",
        why="adapters change weights, and the prefix cache keeps them apart; not covered by tests",
        asks=(ask("--enable-lora --max-lora-rank 8 --lora-target-modules all"),),
    ),
    Allowed(
        flag="--kv-events-config",
        why="events come from the prefix cache, which never holds pruned KV",
        asks=(ask("--kv-events-config {}"),),
    ),
    Allowed(
        flag="--radix-eviction-policy",
        why="eviction orders whole tree nodes; pruned KV is never among them",
        asks=(ask("--radix-eviction-policy lfu"),),
    ),
    Allowed(
        flag="sessions without --enable-streaming-session",
        why="each turn is a plain request that matches the prefix cache",
    ),
)
"""Decided and let through. Everything else of SGLang that no rule names is let through untested."""
