"""The observer of one scheduler, over the model and the pools that SGLang built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vtoken_sglang.core.device_work import DeviceWork
from vtoken_sglang.engine.observe.decode_tap import current_tap
from vtoken_sglang.engine.observe.observer import Observer
from vtoken_sglang.engine.observe.rotary import key_rotation_or_reason
from vtoken_sglang.options import VTokenConfig
from vtoken_sglang.policy.base import Keys
from vtoken_sglang.policy.registry import load_policy

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler


def make_observer(scheduler: Scheduler, config: VTokenConfig, work: DeviceWork) -> Observer:
    """Watch the scheduler's requests. `work`: where sums and selections are started.

    Raises:
        UnsupportedModeError: the server's policy looks at keys before rotary embedding, and those
            of this model cannot be rotated back. (Requests that name such a policy are ended.)
    """
    allocator = scheduler.token_to_kv_pool_allocator
    pool = allocator.get_kvcache()
    policy = load_policy(config.policy, config.policy_args)
    rotation = key_rotation_or_reason(
        scheduler.tp_worker.model_runner.model,
        len(pool.k_buffer),
        required=policy.reads_keys is Keys.BEFORE_ROTARY,
    )
    return Observer(
        rows=scheduler.req_to_token_pool.req_to_token,
        k_buffers=list(pool.k_buffer),
        key_dtype=getattr(pool, "dtype", None),
        rotation=rotation,
        observe_layers=config.observe_layers,
        observe_every=config.observe_every,
        work=work,
        page_size=allocator.page_size,
        tap=current_tap(),
    )
