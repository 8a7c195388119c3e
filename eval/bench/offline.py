"""SGLang's model runner in this process, without a server: single steps on chosen backends.

For measurements and tests that must compare backends on one batch, one pool and one set of slots,
step by step, which two servers cannot do. Slots come from SGLang's own allocator through its own
`ScheduleBatch`; only the prompt's forward is left out: K and V are random, since decode times do
not depend on their values. One instance per process (SGLang's configuration is global).
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.benchmark.one_batch import TreeCacheNamespace, _init_process_global_configs
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import bootstrap
from sglang.srt.entrypoints.engine import _set_envs_and_config
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import SpawnRanks, get_device, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from vtoken_sglang.engine.attention.cpu import VTokenTorchAttnBackend

ARMS = ("stock", "native", "hook-only")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """One step of a whole batch on one backend.

    Fields:
        wall_s: elapsed time of the forward and the sampler.
        cpu_s: CPU time of the process in it; other processes' load does not count.
        attention_wall_s: the part of `wall_s` inside the attention backend.
        attention_cpu_s: the part of `cpu_s` inside the attention backend.
        tokens: chosen token per lane.
    """

    wall_s: float
    cpu_s: float
    attention_wall_s: float
    attention_cpu_s: float
    tokens: tuple[int, ...]


@dataclass(slots=True)
class _Clock:
    """Adds up the time spent between `start` and `stop`."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    _began: tuple[float, float] = field(default=(0.0, 0.0))

    def start(self) -> None:
        self._began = (time.perf_counter(), time.process_time())

    def stop(self) -> None:
        self.wall_s += time.perf_counter() - self._began[0]
        self.cpu_s += time.process_time() - self._began[1]


