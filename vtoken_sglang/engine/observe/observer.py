"""Attention seen in the backend, gathered per live token for the policies that ask for it.

    before a forward   `prepare`      host: which lanes are watched, which of their queries count
    in each layer      `on_layer`     q and live keys -> weights, added to the lane's sum
    at a look          `see`          a policy's view gets its request's scores

Scores live by (request, position) in a table of their own: moving or forking tokens moves no score,
and a row that ends (finish, abort, retraction) gives its scores back. A request whose policy asks
for nothing costs one dictionary look-up per forward, and a forward without watched lanes nothing
in its layers.

All host state belongs to the scheduler thread, which also prepares forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vtoken_sglang.core.device_work import DeviceWork, WorkAtOnce
from vtoken_sglang.engine.observe.decode_tap import DecodeTap, WatchedLane
from vtoken_sglang.engine.observe.lanes import ForwardObservation, LaneObservation, make_lane
from vtoken_sglang.engine.observe.prefix_scores import ScoreSeeds, SeedKeeper
from vtoken_sglang.engine.observe.queries import Share, Watched, rows_needed, take_shares
from vtoken_sglang.engine.observe.rotary import KeyRotation
from vtoken_sglang.errors import UnsupportedModeError
from vtoken_sglang.policy.base import Gather, Keys, Observation, Policy, PolicyView, Pool


class Observer:
    """Scores of one scheduler's watched requests.

    Fields:
        scores: float32 [1 + capacity, width], the model's device; sums over query heads and
            observed layers by (score row, position); row 0 is never used.
        unwatched: requests that found no free score row and run unobserved.
        left_out: queries of decode steps that were not observed because the tap's lists were full.
    """

    def __init__(
        self,
        *,
        rows: torch.Tensor,
        k_buffers: list[torch.Tensor],
        capacity: int,
        observe_layers: str,
        observe_every: int,
        observation_of: Callable[[Any], Observation | None],
        live_positions: Callable[[int, int], NDArray[np.int64]],
        live_len: Callable[[int, int], int],
        seeds_of: Callable[[Any], bool] = lambda request: False,
        work: DeviceWork | None = None,
        page_size: int = 1,
        tap: DecodeTap | None = None,
        key_dtype: torch.dtype | None = None,
        rotation: KeyRotation | UnsupportedModeError | None = None,
    ) -> None:
        """
        Args:
            rows: the engine's req_to_token, int32 [num_rows, width].
            k_buffers: key buffer of each layer, [num_slots, kv_heads, dim].
            capacity: score rows, to begin with; a request takes one, or two for a history
                window. Without a tap there may be more later.
            observe_layers, observe_every: see `config_fields`.
            observation_of: what the policy of a request (SGLang's `Req`) asks for.
            live_positions: (row, logical length) -> its live positions, ascending. Host only.
            live_len: how many they are, without listing them.
            seeds_of: whether a request's scores of a cached prefix start from kept ones.
            work: where device work is started.
            page_size: tokens per page of the prefix cache.
            key_dtype: what the keys' bytes mean, where they are stored as another type (fp8).
            tap: observes decode steps where graphs are captured; its table is the one used.
            rotation: how the model rotated its keys, or why they cannot be rotated back; needed
                for policies that look at keys before rotary embedding.
        """
        self._rows = rows
        self._k_buffers = k_buffers
        self._key_dtype = k_buffers[0].dtype if key_dtype is None else key_dtype
        self._rotation, self._page_size = rotation, page_size
        self._every = observe_every
        self._observation_of = observation_of
        self._live_positions = live_positions
        self._live_len = live_len
        self._watched: dict[int, Watched] = {}
        self._without: set[int] = set()  # rows whose request found no free score row
        self._tap = tap
        if tap is None:
            self.scores = torch.zeros(1 + capacity, rows.shape[1], device=rows.device)
        else:
            self.scores = tap.scores
        self._free = list(range(len(self.scores) - 1, 0, -1))
        self.layers = observed_layers(observe_layers, len(k_buffers))
        self.last_layer = max(self.layers, default=-1)
        self.unwatched = self.left_out = 0
        self._first_lane = 0  # of the tap's next step: what did not fit comes first then
        self.work: DeviceWork = WorkAtOnce() if work is None else work
        self.seeds = SeedKeeper(ScoreSeeds(page_size), self.work)
        self._seeds_of = seeds_of
        self._q_heads = 0

    # -- a forward ------------------------------------------------------------------------------

    def prepare(
        self, batch: Any, is_decode: bool, row_ids: torch.Tensor | None = None
    ) -> ForwardObservation | None:
        """What the next forward observes layer by layer; None if that is nothing.

        Called on the stream of the forward, after its lengths are known and before its metadata is
        made. A decode step that the tap observes is prepared there, and None is returned.

        Args:
            batch: SGLang's `ScheduleBatch`.
            row_ids: integer [bs], the device's rows of the lanes; needed with a tap.
        """
        if is_decode and self._tap is not None:
            assert row_ids is not None
            self._prepare_tap(self._tap, batch, row_ids)
            return None
        lanes: list[LaneObservation] = []
        offset = 0
        for index, request in enumerate(batch.reqs):
            end = int(request.kv.kv_committed_len)
            start = end - 1
            if not is_decode:
                start = int(batch.prefix_lens[index])
                end = start + int(batch.extend_lens[index])
            watched = self._watch(request, start)
            if watched is not None and (shares := self._take(watched, request, start, end)):
                row = request.kv.req_pool_idx
                live = self._live_positions(row, end)
                lanes.append(
                    make_lane(
                        self._rows[row],
                        live,
                        shares,
                        lane=index,
                        first_query=offset,
                        start=start,
                    )
                )
            offset += end - start
        return ForwardObservation(lanes) if lanes else None

    def _prepare_tap(self, tap: DecodeTap, batch: Any, row_ids: torch.Tensor) -> None:
        lanes: list[WatchedLane] = []
        clear: list[int] = []
        room, count, left_out = tap.room, len(batch.reqs), []
        for index in ((self._first_lane + step) % count for step in range(count)):
            request = batch.reqs[index]
            end = int(request.kv.kv_committed_len)
            watched = self._watch(request, end - 1)
            if watched is None or watched.prompt_ended:
                continue
            live_len = self._live_len(request.kv.req_pool_idx, end)
            if live_len > room:
                # Nothing of it may change: cleared or counted as seen, its zeros would pass for
                # attention that was observed.
                left_out.append(index)
                continue
            for share in self._take(watched, request, end - 1, end):
                if share.clear:
                    clear.append(share.score_row)
                if share.queries:
                    room -= live_len
                    lanes.append(
                        WatchedLane(
                            lane=index,
                            score_row=share.score_row,
                            below_uniform=share.below_uniform,
                            span=end,
                            live_len=live_len,
                        )
                    )
        self._first_lane = left_out[0] if left_out else 0
        self.left_out += len(left_out)
        tap.watch(row_ids, sorted(lanes, key=lambda watched: watched.lane), clear)

    def _take(self, watched: Watched, request: Any, start: int, end: int) -> list[Share]:
        known = len(request.origin_input_ids) + len(request.output_ids)
        return take_shares(watched, start, end, prompt_ends=end >= known, every=self._every)

    def _watch(self, request: Any, start: int) -> Watched | None:
        """The request's state; made when its first forward computes from position `start` on."""
        row = request.kv.req_pool_idx
        watched = self._watched.get(row)
        if watched is not None or row in self._without:
            return watched
        observation = self._observation_of(request)
        if observation is None:
            return None
        needed = rows_needed(observation)
        if len(self._free) < needed and self._tap is None:
            self._grow()
        if len(self._free) < needed:
            self._without.add(row)
            self.unwatched += 1
            return None
        taken = tuple(self._free.pop() for _ in range(needed))
        for score_row in taken:
            self.scores[score_row].zero_()
        watched = self._watched[row] = Watched(observation, taken)
        if self._seeds_of(request):
            self.seeds.begin(request, watched, start, self.scores)
        return watched

    def _grow(self) -> None:
        """Double the table; never a tap's, whose address captured graphs hold."""
        count = self.scores.shape[0]
        self.scores = torch.cat([self.scores, torch.zeros_like(self.scores)])
        self._free.extend(range(2 * count - 1, count - 1, -1))

    def on_layer(
        self, forward: ForwardObservation, layer_id: int, q: torch.Tensor, scale: float
    ) -> None:
        """Add one layer's weights; after the last observed one, add the lanes' sums to the scores.

        Args:
            q: [query tokens of the forward, q_heads, dim].
            scale: factor on q.k.
        """
        if layer_id not in self.layers:
            return
        self._q_heads = q.shape[1]
        forward.add_layer(q, lambda slots: self._keys(layer_id, slots), scale)
        if layer_id == self.last_layer:
            forward.add_to(self.scores)

    def on_weights(
        self,
        forward: ForwardObservation,
        layer_id: int,
        q_heads: int,
        weights_of: Callable[[int], torch.Tensor],
    ) -> None:
        """As `on_layer` for a decode step whose weights are known already.

        Args:
            weights_of: lane -> its softmax weights, float32 [q_heads, live keys].
        """
        self._q_heads = q_heads
        forward.add_weights(weights_of)
        if layer_id == self.last_layer:
            forward.add_to(self.scores)

    # -- a look ---------------------------------------------------------------------------------

    def ready(self, row: int, policy: Policy) -> bool:
        """Whether the policy may look: not before a prompt's end that it waits for was seen."""
        observation = policy.observation()
        if observation is None or observation.gather is not Gather.PROMPT_END:
            return True
        watched = self._watched.get(row)
        return watched is None or watched.prompt_ended

    def see(self, row: int, policy: Policy, view: PolicyView) -> PolicyView:
        """The view with what the policy asked for. Nothing is read back to the host."""
        view = replace(view, page_size=self._page_size)
        if policy.reads_keys:
            slots = self._rows[row][view.positions].long()
            keys = partial(self._layer_keys, slots, policy.reads_keys, view.positions)
            view = replace(view, layer_keys=keys)
        observation = policy.observation()
        if observation is None:
            return view
        watched = self._watched.get(row)
        if watched is None or not watched.observed_len:
            return replace(
                view, attention=torch.zeros(len(view.positions), device=self._rows.device)
            )
        values = sum(self.scores[score_row][view.positions] for score_row in watched.score_rows)
        assert isinstance(values, torch.Tensor)
        unseen = view.positions >= watched.observed_len
        attention = (values / self._pooled_weights(observation)).masked_fill(unseen, 0.0)
        return replace(view, attention=attention, observed_len=watched.observed_len)

    def _keys(self, layer_id: int, slots: torch.Tensor) -> torch.Tensor:
        """Keys of one layer, float32 [n, kv_heads, dim]. Bytes are gathered, then read as what they
        are: few operations know 8-bit floats."""
        return self._k_buffers[layer_id][slots].view(self._key_dtype).float()

    def _layer_keys(
        self, slots: torch.Tensor, which: Keys, positions: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """By layer, what `PolicyView.layer_keys` gives. Raises UnsupportedModeError."""
        cached = (self._keys(layer_id, slots) for layer_id in range(len(self._k_buffers)))
        if which is not Keys.BEFORE_ROTARY:
            return cached
        if isinstance(self._rotation, UnsupportedModeError):
            raise self._rotation
        assert self._rotation is not None, "the observer was not told how keys are rotated"
        return self._rotation.undo(cached, positions)

    def _pooled_weights(self, observation: Observation) -> int:
        """How many weights a score sums up per query: query heads of the observed layers, or one
        of each layer."""
        if observation.pool is Pool.MAX:
            return max(1, len(self.layers))
        q_heads = self._q_heads or (self._tap.q_heads if self._tap is not None else 0)
        return max(1, q_heads * len(self.layers))

    def keep_seeds(self, request: Any) -> None:
        """At the safe point of a request that decodes and was not pruned yet: keep what it gathered
        on the part of its prompt that the prefix cache took."""
        watched = self._watched.get(request.kv.req_pool_idx)
        if watched is not None and not watched.kept and request.decode_batch_idx >= 1:
            watched.kept = True
            self.seeds.keep(request, watched, self.scores)
        self.seeds.settle()

    def counters(self) -> dict[str, int]:
        """For `/server_info`."""
        return {"unwatched_requests": self.unwatched, "unobserved_queries": self.left_out}

    # -- the end of a row -----------------------------------------------------------------------

    def forget(self, row: int) -> None:
        """The row went back to the pool (finish, abort or retraction)."""
        self._without.discard(row)
        watched = self._watched.pop(row, None)
        if watched is not None:
            self._free.extend(watched.score_rows)


def observed_layers(which: str, count: int) -> frozenset[int]:
    """Layers that `--vtoken-observe-layers` names of a model with `count` layers.

    `every:K` counts back from the last, so that one is always among them.
    """
    if which == "none":
        return frozenset()
    if which == "all":
        return frozenset(range(count))
    if which == "last":
        return frozenset({count - 1})
    return frozenset(range(count - 1, -1, -int(which.partition(":")[2])))
