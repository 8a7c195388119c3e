"""What an evaluation does: one frozen object from defaults, a TOML file and flags."""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtoken_sglang.policy.names import policy_targets

from .arms import select_arms
from .errors import ConfigError

LIST_FIELDS = ("arms", "server_args")
LARGEST_SCALE = 100  # a longer trace than any that is known, and text has to be made for it
CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """All settings of one evaluation. Field names are the flags (`--page-size`) and TOML keys.

    Fields:
        preset: where the defaults came from ("run", "quick", or a file's name).
        model: folder or name that SGLang loads.
        dataset: file (ShareGPT format, LongBench format, free text or a Mooncake trace, as the
            workload needs), or "hf:NAME" for a data set of the `datasets` library; None fetches
            the default conversations where any are needed.
        workload: key of `workload.workload_builders`.
        arms: names from `arms.ARMS`; tokens are compared with the first of them, or with the arm
            that makes the same evictions.
        policy, keep, sink, recent, interval: how pruning arms evict (see `vtoken-sglang serve`).
        repeats: how often every arm is served; arm order rotates between repeats.
        page_size, pool: KV page size and pool in tokens (`--page-size`, `--max-total-tokens`).
        conversations, turns: sessions and user turns of each.
        concurrency: sessions in flight; a session's next turn waits for its answer.
        sharing: sessions that share a prefix; 0: all of them.
        system_tokens, user_tokens: length of the shared prefix (system prompt, document or policy);
            longest user turn kept (or length of a tool's result, of a question).
        out_tokens: mean length of the answers; each has its own exact length (see the
            workload), end-of-text ignored.
        seed: choice and order of conversations, and the pruning arms' own.
        time_scale, length_scale: factors on times and lengths of a replayed trace.
        slo_ttft, slo_tpot: seconds that a request may take to its first token, and per further
            one, to count as good; 0: twice the median of the arm `native` in the same repeat.
        device: "auto", "cpu" or "cuda"; dtype: "auto" is float32 on a CPU, bfloat16 elsewhere.
        server_args: extra engine flags, the same for every arm.
        port: 0 picks a free one.
        startup_timeout: seconds a server may take until it answers.
        sample_interval: seconds between two looks at the server's pool gauges.
    """

    preset: str = "run"
    model: str = ""
    dataset: str | None = None
    workload: str = "multi_turn"
    arms: tuple[str, ...] = ("stock", "native", "hook-only")
    repeats: int = 5
    page_size: int = 16
    pool: int = 16384
    conversations: int = 24
    turns: int = 5
    concurrency: int = 8
    system_tokens: int = 512
    user_tokens: int = 96
    out_tokens: int = 48
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    server_args: tuple[str, ...] = ()
    port: int = 0
    startup_timeout: float = 300.0
    sample_interval: float = 0.5
    policy: str = "random"
    keep: float = 0.3
    sink: int = 4
    recent: int = 32
    interval: int = 16
    sharing: int = 0
    time_scale: float = 1.0
    length_scale: float = 1.0
    slo_ttft: float = 0.0
    slo_tpot: float = 0.0

    def __post_init__(self) -> None:
        for name in LIST_FIELDS:
            self._require(name, "must be a list of texts", _texts)
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("preset", "model", "workload", "policy", "device", "dtype"):
            self._require(name, "must be a text", _text)
        self._require("dataset", "must be a text", lambda value: value is None or _text(value))
        select_arms(self.arms)
        positive = ("repeats", "page_size", "pool", "conversations", "turns", "concurrency")
        for name in (*positive, "interval", "system_tokens", "user_tokens", "out_tokens"):
            self._require(name, "must be a whole number of at least 1", _at_least(1))
        for name in ("seed", "sink", "recent", "sharing"):
            self._require(name, "must be a whole number of at least 0", _at_least(0))
        self._require("port", "must be 0 (any free one) or 1..65535", _port)
        self._require("device", "must be auto, cpu or cuda", ("auto", "cpu", "cuda").__contains__)
        for name in ("startup_timeout", "sample_interval"):
            self._require(name, "must be a number of seconds above 0", _above_zero)
        for name in ("slo_ttft", "slo_tpot"):
            self._require(name, "must be a number of seconds of at least 0", _not_negative)
        for name in ("time_scale", "length_scale"):
            rule = f"must be a number above 0 and at most {LARGEST_SCALE}"
            self._require(name, rule, _scale)
        self._require("keep", "must be a number above 0 and at most 1", _share)
        self._require("policy", f"must be among {', '.join(_policies())}", _policies().__contains__)
        if self.pool % self.page_size:
            rule = f"must be a multiple of page_size {self.page_size}"
            raise ConfigError("pool", rule, self.pool)

    def _require(self, name: str, rule: str, holds: Any) -> None:
        value = getattr(self, name)
        if not holds(value):
            raise ConfigError(name, rule, value)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; tuples become lists."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in dataclasses.asdict(self).items()
        }


