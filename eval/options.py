"""Every setting of a study, declared once: the flags, the TOML keys and the help come from here.

What a request may say for itself (`custom_params["vtoken"]`) is not repeated: each such option of
`vtoken_sglang.options` is an axis here, a list of values under its own name.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from vtoken_sglang.options import (
    NO_POLICY,
    OPTIONS,
    REQUEST_FIELDS,
    RequestOptions,
    VTokenConfig,
)
from vtoken_sglang.policy.names import policy_targets

from .errors import ConfigError

# Request options that are axes; `policies` names the policy, `seed` the draws of everything.
AXES: Final = tuple(name for name in REQUEST_FIELDS if name not in ("policy", "seed"))
AMOUNTS: Final = ("keep", "budget")  # a request gives one of the two
DEFAULT_AXES: Final[Mapping[str, tuple[Any, ...]]] = {
    "keep": (0.5,),
    "shared": ("skip", "mask", "auto"),
}
ABLATIONS: Final = (
    "stock", "native", "hook-only", "naive", "sync-copy", "retract", "full-admission"
)  # fmt: skip
WITHOUT_PRUNING: Final = ("stock", "native", "hook-only")
WORKLOADS: Final = ("multi_turn", "document_questions", "agent", "reasoning")


def option(default: Any, text: str, unit: str = "", kind: type | None = None, **rule: Any) -> Any:
    """A dataclass field with its help text, and what holds for its value (see `_broken`).

    Args:
        kind: of a value, or of an entry of a list, where the default does not tell.
        rule: `least`, `above`, `most` for numbers; `among` for texts.
    """
    kind = kind or (str if isinstance(default, tuple) or default is None else type(default))
    return field(default=default, metadata={"text": text, "unit": unit, "kind": kind, **rule})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The settings of one study. A shape left at None is the workload's own.

    Raises:
        ConfigError: a value breaks its rule, or two settings exclude each other.
    """

    url: tuple[str, ...] = option((), "a server that already runs; may be given twice", "URL")
    model: str = option("", "folder or name that SGLang loads (default: SmolLM2-135M-Instruct)")
    device: str = option("auto", "auto, cpu or cuda", among=("auto", "cpu", "cuda"))
    dtype: str = option("auto", "default: float32 on a CPU, bfloat16 elsewhere")
    page_size: int = option(16, "tokens per KV page", "N", least=1)
    pool: int = option(16384, "KV pool in tokens", "N", least=1)
    server_args: tuple[str, ...] = option((), "extra flags of every server", "'WORDS'")
    startup_timeout: float = option(600.0, "seconds a server may take to start", "S", above=0)

    policies: tuple[str, ...] = option(("snapkv",), "eviction policies", "A,B")
    axes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ablations: tuple[str, ...] = option(
        (), "arms with a server of their own: " + ", ".join(ABLATIONS), "A,B", among=ABLATIONS
    )

    trace: str = option("", "trace in Mooncake's format, replayed at its own times", "FILE")
    dataset: str = option(
        "", "conversations (ShareGPT, OpenAI) or documents (LongBench, text), or hf:NAME", "FILE"
    )
    as_is: bool = option(False, "replay the data as they are (default without --workload)")
    workload: str = option("", "made from the data instead: " + ", ".join(WORKLOADS), "NAME")
    conversations: int | None = option(None, "the first N sessions only", "N", int, least=1)
    turns: int | None = option(None, "user turns per session", "N", int, least=1)
    sharing: int | None = option(
        None, "sessions that share a prefix, 0 for all of them", "N", int, least=0
    )
    system_tokens: int | None = option(None, "length of the shared prefix", "N", int, least=1)
    user_tokens: int | None = option(None, "longest user turn", "N", int, least=1)
    out_tokens: int | None = option(None, "mean length of an answer", "N", int, least=1)
    time_scale: float = option(1.0, "stretches the times of a trace", "X", above=0, most=100)
    length_scale: float = option(1.0, "stretches the lengths of a trace", "X", above=0, most=100)
    seed: int = option(0, "choice and order of what is drawn", "N", least=0)

    concurrency: tuple[int, ...] = option((8,), "sessions in flight: loads", "N,M", int, least=1)
    burst: bool = option(False, "send the first turn of every session at once")
    repeats: int = option(3, "how often every cell is measured", "N", least=1)
    paired: bool = option(False, "keep all servers up and let their cells take turns")
    sample_interval: float = option(0.5, "seconds between two looks at a server", "S", above=0)
    slo_ttft: float = option(0.0, "longest first-token time of a good request", "S", least=0)
    slo_tpot: float = option(0.0, "longest time per further token of a good one", "S", least=0)

    quality: bool = option(False, "ask questions with known answers in every cell")
    quality_tokens: int = option(1024, "text around a question of --quality", "N", least=64)
    quality_rounds: int = option(1, "nine questions each, per repeat", "N", least=1)
    ruler_data: str = option("", "ask RULER's questions too: TASK/validation.jsonl", "DIR")
    lm_eval: tuple[str, ...] = option((), "generation tasks of lm-eval, asked too", "A,B")
    lm_eval_limit: int = option(20, "questions per lm-eval task", "N", least=1)

    def __post_init__(self) -> None:
        for item in scalar_fields():
            value: Any = getattr(self, item.name)
            if isinstance(item.default, tuple):
                value = tuple(value) if isinstance(value, (list, tuple)) else (value,)
                object.__setattr__(self, item.name, value)
            for entry in value if isinstance(value, tuple) else (value,):
                if rule := _broken(item, entry):
                    raise ConfigError(item.name, rule, entry)
        given = {name: _axis(name, values) for name, values in self.axes.items() if values}
        defaults = {
            name: values
            for name, values in DEFAULT_AXES.items()
            if name not in given and not (name in AMOUNTS and any(a in given for a in AMOUNTS))
        }
        object.__setattr__(self, "axes", {**defaults, **given})
        self._check_together()

    def _check_together(self) -> None:
        for name in self.policies:
            if not self.url and name != NO_POLICY and name not in policy_targets():
                known = ", ".join((NO_POLICY, *policy_targets()))
                raise ConfigError("policies", f"must be among {known}", name)
        server = VTokenConfig(policy="streaming_llm", keep=1.0)
        for request in self.requests():
            # A policy of a server that runs need not be installed here: it answers for itself.
            known = request["policy"] in policy_targets()
            RequestOptions.resolve(server, request if known else {**request, "policy": "random"})
        if self.as_is and self.workload:
            raise ConfigError("as_is", "--as-is and --workload exclude each other", self.workload)
        if self.workload and self.workload not in WORKLOADS:
            raise ConfigError("workload", "must be among " + ", ".join(WORKLOADS), self.workload)
        if self.trace and (self.dataset or self.workload):
            other = self.dataset or self.workload
            raise ConfigError("trace", "--trace excludes --dataset and --workload", other)
        if self.url and self.ablations:
            rule = "an ablation is a start-up flag: give the URL of a server that was started so"
            raise ConfigError("ablations", rule, self.ablations)
        if self.pool % self.page_size:
            rule = f"must be a multiple of page_size {self.page_size}"
            raise ConfigError("pool", rule, self.pool)

    @property
    def replayed(self) -> bool:
        """Whether the data decide turns and lengths, and shapes are only limits."""
        return not self.workload and bool(self.dataset or self.trace)

    def shape(self, name: str, default: int) -> int:
        """A shape such as `turns`, or the workload's default."""
        value: int | None = getattr(self, name)
        return default if value is None else value

    def requests(self) -> Iterator[dict[str, Any]]:
        """Every point of the axes, as a request says it; native ("none") is not among them."""
        amounts = [(n, v) for n in AMOUNTS for v in self.axes.get(n, ())]
        others = [name for name in self.axes if name not in AMOUNTS]
        for policy in dict.fromkeys(p for p in self.policies if p != NO_POLICY):
            for amount, value in amounts:
                for values in itertools.product(*(self.axes[name] for name in others)):
                    rest = dict(zip(others, values, strict=True))
                    yield {"policy": policy, amount: value, **rest, "seed": self.seed}

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; the axes stand beside the other settings."""
        found = dataclasses.asdict(self)
        found.update(found.pop("axes"))
        return {k: list(v) if isinstance(v, tuple) else v for k, v in found.items()}


def scalar_fields() -> Iterator[Any]:
    """The fields of `Options` that carry their own description."""
    return (item for item in dataclasses.fields(Options) if item.metadata)


def _broken(item: Any, value: Any) -> str:
    """The rule that `value` breaks, empty if none."""
    kind, rule = item.metadata["kind"], item.metadata
    if value is None and item.default is None:
        return ""
    if type(value) not in ((int, float) if kind is float else (kind,)):
        named = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
        return f"must be {named[kind]}"
    if "among" in rule and value not in rule["among"]:
        return "must be among " + ", ".join(rule["among"])
    if "least" in rule and value < rule["least"]:
        return f"must be at least {rule['least']}"
    if "above" in rule and value <= rule["above"]:
        return f"must be above {rule['above']}"
    return f"must be at most {rule['most']}" if "most" in rule and value > rule["most"] else ""


def _axis(name: str, values: Any) -> tuple[Any, ...]:
    """Values of a request option; text from a command line becomes a number where it is one."""
    if name not in AXES:
        raise ConfigError(name, "is no setting of a study", values)
    listed = values if isinstance(values, (list, tuple)) else [values]
    return tuple(_literal(value) if isinstance(value, str) else value for value in listed)


def _literal(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def make_options(settings: Mapping[str, Any]) -> Options:
    """Options from plain keys, of TOML or of flags; request options become axes.

    Raises:
        ConfigError: an unknown key or a bad value.
    """
    names = {item.name for item in scalar_fields()}
    own = {key: value for key, value in settings.items() if key in names}
    axes = {key: value for key, value in settings.items() if key not in names}
    return Options(**own, axes=axes)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag per setting and per axis. A flag that was not given stays out of the namespace."""
    for item in scalar_fields():
        about = item.metadata
        flag, words = "--" + item.name.replace("_", "-"), dict[str, Any](default=argparse.SUPPRESS)
        text = about["text"]
        if item.default not in (None, "", (), False, "auto"):
            shown = item.default if not isinstance(item.default, tuple) else item.default[0]
            text += f" (default: {shown})"
        if about["kind"] is bool:
            parser.add_argument(flag, action="store_true", help=text, **words)
        elif item.name == "url":
            parser.add_argument(flag, action="append", metavar="URL", help=text, **words)
        else:
            reader = about["kind"]
            if isinstance(item.default, tuple):
                reader = _words if item.name == "server_args" else _list_of(reader)
            metavar = about["unit"] or item.name.upper()
            parser.add_argument(flag, type=reader, metavar=metavar, help=text, **words)
    group = parser.add_argument_group("axes: options of a request, one value or several")
    for name in AXES:
        default = ",".join(map(str, DEFAULT_AXES.get(name, ())))
        text = OPTIONS[name].help + (f" (default: {default})" if default else "")
        flag = "--" + name.replace("_", "-")
        group.add_argument(
            flag, type=_list_of(str), metavar="A,B", default=argparse.SUPPRESS,
            help=text.replace("%", "%%"),
        )  # fmt: skip


def given_flags(namespace: argparse.Namespace) -> dict[str, Any]:
    """The settings of a study that were given as flags."""
    known = {item.name for item in scalar_fields()} | set(AXES)
    return {key: value for key, value in vars(namespace).items() if key in known}


def _words(text: str) -> tuple[str, ...]:
    return tuple(shlex.split(text))


def _list_of(kind: type) -> Any:
    def read(text: str) -> tuple[Any, ...]:
        if text.startswith("{"):  # one JSON object, with commas of its own
            return (text,)
        return tuple(kind(part.strip()) for part in text.split(",") if part.strip())

    read.__name__ = f"list of {kind.__name__}"
    return read


def local_folder(value: str) -> str:
    """A model given by a path, as an absolute one. Raises ConfigError: there is no such folder."""
    if not value.startswith((".", "/", "~")):
        return value
    folder = Path(value).expanduser()
    if not folder.is_dir():
        raise ConfigError("model", "must be an existing folder", value)
    return str(folder)
