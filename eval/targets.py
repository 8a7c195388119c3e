"""The servers that a study asks: one that it starts, or one that already runs.

Both say where they answer, what they hold, and that they are alive. Of a server that already runs,
nothing is controlled: only its public endpoints are used, and what they do not tell is left out.
"""

from __future__ import annotations

import json
import os
import shlex
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .arms import Arm, launcher
from .errors import ConfigError, ServerError
from .options import Options
from .sampling import counters_of, parse_gauges, read_json
from .server import HOST, ServerProcess, free_port, http_ok

FLUSH_TIMEOUT_S = 30.0
PROBE_TIMEOUT_S = 60.0
CONNECT_S = 5.0


class Target(Protocol):
    """A server that answers."""

    base_url: str

    def cpu_seconds(self) -> float | None:
        """CPU time of its processes so far; None where that cannot be told."""

    def require_alive(self, when: str, settle_s: float = 0.0) -> None:
        """Raise ServerError if it is gone."""

    def error(self, problem: str) -> ServerError:
        """A ServerError about this server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What a server says of itself.

    Fields:
        model: path or name that it was given. page_size, pool: tokens; 0: it does not say.
        limit: tokens of the longest request, pool and context length taken together; 0: unknown.
        prunes: whether this package's counters are there.
        missing: what could not be read, for the reader.
    """

    model: str
    page_size: int
    pool: int
    limit: int
    prunes: bool
    missing: tuple[str, ...] = ()


class RunningServer:
    """A server that somebody else started.

    Raises:
        ServerError: nobody answers, or not as SGLang does.
    """

    def __init__(self, url: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError("url", "must start with http:// or https://", url)
        self.base_url = url.rstrip("/")
        try:
            with urllib.request.urlopen(self.base_url + "/health", timeout=PROBE_TIMEOUT_S):
                pass
        except urllib.error.HTTPError:
            pass  # somebody answers: whether it is SGLang shows next
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise ServerError(
                f"--url {url}: nobody answers ({reason}); start a server there with "
                "`vtoken-sglang serve`, or leave --url out and one is started"
            ) from error
        info = read_json(self.base_url + "/server_info")
        if not isinstance(info, Mapping) or "internal_states" not in info:
            raise ServerError(f"--url {url}: answers, but not as an SGLang server does")
        self.facts = facts_of(info, self.base_url)

    def cpu_seconds(self) -> float | None:
        return None

    def require_alive(self, when: str, settle_s: float = 0.0) -> None:
        if not http_ok(self.base_url + "/health", PROBE_TIMEOUT_S):
            raise self.error(f"does not answer any more {when}")

    def error(self, problem: str) -> ServerError:
        return ServerError(f"{self.base_url}: {problem}")


def facts_of(info: Mapping[str, Any], base_url: str) -> ServerFacts:
    """What an answer of `/server_info` tells, and whether there are metrics."""
    states = info.get("internal_states") or [{}]
    pool = int(info.get("max_total_num_tokens") or info.get("max_total_tokens") or 0)
    context = int(states[0].get("context_len") or info.get("context_length") or 0)
    missing = ["CPU time of the server: it was not started here"]
    if not _has_metrics(base_url):
        missing.append("memory and running requests: the server has no --enable-metrics")
    prunes = counters_of(info) is not None
    if not prunes:
        missing.append("evictions and copies: the server runs without vtoken-sglang")
    return ServerFacts(
        model=str(info.get("tokenizer_path") or info.get("model_path") or ""),
        page_size=int(info.get("page_size") or 0),
        pool=pool,
        limit=min(filter(None, (pool, context)), default=0),
        prunes=prunes,
        missing=tuple(missing),
    )


def _has_metrics(base_url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{base_url}/metrics/", timeout=CONNECT_S) as answer:
            return bool(parse_gauges(answer.read().decode(errors="replace")))
    except (OSError, ValueError):
        return False


def require_arm(target: Target, arm: Arm) -> None:
    """Send one short request of an arm, so that a refusal is told before anything is measured.

    Raises:
        ServerError: the server's own words.
    """
    sampling: dict[str, Any] = {"max_new_tokens": 1, "temperature": 0}
    if arm.request:
        sampling["custom_params"] = {"vtoken": arm.request}
    body = json.dumps({"input_ids": [1, 2, 3, 4], "sampling_params": sampling}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(target.base_url + "/generate", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=PROBE_TIMEOUT_S) as answer:
            answer.read()
    except urllib.error.HTTPError as error:
        raise target.error(f"refuses {arm.name} ({_said(error)})") from error
    except OSError as error:
        raise target.error(f"does not answer a request ({error})") from error


def _said(error: urllib.error.HTTPError) -> str:
    text = error.read().decode(errors="replace")
    try:
        found = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        found = text
    return " ".join(str(found).split())[:300] or f"HTTP {error.code}"


def flush_cache(base_url: str, tries: int = 10) -> None:
    """Empty the server's prefix cache, so that earlier requests leave nothing to hit.

    Raises:
        ServerError: the server refused, `tries` times half a second apart.
    """
    request = urllib.request.Request(f"{base_url}/flush_cache", method="POST")
    for attempt in range(tries):
        try:
            with urllib.request.urlopen(request, timeout=FLUSH_TIMEOUT_S) as answer:
                answer.read()
                return
        except OSError as error:
            if attempt + 1 == tries:
                raise ServerError(
                    f"{base_url}: the prefix cache cannot be emptied ({error}); "
                    "is other traffic on this server?"
                ) from error
            time.sleep(0.5)


def engine_flags(options: Options, port: int) -> list[str]:
    """SGLang's flags of every server that a study starts; device and dtype are resolved."""
    words = ["--model-path", options.model, "--host", HOST, "--port", str(port)]
    words += ["--device", options.device, "--dtype", options.dtype]
    words += ["--page-size", str(options.page_size), "--max-total-tokens", str(options.pool)]
    words += ["--random-seed", str(options.seed), "--enable-metrics", "--decode-log-interval", "4"]
    if options.device == "cpu":
        words.append("--sleep-on-idle")
    return [*words, *options.server_args]


def server_command(options: Options, ablation: str, port: int) -> list[str]:
    """The whole command of a server."""
    return [*launcher(ablation), *engine_flags(options, port)]


def server_environment(options: Options, ablation: str) -> dict[str, str]:
    """One thread per process on a CPU. A stock server loads of this package only the CPU platform,
    without which SGLang does not run on a machine that has no accelerator."""
    environment = {"TOKENIZERS_PARALLELISM": "false"}
    if options.device == "cpu":
        environment["OMP_NUM_THREADS"] = "1"
    if ablation == "stock":
        environment["SGLANG_PLUGINS"] = "vtoken_cpu"
    return environment


def start_server(options: Options, ablation: str, folder: Path) -> ServerProcess:
    """A server as a context manager; its log goes to a new file of the folder."""
    port = free_port()
    number = 1 + len(list(folder.glob("server-*.log")))
    return ServerProcess(
        server_command(options, ablation, port),
        port,
        folder / f"server-{number:02d}-{ablation or 'main'}.log",
        server_environment(options, ablation),
        options.startup_timeout,
    )


def shown_command(options: Options, ablation: str) -> str:
    """The command as a shell line, for people."""
    words = server_command(options, ablation, 30000)
    return shlex.join(Path(w).name if os.path.isabs(w) else w for w in words)
