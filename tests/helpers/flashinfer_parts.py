"""Parts of the FlashInfer stand-in: contract checks, paged lists, plain attention of one lane."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

LOG2_E = 1 / math.log(2)
Pool = tuple[torch.Tensor, torch.Tensor]


class StandInError(AssertionError):
    """FlashInfer would have refused this, or silently computed something else."""


def require(condition: bool, message: str) -> None:
    """Raise StandInError with `message` unless `condition` holds."""
    if not condition:
        raise StandInError(message)


def as_dtype(value: str | torch.dtype | None) -> torch.dtype | None:
    return getattr(torch, value) if isinstance(value, str) else value


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    causal: bool,
    sm_scale: float,
    logits_soft_cap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One lane: (output [queries, heads, dim] float32, base-2 lse [queries, heads] float32)."""
    own, q_heads = q.shape[:2]
    repeat = q_heads // keys.shape[1]
    keys = keys.float().repeat_interleave(repeat, dim=1)
    values = values.float().repeat_interleave(repeat, dim=1)
    logits = torch.einsum("qhd,khd->hqk", q.float(), keys) * sm_scale
    if logits_soft_cap:
        logits = logits_soft_cap * torch.tanh(logits / logits_soft_cap)
    if causal:
        last_seen = torch.arange(own)[:, None] + keys.shape[0] - own
        logits = logits.masked_fill(torch.arange(keys.shape[0])[None, :] > last_seen, -torch.inf)
    lse = logits.logsumexp(dim=-1)
    weights = torch.exp(logits - lse[..., None]).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, values), lse.T * LOG2_E


class Wrapper:
    """What the three wrappers share."""

    def __init__(
        self, workspace: torch.Tensor, kv_layout: str, use_cuda_graph: bool, backend: str
    ) -> None:
        require(workspace.dtype == torch.uint8, "workspace: uint8")
        require(kv_layout == "NHD", f"kv_layout: the pool is NHD, got {kv_layout}")
        require(backend in ("auto", "fa2", "cutlass"), f"backend: got {backend}")
        self._use_cuda_graph = use_cuda_graph
        self._sizes: tuple[int, int, int] | None = None
        self._q_dtype: torch.dtype | None = None
        self._kv_dtype: torch.dtype | None = None
        self.causal = False
        self.options: dict[str, float | None] = {}
        self.plans: list[dict[str, Any]] = []

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def note(self, q_heads: int, kv_heads: int, dim: int, q_dtype: Any, kv_dtype: Any) -> None:
        self._sizes = (q_heads, kv_heads, dim)
        self._q_dtype, self._kv_dtype = as_dtype(q_dtype), as_dtype(kv_dtype)
        if self._kv_dtype is None:
            self._kv_dtype = self._q_dtype

    def remember(
        self,
        causal: bool,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        window_left: int = -1,
    ) -> None:
        """Options of a `forward`, which FlashInfer keeps until the run."""
        require(window_left == -1, "no sliding window")
        self.causal = causal
        self.options = {"logits_soft_cap": logits_soft_cap, "sm_scale": sm_scale}

    def check_run(self, q: torch.Tensor, keys: torch.Tensor) -> None:
        require(self._sizes is not None, "run before plan")
        sizes = (q.shape[-2], keys.shape[-2], q.shape[-1])
        require(sizes == self._sizes, f"planned for {self._sizes} heads and dim, run with {sizes}")
        dtypes = (q.dtype, keys.dtype)
        planned = (self._q_dtype, self._kv_dtype)
        require(dtypes == planned, f"planned for {planned}, run with {dtypes}")