def _text(value: object) -> bool:
    return isinstance(value, str)


def _texts(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(map(_text, value))


def _at_least(minimum: int) -> Any:
    return lambda value: type(value) is int and value >= minimum


def _port(value: object) -> bool:
    return type(value) is int and 0 <= value <= 65535


def _scale(value: Any) -> bool:
    return _above_zero(value) and float(value) <= LARGEST_SCALE


def _above_zero(value: object) -> bool:
    return type(value) in (int, float) and float(value) > 0  # type: ignore[arg-type]


def _not_negative(value: object) -> bool:
    return value == 0 or _above_zero(value)


def _share(value: object) -> bool:
    return _above_zero(value) and value <= 1  # type: ignore[operator]


def _policies() -> tuple[str, ...]:
    return tuple(policy_targets())


PRESETS: dict[str, dict[str, Any]] = {
    "run": {},
    # Sized to end inside ten minutes on two cores: six server starts and six short runs. The pool
    # is too small for every session at once, so that memory given back lets more of them run.
    "quick": {
        "arms": ("native", "naive", "auto"),
        "repeats": 2,
        "pool": 1280,
        "conversations": 8,
        "turns": 2,
        "concurrency": 8,
        "sharing": 2,
        "system_tokens": 256,
        "user_tokens": 48,
        "out_tokens": 32,
        "sample_interval": 0.25,
        "server_args": ("--decode-log-interval", "4"),
    },
}


def read_toml(path: str) -> dict[str, Any]:
    """The tables of a TOML file. A bare name such as "serve" that is no file here means one of the
    shipped files.

    Raises:
        ConfigError: no such file, or not TOML.
    """
    file = Path(path)
    shipped = CONFIGS / f"{path}.toml"
    if not file.exists() and file.name == path and shipped.is_file():
        file = shipped
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("config", "must name a readable TOML file", path) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("config", f"must be TOML ({error})", path) from error


def read_config_file(path: str) -> dict[str, Any]:
    """Settings of a TOML file whose keys are the fields of `EvalConfig`.

    Raises:
        ConfigError: no such file, not TOML, or an unknown key.
    """
    settings = read_toml(path)
    known = {field.name for field in dataclasses.fields(EvalConfig)}
    for key in settings:
        if key not in known:
            raise ConfigError("config", f"keys must be among {', '.join(sorted(known))}", key)
    settings.setdefault("preset", Path(path).stem)
    return settings


def make_config(preset: str, file_settings: dict[str, Any], flags: dict[str, Any]) -> EvalConfig:
    """Combine a preset, a file's settings and flags (None means not given); the later wins."""
    settings: dict[str, Any] = {"preset": preset, **PRESETS[preset], **file_settings}
    settings.update({key: value for key, value in flags.items() if value is not None})
    return EvalConfig(**settings)


def with_default_model(config: EvalConfig) -> EvalConfig:
    """The configuration with a model: the one named, else the small default, fetched if need be.

    Raises:
        ConfigError: the named local folder does not exist.
    """
    if not config.model:
        from vtoken_sglang_eval.models import ensure_smollm2

        return dataclasses.replace(config, model=str(ensure_smollm2()))
    looks_local = config.model.startswith((".", "/", "~"))
    folder = Path(config.model).expanduser()
    if looks_local and not folder.is_dir():
        raise ConfigError("model", "must be an existing folder", config.model)
    return dataclasses.replace(config, model=str(folder) if looks_local else config.model)