class OfflineDecoder:
    """A loaded model and one batch, stepped on the stock backend or on ours.

    Invariants:
        Backends share the pool and the rows, and a step writes the same slots on each, so the
        batch can be stepped on one after the other without disturbing it.
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str,
        pool_tokens: int,
        page_size: int,
        threads: int,
        load_format: str = "auto",
    ) -> None:
        """Load the model on CPU with SGLang's stock torch_native backend.

        Args:
            model_path: folder that SGLang loads.
            dtype: "float32", "bfloat16" or "float16", of weights and KV.
            pool_tokens: size of the KV pool in tokens.
            page_size: tokens per page.
            threads: PyTorch threads.
            load_format: SGLang's load format; "dummy" gives random weights.
        """
        args = ServerArgs(
            model_path=model_path,
            load_format=load_format,
            skip_tokenizer_init=True,
            device="cpu",
            dtype=dtype,
            attention_backend="torch_native",
            max_total_tokens=pool_tokens,
            page_size=page_size,
            disable_radix_cache=True,
            log_level="error",
        )
        args.resolve_once()
        _set_envs_and_config(args)
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        _init_process_global_configs()
        self._page_size = page_size
        self._runner = _load(args)
        torch.set_num_threads(threads)
        self._backends: dict[str, Any] = {
            "stock": TorchNativeAttnBackend(self._runner),
            "native": VTokenTorchAttnBackend(self._runner, "direct"),
            "hook-only": VTokenTorchAttnBackend(self._runner, "live"),
        }
        self._attention = _Clock()
        for backend in self._backends.values():
            methods = ("init_forward_metadata", "forward_decode", "forward_extend")
            _measure(backend, methods, self._attention)
        for buffer in self._kv_buffers():
            buffer.normal_()
        self._batch: ScheduleBatch | None = None

    def _kv_buffers(self) -> list[torch.Tensor]:
        pool = self._runner.token_to_kv_pool
        return [*pool.k_buffer, *pool.v_buffer]

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of all layers."""
        return sum(buffer[0].nbytes for buffer in self._kv_buffers())

    @property
    def weight_bytes(self) -> int:
        """Parameters, each counted once."""
        tensors = {param.data_ptr(): param.nbytes for param in self._runner.model.parameters()}
        return sum(tensors.values())

    def start_batch(self, batch_size: int, context: int, decoded: int) -> None:
        """Give `batch_size` requests slots for `context` tokens, the last `decoded` one by one.

        So a request's prompt lies as the allocator gives it, and its decoded tokens between those
        of the others, as after `decoded` steps of serving.
        """
        self._batch = self._place(self._new_requests(batch_size, context - decoded))
        for _ in range(decoded):
            self.advance([1] * batch_size)

    def start_extend(self, batch_size: int, cached: int, own: int) -> None:
        """Give `batch_size` requests slots for `cached` tokens that count as computed and for `own`
        more, which the steps that follow compute in one extend."""
        requests = self._new_requests(batch_size, cached + own)
        for request in requests:
            request.extend_end = cached
        self._place(requests)
        for request in requests:
            request.prefix_len, request.extend_end = cached, cached + own
        self._batch = self._place(requests)
        self._batch.input_ids = self._batch.prefill_input_ids_cpu

    def _new_requests(self, batch_size: int, prompt_len: int) -> list[Req]:
        """Requests whose prompts are still to be placed, in an empty pool."""
        self._runner.req_to_token_pool.clear()
        self._runner.token_to_kv_pool_allocator.clear()
        params = SamplingParams(temperature=0, max_new_tokens=1)
        requests = []
        for index in range(batch_size):
            prompt = array("q", range(prompt_len))
            request = Req(
                rid=str(index),
                origin_input_text="",
                origin_input_ids=prompt,
                sampling_params=params,
            )
            request.full_untruncated_fill_ids = prompt
            request.logprob_start_len = -1
            request.extend_end = len(prompt)
            requests.append(request)
        return requests

    def _place(self, requests: list[Req]) -> ScheduleBatch:
        """Slots for each request's tokens up to `extend_end`."""
        runner = self._runner
        batch = ScheduleBatch.init_new(
            reqs=requests,
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
            tree_cache=TreeCacheNamespace(
                page_size=self._page_size,
                device=runner.device,
                token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
            ),
            model_config=runner.model_config,
            enable_overlap=False,
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )
        batch.prepare_for_extend()
        ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)
        return batch

    def advance(self, tokens: list[int]) -> None:
        """Append one token per request: SGLang allocates and records its slot."""
        assert self._batch is not None, "start_batch was not called"
        self._batch.input_ids = torch.tensor(tokens, dtype=torch.int64)
        self._batch.prepare_for_decode()

    @torch.no_grad()
    def step(self, arm: str) -> StepTime:
        """Run the forward of the batch's newest tokens on one arm's backend.

        May be repeated, on other arms too, before the next `advance`.
        """
        assert self._batch is not None, "start_batch was not called"
        runner, attention = self._runner, self._attention
        runner.attn_backend = runner.decode_attn_backend = self._backends[arm]
        attention.wall_s = attention.cpu_s = 0.0
        whole = _Clock()
        whole.start()
        forward = ForwardBatch.init_new(self._batch, runner, return_hidden_states_before_norm=False)
        logits = runner.forward(forward).logits_output
        tokens = runner.sample(logits, forward)
        whole.stop()
        return StepTime(
            wall_s=whole.wall_s,
            cpu_s=whole.cpu_s,
            attention_wall_s=attention.wall_s,
            attention_cpu_s=attention.cpu_s,
            tokens=tuple(tokens.tolist()),
        )


def _load(args: ServerArgs) -> ModelRunner:
    """Build the model runner as SGLang's scheduler process does, without the scheduler."""
    port = PortArgs.init_new(args).nccl_port
    model_config = ModelConfig.from_server_args(args)
    bootstrap.init_parallel_runtime(server_args=args, device=get_device().device, dist_port=port)
    bootstrap.init_layer_runtime(model_config=model_config)
    runner = ModelRunner(
        model_config=model_config,
        mem_fraction_static=args.mem_fraction_static,
        gpu_id=0,
        nccl_port=port,
        server_args=args,
    )
    runner.alloc_memory_pool()
    runner.init_attention_backends()
    runner.init_cuda_graphs()
    return runner


def _measure(backend: Any, methods: tuple[str, ...], clock: _Clock) -> None:
    """Have `clock` run during the named methods of one backend object."""
    for name in methods:
        setattr(backend, name, _timed(getattr(backend, name), clock))


def _timed(method: Any, clock: _Clock) -> Any:
    def timed(*args: Any, **kwargs: Any) -> Any:
        clock.start()
        try:
            return method(*args, **kwargs)
        finally:
            clock.stop()

    return timed