class PagedLists:
    """Page lists of a plan, in the buffers the kernel reads, beside what the host planned with."""

    def __init__(self, use_cuda_graph: bool, buffers: Sequence[torch.Tensor | None]) -> None:
        self.captured = use_cuda_graph
        self.buffers = list(buffers)
        if use_cuda_graph:
            require(all(buffer is not None for buffer in buffers), "a graph needs all buffers")
            self.addresses = [buffer.data_ptr() for buffer in self.buffers]  # type: ignore[union-attr]
        self.host_indptr: torch.Tensor | None = None
        self.page_size = 1

    def set(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        page_size: int,
        host_indptr: torch.Tensor | None,
        *,
        copies: bool,
    ) -> None:
        """Take a plan. `copies`: into the captured buffers, as `plan` does; else they were
        written by the caller, as `fast_decode_plan` assumes."""
        given = (indptr, indices, last_page_len)
        if not self.captured:
            self.buffers = list(given)
        else:
            require(len(indices) <= len(self.buffers[1]), "indices: longer than their buffer")
            lanes = len(self.buffers[2])
            require(len(last_page_len) == lanes, f"a graph of {lanes} lanes: {len(last_page_len)}")
            if copies:
                for buffer, value in zip(self.buffers, given, strict=True):
                    buffer[: len(value)].copy_(value)
            addresses = [buffer.data_ptr() for buffer in self.buffers]
            require(addresses == self.addresses, "a captured buffer was replaced")
        require(indptr.dtype == torch.int32, f"indptr: int32, got {indptr.dtype}")
        require(indices.dtype == torch.int32, f"indices: int32, got {indices.dtype}")
        self.page_size = page_size
        self.host_indptr = (indptr if host_indptr is None else host_indptr).clone()
        require(self.host_indptr.device.type == "cpu", "the host indptr is on the host")

    def lanes(self, pool: Pool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of each lane, read through the device buffers."""
        indptr, indices, last_page_len = self.buffers
        device_indptr = indptr[: len(self.host_indptr)]
        require(
            device_indptr.tolist() == self.host_indptr.tolist(),
            f"host indptr {self.host_indptr.tolist()}, device indptr {device_indptr.tolist()}",
        )
        keys, values = (self._paged(buffer) for buffer in pool)
        found = []
        for lane in range(len(self.host_indptr) - 1):
            begin, end = device_indptr[lane : lane + 2].tolist()
            pages = indices[begin:end].long()
            length = (end - begin - 1) * self.page_size + int(last_page_len[lane])
            length = length if end > begin else 0
            found.append((keys[pages].flatten(0, 1)[:length], values[pages].flatten(0, 1)[:length]))
        return found

    def _paged(self, buffer: torch.Tensor) -> torch.Tensor:
        if buffer.dim() == 3:
            buffer = buffer.unsqueeze(1)
        require(
            buffer.shape[1] == self.page_size,
            f"planned for pages of {self.page_size}, the pool is in pages of {buffer.shape[1]}",
        )
        return buffer


def split_queries(tokens: torch.Tensor, indptr: list[int]) -> list[torch.Tensor]:
    require(indptr[-1] == len(tokens), f"planned {indptr[-1]} tokens, run with {len(tokens)}")
    return [tokens[first:last] for first, last in zip(indptr, indptr[1:], strict=False)]


def finish(
    wrapper: Wrapper,
    queries: Sequence[torch.Tensor],
    lanes: Sequence[tuple[torch.Tensor, torch.Tensor]],
    q: torch.Tensor,
    k_scale: float | None,
    v_scale: float | None,
    return_lse: bool,
) -> Any:
    """Attend every lane and put the results together as FlashInfer returns them."""
    require(len(queries) == len(lanes), f"{len(queries)} lanes of queries, {len(lanes)} of keys")
    scale = wrapper.options.get("sm_scale") or q.shape[-1] ** -0.5
    parts = [
        attend(
            own,
            keys,
            values,
            causal=wrapper.causal,
            sm_scale=scale * (1.0 if k_scale is None else k_scale),
            logits_soft_cap=wrapper.options.get("logits_soft_cap"),
        )
        for own, (keys, values) in zip(queries, lanes, strict=True)
    ]
    out = torch.cat([part[0] for part in parts]) * (1.0 if v_scale is None else v_scale)
    out = out.to(q.dtype)
    return (out, torch.cat([part[1] for part in parts])) if return_lse else out


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join two parts of one attention by their base-2 lse; a part without keys has lse -inf."""
    joined = torch.logaddexp2(s_a, s_b)
    share_a, share_b = (torch.exp2(s - joined).nan_to_num(0.0)[..., None] for s in (s_a, s_b))
    return (v_a.float() * share_a + v_b.float() * share_b).to(v_a.dtype), joined


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Join the parts [tokens, parts, heads, dim] of one attention."""
    joined = (s / LOG2_E).logsumexp(dim=1) * LOG2_E
    shares = torch.exp2(s - joined[:, None]).nan_to_num(0.0)[..., None]
    return (v.float() * shares).sum(dim=1).to(v.dtype), joined
