"""Hooks around the forward. Both run in the scheduler thread, inside `Scheduler.run_batch`; with
overlap under its `forward_stream_ctx`, without on the default stream, so the current stream is the
one that the forward is launched on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vtoken_sglang.engine.plugin.hook import CallOut, hook
from vtoken_sglang.engine.runtime.current import current

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def kv_lens_of(forward_batch: ForwardBatch, batch: ScheduleBatch) -> object:
    """Key/value lengths of a forward (`LiveLengths`); None where they are its sequence lengths."""
    runtime = current()
    if runtime is None:
        return None
    from vtoken_sglang.engine.runtime.forwards import prepare

    return prepare(runtime, forward_batch, batch)


@hook(
    after="sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
    why="attention plans with the number of live tokens, and here the requests are known last",
    remove_when="SGLang's plan separates key/value lengths from sequence lengths",
    call_out=CallOut(
        path="sglang.srt.model_executor.forward_batch_info.ForwardBatch.kv_lens_of",
        function=kv_lens_of,
    ),
)
def tell_live_lengths(
    forward_batch: ForwardBatch, _cls: type, batch: ScheduleBatch, *_args: Any, **_kwargs: Any
) -> None:
    """The lengths hang on the plan, which reaches the backend in every mode, replay included."""
    forward_batch.kv_loc_plan.kv_lens = kv_lens_of(forward_batch, batch)


def note_forward(*_args: Any, **_kwargs: Any) -> None:
    """A generation forward was launched, and its result is not copied to the host yet."""
    if (runtime := current()) is not None:
        runtime.forward_launched()


@hook(
    after="sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
    why="a copy of KV waits for the last launched forward, and for no copy of its result",
    remove_when="SGLang tells listeners that a forward was launched",
    call_out=CallOut(
        path="sglang.srt.managers.scheduler.Scheduler.forward_launched_listener",
        function=note_forward,
    ),
)
def after_launch(_result: object, *_args: Any, **_kwargs: Any) -> None:
    """The worker launched a forward."""
    note_forward()
