"""Refusal of unsupported modes, asked for through SGLang's own command line parser.

Nothing is downloaded and no weights are read: the model is a config.json in a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from vtoken_sglang.engine.compat import refuse as compat
from vtoken_sglang.engine.compat.models import LAYER_RULES, MODEL_RULES
from vtoken_sglang.engine.compat.rule import ArgsView, Ask, ModelRule, Rule, UnsupportedModesError
from vtoken_sglang.engine.compat.rules import ALLOWED, FLAG_RULES
from vtoken_sglang.errors import ConfigError, HookError, UnsupportedModeError

pytest.importorskip("sglang.srt.server_args", reason="needs the supported SGLang")
torch = pytest.importorskip("torch")

PLAIN_MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}

without_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="states what SGLang itself stops on a machine without a GPU"
)

Make = Callable[[Ask], Any]


@pytest.fixture(scope="session")
def parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


@pytest.fixture
def _environment() -> Iterator[None]:
    """Undo what SGLang writes into the environment while it resolves its arguments."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def make(parser: argparse.ArgumentParser, tmp_path: Path, _environment: None) -> Make:
    """Make an unresolved ServerArgs from an `Ask`."""
    from sglang.srt.server_args import ServerArgs

    def make(ask: Ask) -> Any:
        os.environ.update(ask.environ)
        (tmp_path / "config.json").write_text(json.dumps(PLAIN_MODEL | ask.model))
        plain = ["--model-path", str(tmp_path)]
        if "--device" not in ask.argv:
            plain += ["--device", "cpu"]
        namespace = parser.parse_args([*plain, *ask.argv])
        namespace._radix_eviction_policy_explicitly_set = False
        return ServerArgs.from_cli_args(namespace)

    return make


@dataclass(frozen=True)
class Case:
    rule: Rule | ModelRule
    ask: Ask


def _cases(rules: tuple[Any, ...]) -> list[Any]:
    return [
        pytest.param(Case(rule, ask), id=f"{rule.name}-{number}")
        for rule in rules
        for number, ask in enumerate(rule.asks)
    ]


def _refused(server_args: Any, case: Case) -> UnsupportedModesError:
    """Refuse `server_args`; only the case's rule, and those it is known to bring, may apply."""
    with pytest.raises(UnsupportedModeError) as caught:
        compat.refuse_server_args(server_args)
    error = caught.value
    assert isinstance(error, UnsupportedModesError)
    names = {hit.rule for hit in error.hits}
    assert case.rule.name in names
    assert names <= {case.rule.name, *case.ask.also}
    lines = str(error).splitlines()
    assert len(lines) == len(error.hits)
    for line, hit in zip(lines, error.hits, strict=True):
        assert line == f"{hit.flag} is not supported: {hit.reason}. Remedy: {hit.remedy}"
    return error


def _resolve(server_args: Any) -> None:
    server_args.resolve_once()
    server_args.check_server_args()


@pytest.mark.parametrize("case", _cases(FLAG_RULES))
def test_flag_is_refused_before_sglang_resolves(make: Make, case: Case) -> None:
    error = _refused(make(case.ask), case)
    (hit,) = error.hits
    option = hit.flag.replace("=", " ").split()[0]
    assert option in (*case.ask.argv, *case.ask.environ)
    assert (hit.reason, hit.remedy) == (case.rule.reason, case.rule.remedy)


@without_gpu
@pytest.mark.parametrize("case", _cases(FLAG_RULES))
def test_flag_is_refused_after_sglang_resolved(make: Make, case: Case) -> None:
    server_args = make(case.ask)
    if case.ask.stopped_by_sglang:
        with pytest.raises((ValueError, AssertionError, RuntimeError, ImportError)):
            _resolve(server_args)
        return
    _resolve(server_args)
    _refused(server_args, case)


@pytest.mark.parametrize("case", _cases(MODEL_RULES))
def test_model_is_refused_by_its_config(make: Make, case: Case) -> None:
    server_args = make(case.ask)
    compat.refuse_server_args(server_args)  # nothing is known of the model yet
    server_args.resolve_once()
    error = _refused(server_args, case)
    assert error.flag.startswith(f"--model-path {server_args.model_path} (")
    assert any(case.rule.kind in hit.flag for hit in error.hits)  # type: ignore[union-attr]


def _allowed_asks() -> list[Any]:
    plain = [pytest.param(Ask(), id="plain")]
    return plain + [
        pytest.param(ask, id=entry.flag.split(",")[0]) for entry in ALLOWED for ask in entry.asks
    ]


@without_gpu
@pytest.mark.parametrize("ask", _allowed_asks())
def test_plain_and_allowed_arguments_pass(make: Make, ask: Ask) -> None:
    server_args = make(ask)
    compat.refuse_server_args(server_args)
    _resolve(server_args)
    compat.refuse_server_args(server_args)


def test_every_read_argument_exists(make: Make) -> None:
    from sglang.srt.environ import envs

    args = ArgsView(make(Ask()))
    for rule in FLAG_RULES:
        assert rule.trigger.fields or rule.trigger.environ
        for name in rule.trigger.fields:
            args.typed(name)
        for name in rule.trigger.environ:
            assert hasattr(envs, name)


