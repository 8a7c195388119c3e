"""How SGLang's FlashInfer and Triton backends come to read live tokens only.

Both compute their plan from a batch's lengths and from one index list per row. So two
substitutions are enough, and the rest of each backend stays stock:

  lengths   the backend's metadata is made from a view of the batch whose sequence and prefix
            lengths are the live ones (`live_view`). Query lengths, causal offsets (their
            difference) and everything host and device must agree on follow. RoPE positions were
            computed before, from the logical lengths.
  lists     `KVIndexTranslator.pack_read_stream` walks a row to its *logical* length and keeps
            the live entries (`LiveReads`).

A batch whose plan carries no live lengths takes the stock path of both.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.kv_loc_plan import IdSpaceKind, KVLocPlan

from vtoken_sglang.engine.attention.live_lengths import live_lengths
from vtoken_sglang.errors import UnsupportedModeError
from vtoken_sglang.kernels.pack_live import pack_live

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def live_view(forward_batch: ForwardBatch) -> ForwardBatch:
    """The batch with live lengths in place of logical ones; itself if its plan carries none.

    Lanes past the plan's (padding of a captured graph) keep the length they have.
    """
    live = live_lengths(forward_batch.kv_loc_plan)
    if live is None:
        return forward_batch
    view = copy.copy(forward_batch)
    view.seq_lens = _with_padding(live.lens, forward_batch.seq_lens)
    if forward_batch.seq_lens_cpu is not None:
        assert live.lens_cpu is not None, "measured from this batch's host lengths"
        view.seq_lens_cpu = _with_padding(live.lens_cpu, forward_batch.seq_lens_cpu)
        view.seq_lens_sum = int(view.seq_lens_cpu.sum())
    if live.prefix_lens is not None and live.prefix_lens_cpu is not None:
        view.extend_prefix_lens = live.prefix_lens.to(torch.int32)
        view.extend_prefix_lens_cpu = live.prefix_lens_cpu.tolist()
    return view


def _with_padding(lens: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
    """`lens` for the first lanes, then what `padded` has for the others."""
    real = lens.shape[0]
    if padded.shape[0] == real:
        return lens
    return torch.cat([lens.to(padded.dtype), padded[real:]])


class LiveReads:
    """Stands in for `pack_read_stream` of one translator.

    Fields:
        translator: the runner's; its rows are read.
    """

    def __init__(self, translator: KVIndexTranslator) -> None:
        self.translator = translator
        self._stock = translator.pack_read_stream

    def pack_read_stream(
        self,
        plan: KVLocPlan,
        *,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        indptr: torch.Tensor,
        out: torch.Tensor,
        kv_start_idx: torch.Tensor | None = None,
        kind: IdSpaceKind = IdSpaceKind.FULL,
        token_mapping: torch.Tensor | None = None,
        **options: Any,
    ) -> bool:
        """Fill `out`'s CSR lists with the slots to read. Arguments as in SGLang; `seq_lens` are
        live lengths of the whole sequences or of their prefixes."""
        if live_lengths(plan) is None:
            return self._stock(
                plan,
                req_pool_indices=req_pool_indices,
                seq_lens=seq_lens,
                indptr=indptr,
                out=out,
                kv_start_idx=kv_start_idx,
                kind=kind,
                token_mapping=token_mapping,
                **options,
            )
        if kv_start_idx is not None or kind is not IdSpaceKind.FULL or token_mapping is not None:
            raise UnsupportedModeError(
                "sliding-window or cross attention",
                "it reads part of a row, and a row with evicted tokens has no offsets",
                "serve this model without vtoken",
            )
        rows = self.translator.req_to_token
        spans = _with_padding(plan.seq_lens, seq_lens)
        max_span = rows.shape[1]
        if plan.seq_lens_cpu is not None:
            max_span = min(max_span, int(plan.seq_lens_cpu.max()))
        pack_live(rows, req_pool_indices, spans, indptr, out, max_span=max_span)
        return False


def has_live_reads(translator: KVIndexTranslator) -> bool:
    """Whether `install_live_reads` was done on this translator."""
    return isinstance(getattr(translator.pack_read_stream, "__self__", None), LiveReads)


def install_live_reads(translator: KVIndexTranslator, slots_dtype: torch.dtype) -> None:
    """Make a runner's translator pack live lists. Twice is once.

    The instance is changed, not the class: its backends hold this very object, and SGLang
    verifies that they do. On a GPU the kernels are compiled here, before the first request.

    Args:
        translator: the runner's.
        slots_dtype: dtype of the lists that the backend asks for.

    Raises:
        UnsupportedModeError: the translator maps virtual ids, which rows with evicted entries do
            not go through.
    """
    if has_live_reads(translator):
        return
    if translator.is_translating:
        raise UnsupportedModeError(
            "unified memory pool",
            "its rows hold virtual ids that are translated page by page",
            "drop --enable-unified-memory",
        )
    rows = translator.req_to_token
    if rows.is_cuda:
        from vtoken_sglang.kernels.pack_live.triton import warm_up

        warm_up(rows, slots_dtype)
    translator.pack_read_stream = LiveReads(translator).pack_read_stream


class LiveMetadata:
    """Mixin for a stock backend (put it first): metadata from live lengths."""

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan an eager forward."""
        super().init_forward_metadata(live_view(forward_batch))  # type: ignore[misc]

    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Plan a forward whose graph is captured or replayed next."""
        super().init_forward_metadata_out_graph(  # type: ignore[misc]
            live_view(forward_batch), in_capture
        )


def refuse_model(present: dict[str, bool], remedy: str = "serve this model without vtoken") -> None:
    """Raise UnsupportedModeError for the first feature of a model that is present."""
    for feature, found in present.items():
        if found:
            raise UnsupportedModeError(feature, "live lists do not cover it", remedy)
