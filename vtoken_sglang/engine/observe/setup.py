"""The observer of one scheduler, wired to what the runtime knows of its requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from vtoken_sglang.core.device_work import DeviceWork
from vtoken_sglang.core.token_table import TokenTable
from vtoken_sglang.engine.observe.decode_tap import DecodeTap
from vtoken_sglang.engine.observe.observer import Observer
from vtoken_sglang.engine.observe.rotary import KeyRotation, key_rotation
from vtoken_sglang.errors import UnsupportedModeError
from vtoken_sglang.options import RequestOptions, VTokenConfig
from vtoken_sglang.policy.base import Keys, Observation
from vtoken_sglang.policy.registry import load_policy

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

FIRST_SCORE_ROWS = 16


def make_observer(
    rows: torch.Tensor,
    runner: ModelRunner,
    config: VTokenConfig,
    *,
    options_of: Callable[[Any], RequestOptions],
    table_of: Callable[[int], TokenTable | None],
    work: DeviceWork,
    page_size: int,
    tap: DecodeTap | None = None,
) -> Observer:
    """The observer of one scheduler.

    Args:
        rows: see `Observer`. runner: has the model and the KV pool of its keys.
        options_of: what holds for a request (SGLang's `Req`).
        table_of: a row's token table, None while nothing of it was evicted.
        work, page_size, tap: see `Observer`.

    Raises:
        UnsupportedModeError: the server's policy looks at keys before rotary embedding, and those
            of this model cannot be rotated back. (Requests that name such a policy are ended.)
    """
    pool = runner.token_to_kv_pool
    rotation: KeyRotation | UnsupportedModeError
    try:
        rotation = key_rotation(runner.model, len(pool.k_buffer))
    except UnsupportedModeError as error:
        if load_policy(config.policy).reads_keys is Keys.BEFORE_ROTARY:
            raise
        rotation = error

    def observation_of(request: Any) -> Observation | None:
        options = options_of(request)
        if not options.prunes or config.observe_layers == "none":
            return None
        return load_policy(options.policy).observation()

    def live_positions(row: int, length: int) -> NDArray[np.int64]:
        positions = np.arange(length, dtype=np.int64)
        table = table_of(row)
        if table is None:
            return positions
        known = min(length, table.logical_len)
        return np.concatenate(
            [positions[:known][table.alive(positions[:known])], positions[known:]]
        )

    def live_len(row: int, length: int) -> int:
        table = table_of(row)
        return length if table is None else length - table.evicted

    return Observer(
        rows=rows,
        k_buffers=list(pool.k_buffer),
        key_dtype=getattr(pool, "dtype", None),
        capacity=FIRST_SCORE_ROWS,
        observe_layers=config.observe_layers,
        observe_every=config.observe_every,
        observation_of=observation_of,
        live_positions=live_positions,
        live_len=live_len,
        seeds_of=lambda request: options_of(request).reuse_prefix_scores == "on",
        work=work,
        page_size=page_size,
        tap=tap,
        rotation=rotation,
    )