def test_a_renamed_argument_is_an_error_not_a_pass(make: Make) -> None:
    args = ArgsView(make(Ask()))
    for read in (args.value, args.typed):
        with pytest.raises(HookError, match=r"ServerArgs\.enable_something_renamed"):
            read("enable_something_renamed")


def test_rules_have_unique_names_and_a_way_to_ask() -> None:
    rules: list[Rule | ModelRule] = [*FLAG_RULES, *MODEL_RULES]
    names = [rule.name for rule in rules]
    assert len(set(names)) == len(names)
    for rule in rules:
        assert rule.asks
        assert rule.reason
        assert rule.remedy
        assert all(set(ask.also) <= set(names) for ask in rule.asks)


def test_several_modes_are_all_named_one_line_each(make: Make) -> None:
    server_args = make(Ask(argv=("--tp-size", "2", "--pp-size", "3", "--enable-lmcache")))
    with pytest.raises(UnsupportedModesError) as caught:
        compat.refuse_server_args(server_args)
    first_words = [line.split(" is not supported: ")[0] for line in str(caught.value).splitlines()]
    assert sorted(first_words) == ["--enable-lmcache", "--pp-size 3", "--tp-size 2"]
    assert caught.value.flag == first_words[0]


def test_a_choice_of_sglang_is_refused_and_called_so(make: Make) -> None:
    from sglang.srt.arg_groups.overrides import declare_resolution

    server_args = make(Ask())
    declare_resolution(server_args, "test", attention_backend="fa3")
    with pytest.raises(UnsupportedModesError, match=r"fa3 \(SGLang's choice here\)"):
        compat.refuse_server_args(server_args)


def test_a_choice_of_sglang_reaches_the_scheduler_process(make: Make) -> None:
    from sglang.srt.arg_groups.overrides import declare_resolution

    server_args = make(Ask())
    server_args.resolve_once()
    declare_resolution(server_args, "test", kv_cache_dtype="fp8_e4m3")
    with pytest.raises(UnsupportedModesError, match="--kv-cache-dtype fp8_e4m3"):
        compat.refuse_server_args(pickle.loads(pickle.dumps(server_args)))


@dataclass(frozen=True)
class _Options:
    prunes: bool


@pytest.mark.parametrize(
    ("prunes", "return_logprob", "start", "prompt_len"),
    [
        (True, False, -1, None),
        (True, False, 0, None),  # SGLang ignores the start without return_logprob
        (True, True, -1, 10),
        (True, True, None, None),
        (True, True, 10, 10),
        (False, True, 0, 10),
    ],
)
def test_request_passes(
    prunes: bool, return_logprob: bool, start: int | None, prompt_len: int | None
) -> None:
    compat.refuse_request(
        _Options(prunes), return_logprob, start, prompt_len=prompt_len, beam_width=1
    )


@pytest.mark.parametrize(
    ("start", "prompt_len"), [(0, None), (0, 10), (9, 10), (10, None), (-2, 10)]
)
def test_prompt_logprobs_of_a_pruned_request_are_refused(
    start: int, prompt_len: int | None
) -> None:
    with pytest.raises(ConfigError) as caught:
        compat.refuse_request(_Options(True), True, start, prompt_len=prompt_len)
    assert (caught.value.field, caught.value.value) == ("logprob_start_len", start)
    assert "pruned prefix" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"enable_torch_compile": 1}, "torch-compile"),
        ({"enable_hierarchical_cache": 1}, "hicache"),
        ({"cuda_graph_config": {"prefill": {"backend": "full"}}}, "full-prefill-graph"),
    ],
)
@pytest.mark.usefixtures("_environment")
def test_the_engine_takes_more_types_than_the_command_line(
    tmp_path: Path, fields: dict[str, Any], rule: str
) -> None:
    from sglang.srt.server_args import ServerArgs

    (tmp_path / "config.json").write_text(json.dumps(PLAIN_MODEL))
    hits = compat.server_args_hits(ServerArgs(model_path=str(tmp_path), device="cpu", **fields))
    assert rule in {hit.rule for hit in hits}


def test_rocm_is_refused_though_pytorch_calls_it_cuda(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = make(Ask(argv=("--device", "cuda")))
    assert "device" not in {hit.rule for hit in compat.server_args_hits(arguments)}
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert "device" in {hit.rule for hit in compat.server_args_hits(arguments)}


@pytest.mark.parametrize("prunes", [True, False])
def test_beam_search_is_refused(prunes: bool) -> None:
    with pytest.raises(ConfigError, match="beam_width: must be 1.* got 4"):
        compat.refuse_request(_Options(prunes), False, -1, beam_width=4)


def test_table_has_every_rule() -> None:
    text = compat.describe_rules()
    refused, allowed = (block.splitlines() for block in text.split("\n\n"))
    rules = len(FLAG_RULES) + len(MODEL_RULES) + len(LAYER_RULES)
    assert len(refused) == 2 + rules + len(compat.REQUEST_ROWS)
    assert len(allowed) == 2 + len(ALLOWED)
    plain = {line.replace("`", "") for line in refused}
    for rule in FLAG_RULES:
        assert f"| {rule.flag} | {rule.reason} | {rule.remedy} |" in plain
    for model in MODEL_RULES:
        assert f"| --model-path: {model.kind} | {model.reason} | {model.remedy} |" in plain
    assert {line.count(" | ") for line in refused[2:]} == {2}
    assert {line.count(" | ") for line in allowed[2:]} == {1}
