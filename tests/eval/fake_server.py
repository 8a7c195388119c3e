"""A stand-in for a served engine: the few endpoints the evaluation uses, no model.

Run as a script. Tokens follow from the prompt alone (`--shift` changes them), so runs can be
compared. `--fail` picks a way to fail: `exit` at once, `hang` (never healthy), `die` (ends while
answering), `refuse` (HTTP 500), `short` (too few tokens), `deaf` (goes on when
interrupted), `choosy` (refuses requests that are to be pruned). `--plain` is a server without this
package and without metrics, `--foreign` one that is not SGLang. Unknown flags are ignored.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

OPTIONS = argparse.ArgumentParser()
OPTIONS.add_argument("--port", type=int, required=True)
OPTIONS.add_argument("--fail", default="")
OPTIONS.add_argument("--plain", action="store_true")
OPTIONS.add_argument("--foreign", action="store_true")
OPTIONS.add_argument("--model-path", default="")
OPTIONS.add_argument("--asked-file", default="", help="append what each request asks for")
OPTIONS.add_argument("--shift", type=int, default=0)
OPTIONS.add_argument("--child-file", default="", help="start a child, write its process id here")


class Handler(BaseHTTPRequestHandler):
    """One request at a time per thread; the class attribute `options` is set by `main`."""

    options: argparse.Namespace
    served_tokens = 0
    answered = 0

    def do_GET(self) -> None:
        if self.options.foreign or (self.options.plain and self.path.startswith("/metrics")):
            self._answer(b"<html>", status=404 if self.options.plain else 200)
        elif self.path.startswith("/metrics"):
            used = f"sglang:kv_used_tokens {Handler.served_tokens}.0\n"
            self._answer(f"{used}sglang:num_running_reqs 1.0\n".encode())
        elif self.path.startswith("/server_info"):
            state = {} if self.options.plain else {"vtoken": self._counters()}
            info = {"internal_states": [state], "model_path": self.options.model_path}
            info |= {"page_size": 16, "max_total_num_tokens": 4096}
            self._answer(json.dumps(info).encode())
        elif self.options.fail == "hang":
            self._answer(b"", status=503)
        else:
            self._answer(b"ok")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path != "/generate":
            self._answer(b"flushed")
        elif self.options.fail == "die":
            print("the fake model ran out of luck", flush=True)
            os._exit(7)
        elif self.options.fail == "refuse":
            self._answer(b"no thanks", status=500)
        else:
            self._generate(json.loads(body))

    def _generate(self, request: dict[str, Any]) -> None:
        said = request["sampling_params"].get("custom_params", {}).get("vtoken")
        if self.options.asked_file:
            with open(self.options.asked_file, "a", encoding="utf-8") as stream:
                stream.write(json.dumps(said) + "\n")
        if self.options.fail == "choosy" and (said or {}).get("policy", "none") != "none":
            error = {"error": {"message": "vtoken.policy: this server prunes nothing"}}
            self._answer(json.dumps(error).encode(), status=400)
        else:
            self._stream(request)

    def _counters(self) -> dict[str, Any]:
        """As if every answered request had lost one token."""
        return {
            "evicted_tokens": Handler.answered,
            "pruned_rows": 1,
            "retained_pages": 4,
            "live_private_tokens": 32,
            "forks": {"committed": 0, "log": []},
        }

    def _stream(self, request: dict[str, Any]) -> None:
        prompt = request["input_ids"]
        count = request["sampling_params"]["max_new_tokens"]
        if self.options.fail == "short":
            count -= 1
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        tokens: list[int] = []
        for index in range(count):
            tokens.append((sum(prompt) + 7 * index + self.options.shift) % 97)
            Handler.served_tokens += 1
            time.sleep(0.005)
            meta = {"cached_tokens": len(prompt) // 2, "num_retractions": 0}
            event = json.dumps({"output_ids": tokens, "meta_info": meta})
            self.wfile.write(f"data: {event}\n\n".encode())
        Handler.answered += 1
        self.wfile.write(b"data: [DONE]\n\n")

    def _answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: Any) -> None:
        """Say nothing; the log is what tests look at."""


def main() -> None:
    options, _ignored = OPTIONS.parse_known_args()
    print("fake server starting", flush=True)
    if options.fail == "exit":
        print("ValueError: the fake model is not to be found", flush=True)
        sys.exit(3)
    if options.fail == "deaf":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if options.child_file:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(options.child_file, "w") as stream:
            stream.write(str(child.pid))
    Handler.options = options
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
