"""Attention seen in the backend, gathered per live token for the policies that ask for it.

    before a forward   `prepare`      host: which lanes are watched, which of their queries count
    in each layer      `on_layer`     q and live keys -> weights, added to the lane's sum
    when it is asked   `see`          a policy's view gets its request's scores

Scores live by (request, position) in a table of their own: moving or forking tokens moves no score,
and a row that ends (finish, abort, retraction) gives its scores back. A forward without watched
lanes costs nothing in its layers.

All host state belongs to the scheduler thread, which also prepares forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from vtoken_sglang.core.device_work import DeviceWork, WorkAtOnce
from vtoken_sglang.engine.observe.decode_tap import DecodeTap, WatchedLane
from vtoken_sglang.engine.observe.lanes import ForwardObservation, LaneObservation, make_lane
from vtoken_sglang.engine.observe.prefix_scores import PrefixScoreKeeper, PrefixScores
from vtoken_sglang.engine.observe.queries import Share, rows_needed, take_shares
from vtoken_sglang.engine.request_state import RequestState, Watched
from vtoken_sglang.policy.base import Gather, Policy, PolicyView

FIRST_SCORE_ROWS: Final = 16


@dataclass(frozen=True, slots=True)
class ForwardLane:
    """One lane of a forward.

    Fields:
        start, end: half-open range of the positions it computes.
        prompt_ends: the last of its prompt is among them.
    """

    state: RequestState
    start: int
    end: int
    prompt_ends: bool


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
        observe_layers: str,
        observe_every: int,
        capacity: int = FIRST_SCORE_ROWS,
        work: DeviceWork | None = None,
        page_size: int = 1,
        tap: DecodeTap | None = None,
        key_dtype: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            rows: the engine's req_to_token, int32 [num_rows, width].
            k_buffers: key buffer of each layer, [num_slots, kv_heads, dim].
            observe_layers, observe_every: the options of that name.
            capacity: score rows, to begin with; a request takes one, or two for a history
                window. Without a tap there may be more later.
            work: where device work is started.
            page_size: tokens per page of the prefix cache.
            tap: observes decode steps where graphs are captured; its table is the one used.
            key_dtype: what the keys' bytes mean, where they are stored as another type (fp8).
        """
        self._rows = rows
        self._k_buffers = k_buffers
        self._key_dtype = k_buffers[0].dtype if key_dtype is None else key_dtype
        self._every = observe_every
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
        self.prefix_scores = PrefixScoreKeeper(
            PrefixScores(page_size), WorkAtOnce() if work is None else work
        )
        self._q_heads = 0

    # -- a forward ------------------------------------------------------------------------------

    def prepare(
        self,
        forward: Sequence[ForwardLane],
        is_decode: bool,
        row_ids: torch.Tensor | None = None,
    ) -> ForwardObservation | None:
        """What the next forward observes layer by layer; None if that is nothing.

        Called on the stream of the forward, after its lengths are known and before its metadata is
        made. A decode step that the tap observes is prepared there, and None is returned.

        Args:
            forward: its lanes, in batch order.
            row_ids: integer [bs], the device's rows of the lanes; needed with a tap.
        """
        if is_decode and self._tap is not None:
            assert row_ids is not None
            self._prepare_tap(self._tap, forward, row_ids)
            return None
        lanes: list[LaneObservation] = []
        offset = 0
        for index, lane in enumerate(forward):
            watched = self._watch(lane)
            if watched is not None and (shares := self._take(watched, lane)):
                lanes.append(
                    make_lane(
                        self._rows[lane.state.row],
                        lane.state.live_positions(lane.end),
                        shares,
                        lane=index,
                        first_query=offset,
                        start=lane.start,
                    )
                )
            offset += lane.end - lane.start
        return ForwardObservation(lanes) if lanes else None

    def _prepare_tap(
        self, tap: DecodeTap, forward: Sequence[ForwardLane], row_ids: torch.Tensor
    ) -> None:
        lanes: list[WatchedLane] = []
        clear: list[int] = []
        room, count, left_out = tap.room, len(forward), []
        for index in ((self._first_lane + step) % count for step in range(count)):
            lane = forward[index]
            watched = self._watch(lane)
            if watched is None or watched.prompt_ended:
                continue
            live_len = lane.state.live_len(lane.end)
            if live_len > room:
                # Nothing of it may change: cleared or counted as seen, its zeros would pass for
                # attention that was observed.
                left_out.append(index)
                continue
            for share in self._take(watched, lane):
                if share.clear:
                    clear.append(share.score_row)
                if share.queries:
                    room -= live_len
                    lanes.append(
                        WatchedLane(
                            lane=index,
                            score_row=share.score_row,
                            below_uniform=share.below_uniform,
                            span=lane.end,
                            live_len=live_len,
                        )
                    )
        self._first_lane = left_out[0] if left_out else 0
        self.left_out += len(left_out)
        tap.watch(row_ids, sorted(lanes, key=lambda watched: watched.lane), clear)

    def _take(self, watched: Watched, lane: ForwardLane) -> list[Share]:
        return take_shares(
            watched, lane.start, lane.end, prompt_ends=lane.prompt_ends, every=self._every
        )

    def _watch(self, lane: ForwardLane) -> Watched | None:
        """The request's scores; made when its first forward computes from `lane.start` on."""
        state = lane.state
        if state.watched is not None or state.unobserved:
            return state.watched
        if state.policy is None or not self.layers:
            return None
        observation = state.policy.observation()
        if observation is None:
            return None
        needed = rows_needed(observation)
        if len(self._free) < needed and self._tap is None:
            self._grow()
        if len(self._free) < needed:
            state.unobserved = True
            self.unwatched += 1
            return None
        taken = tuple(self._free.pop() for _ in range(needed))
        for score_row in taken:
            self.scores[score_row].zero_()
        state.watched = Watched(observation, taken)
        if state.options.reuse_prefix_scores == "on":
            self.prefix_scores.begin(state.request, state.watched, lane.start, self.scores)
        return state.watched

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

    # -- a policy is asked ----------------------------------------------------------------------

    def ready(self, state: RequestState) -> bool:
        """Whether its policy may be asked: not before a prompt's end that it waits for was seen."""
        observation = None if state.policy is None else state.policy.observation()
        if observation is None or observation.gather is not Gather.PROMPT_END:
            return True
        return state.watched is None or state.watched.prompt_ended

    def see(self, state: RequestState, policy: Policy, view: PolicyView) -> PolicyView:
        """The view with what the policy asked for. Nothing is read back to the host."""
        if policy.reads_keys:
            slots = self._rows[state.row][view.positions].long()
            view = replace(view, layer_keys=lambda: self._layer_keys(slots))
        if policy.observation() is None:
            return view
        watched = state.watched
        if watched is None or not watched.observed_len:
            return replace(
                view, attention=torch.zeros(len(view.positions), device=self._rows.device)
            )
        values = sum(self.scores[score_row][view.positions] for score_row in watched.score_rows)
        assert isinstance(values, torch.Tensor)
        unseen = view.positions >= watched.observed_len
        attention = (values / self._pooled_weights()).masked_fill(unseen, 0.0)
        return replace(view, attention=attention, observed_len=watched.observed_len)

    def _keys(self, layer_id: int, slots: torch.Tensor) -> torch.Tensor:
        """Keys of one layer, float32 [n, kv_heads, dim]. Bytes are gathered, then read as what they
        are: few operations know 8-bit floats."""
        return self._k_buffers[layer_id][slots].view(self._key_dtype).float()

    def _layer_keys(self, slots: torch.Tensor) -> Iterator[torch.Tensor]:
        return (self._keys(layer_id, slots) for layer_id in range(len(self._k_buffers)))

    def _pooled_weights(self) -> int:
        """How many weights a score sums up per query: query heads of the observed layers."""
        q_heads = self._q_heads or (self._tap.q_heads if self._tap is not None else 0)
        return max(1, q_heads * len(self.layers))

    def keep_prefix_scores(self, state: RequestState) -> None:
        """At the safe point of a request that decodes and lost nothing yet: keep what it gathered
        on the part of its prompt that the prefix cache took."""
        watched = state.watched
        if watched is not None and not watched.kept and state.request.decode_batch_idx >= 1:
            watched.kept = True
            self.prefix_scores.keep(state.request, watched, self.scores)

    def counters(self) -> dict[str, int]:
        """For `/server_info`."""
        return {"unwatched_requests": self.unwatched, "unobserved_queries": self.left_out}

    def release(self, state: RequestState) -> None:
        """The request's row went back to the pool: its score rows are free."""
        if state.watched is not None:
            self._free.extend(state.watched.score_rows)


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
