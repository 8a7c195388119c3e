"""One request whose tokens are computed forward by forward, for the tests of observation."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vtoken_sglang_eval.policy_reference import Observed

from tests.helpers.reference import visible_keys
from vtoken_sglang.core.device_work import DeviceWork
from vtoken_sglang.core.types import Generation, Row
from vtoken_sglang.engine.observe.decode_tap import DecodeTap
from vtoken_sglang.engine.observe.observer import ForwardLane, Observer, observed_layers
from vtoken_sglang.engine.request_state import RequestState
from vtoken_sglang.options import RequestOptions, VTokenConfig
from vtoken_sglang.policy.base import Policy, PolicyView
from vtoken_sglang.policy.registry import load_policy
from vtoken_sglang.policy.scissorhands import Scissorhands
from vtoken_sglang.policy.snapkv import SnapKV

LAYERS, Q_HEADS, KV_HEADS, DIM = 4, 6, 2, 8
SCALE = DIM**-0.5
WINDOWED: dict[str, tuple[Policy, dict[str, int]]] = {
    "scissorhands": (Scissorhands(window=20), {"window": 20}),
    "snapkv": (SnapKV(window=16, kernel=3), {"window": 16, "kernel": 3}),
}
NO_SCORES = RequestOptions.resolve(
    VTokenConfig(policy="h2o", keep=0.5, reuse_prefix_scores="off"), None
)
OBSERVING = ["h2o", "tova", "snapkv", "scissorhands"]


def policy_named(name: str) -> Policy:
    """The policy, with a window that fits into a short request."""
    return WINDOWED[name][0] if name in WINDOWED else load_policy(name)


class SimState(RequestState):
    """The state of a simulated request: what is alive is what the simulation says."""

    def __init__(self, sim: Sim) -> None:
        super().__init__(
            request=SimpleNamespace(decode_batch_idx=0),
            record=sim.record,
            row=Row(sim.row),
            generation=Generation(1),
            options=NO_SCORES,
            policy=sim.policy,
        )
        self.sim = sim

    def live_positions(self, length: int) -> NDArray[np.int64]:
        return self.sim.live(length)

    def live_len(self, length: int) -> int:
        return len(self.sim.live(length))


class RowState(RequestState):
    """The state of a row that the test fills: what is alive is what has an entry."""

    def __init__(self, rows: torch.Tensor, row: int, policy: Policy | None) -> None:
        super().__init__(
            request=SimpleNamespace(decode_batch_idx=0),
            record=SimpleNamespace(req_pool_idx=row),
            row=Row(row),
            generation=Generation(1),
            options=NO_SCORES,
            policy=policy,
        )
        self.entries = rows[row]

    def live_positions(self, length: int) -> NDArray[np.int64]:
        return self.entries[:length].numpy().nonzero()[0].astype(np.int64)

    def live_len(self, length: int) -> int:
        return len(self.live_positions(length))


class Sim:
    """One request whose tokens are computed forward by forward, at slots that may change.

    `on_device` makes stand-ins for device tensors over the same memory (see `tests.helpers`).
    """

    def __init__(
        self,
        policy: Policy,
        length: int,
        seed: int,
        layers: str = "all",
        every: int = 1,
        *,
        tapped: bool = False,
        on_device: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
        work: DeviceWork | None = None,
        key_dtype: torch.dtype | None = None,
    ) -> None:
        self.policy, self.length, self.every = policy, length, every
        draw = torch.Generator().manual_seed(seed)
        self.q = 2 * torch.randn(LAYERS, length, Q_HEADS, DIM, generator=draw)
        self.k = torch.randn(LAYERS, length, KV_HEADS, DIM, generator=draw)
        self.draw, self.row = draw, 3
        self.rows = torch.zeros(6, length + 7, dtype=torch.int32)
        shape, dtype = (LAYERS, 4 * length, KV_HEADS, DIM), key_dtype or torch.float32
        self.buffers = list(torch.full(shape, torch.nan).to(dtype))
        stored = [buffer.view(torch.uint8) if key_dtype else buffer for buffer in self.buffers]
        self.evictions: dict[int, list[int]] = {}
        self.dead: set[int] = set()
        self.on_device = on_device
        rows = on_device(self.rows)
        self.tap: DecodeTap | None = None
        if tapped:
            observed = observed_layers(layers, LAYERS)
            self.tap = DecodeTap(rows, 4 * length, observed, score_bytes=1 << 20)
            self.tap.scores = self.on_device(self.tap.scores)
        self.observer = Observer(
            rows=rows,
            k_buffers=[on_device(buffer) for buffer in stored],
            key_dtype=key_dtype,
            capacity=1,
            observe_layers=layers,
            observe_every=every,
            tap=self.tap,
            work=work,
        )
        self.row_ids = on_device(torch.tensor([self.row]))
        self.record: Any = SimpleNamespace(req_pool_idx=self.row, kv_committed_len=0)
        self.state = SimState(self)

    def live(self, end: int) -> NDArray[np.int64]:
        return np.array([pos for pos in range(end) if pos not in self.dead], np.int64)

    def place(self, pos: int) -> None:
        """Give a position a slot that nothing lives in, and write its keys there."""
        used = set(self.rows[self.row].tolist())
        while (slot := int(torch.randint(1, 4 * self.length, (1,), generator=self.draw))) in used:
            pass
        self.rows[self.row, pos] = slot
        for layer in range(LAYERS):
            self.buffers[layer][slot] = self.k[layer, pos]

    def forward(self, start: int, end: int, prompt_len: int) -> None:
        for pos in range(start, end):
            self.place(pos)
        self.record.kv_committed_len = end
        decode = start >= prompt_len
        known = max(prompt_len, end) if decode else prompt_len
        lane = ForwardLane(self.state, start, end, prompt_ends=end >= known)
        forward = self.observer.prepare([lane], decode, self.row_ids)
        if forward is not None:
            for layer in range(LAYERS):
                self.observer.on_layer(
                    forward, layer, self.on_device(self.q[layer, start:end]), SCALE
                )
        elif decode and self.tap is not None and self.tap.active:
            for layer in sorted(self.tap.layers):
                q, lse = (
                    self.on_device(self.q[layer, start:end]),
                    self.on_device(self.lse(layer, start)),
                )
                self.tap.on_layer(q, self.on_device(self.buffers[layer]), lse, SCALE)

    def lse(self, layer: int, pos: int) -> torch.Tensor:
        """What a decode kernel leaves: the log-sum-exp over the live keys, [1, q_heads]."""
        keys = self.k[layer, self.live(pos + 1)].repeat_interleave(Q_HEADS // KV_HEADS, dim=1)
        logits = torch.einsum("hd,khd->hk", self.q[layer, pos], keys) * SCALE
        return logits.logsumexp(dim=1)[None]

    def evict(self, length: int, count: int) -> None:
        """Eviction `count` live positions below `length - 8`, as of this length."""
        live = [pos for pos in range(length - 8) if pos not in self.dead]
        order = torch.randperm(len(live), generator=self.draw)[:count].tolist()
        self.evictions[length] = sorted(live[index] for index in order)
        self.dead.update(self.evictions[length])
        self.rows[self.row, self.evictions[length]] = 0

    def move(self) -> None:
        """Every live token moves; what was there before is overwritten."""
        live = (self.rows[self.row] != 0).nonzero().flatten().tolist()
        old = self.rows[self.row].clone()
        for pos in live:
            self.place(pos)
        stay = set(self.rows[self.row].tolist())
        for slot in set(old.tolist()) - stay:
            for buffer in self.buffers:
                buffer[slot] = torch.nan

    def scores(self, length: int) -> dict[int, float]:
        positions = torch.from_numpy(self.live(length))
        view = PolicyView(positions=positions, logical_len=length, request_seed=0)
        seen = self.observer.see(self.state, self.policy, view)
        return dict(zip(positions.tolist(), self.policy.score(seen).tolist(), strict=True))

    def reference(self, length: int, last_chunk: tuple[int, int], first_query: int = 0) -> Observed:
        visible = visible_keys(length, {q: k for q, k in self.evictions.items() if q < length})
        keys = self.k[:, :length].repeat_interleave(Q_HEADS // KV_HEADS, dim=2)
        logits = torch.einsum("lqhd,lkhd->lhqk", self.q[:, :length].double(), keys.double())
        logits = (logits * SCALE).masked_fill(~visible, float("-inf"))
        layers = sorted(self.observer.layers)
        return Observed(
            weights=logits.softmax(dim=-1)[layers],
            visible=visible,
            keys=[self.k[layer, :length] for layer in range(LAYERS)],
            first_query=first_query,
            last_chunk=last_chunk,
            every=self.every,
        )
