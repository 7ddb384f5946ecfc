# SPDX-License-Identifier: Apache-2.0
"""A ``vllm serve`` in a process of its own: started, watched, asked, ended."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
_POLL_S = 0.5
_LOG_TAIL = 3000  # characters of the log that an error shows
# What vLLM calls its counters of speculative decoding.
SPEC_DECODE = "vllm:spec_decode_"
# Counters by draft position are named so, with the position behind.
ACCEPTED_AT = "num_accepted_tokens_per_pos."


class ServerError(RuntimeError):
    """The server ended, or did not come up in time; the message holds its log's end."""


def end_of_log(log: Path) -> str:
    """For an error's message."""
    return f"the end of its log ({log}):\n{log.read_text()[-_LOG_TAIL:]}"


class VllmServer:
    """Runs ``vllm serve TARGET`` by its console script, as a user would.

    Args:
        target: Folder or hub id of the target.
        speculative_config: What ``--speculative-config`` gets; None for plain decoding.
        log: File that takes the server's output.
        arguments: More arguments for ``vllm serve``.
        environment: Variables to set over this process's own.
        vllm: The console script; the one beside this Python if not given.
    """

    def __init__(
        self,
        target: str,
        speculative_config: dict[str, Any] | None,
        log: Path,
        arguments: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        vllm: Path | None = None,
    ) -> None:
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        script = vllm or Path(sys.executable).parent / "vllm"
        command = [str(script), "serve", target]
        command += ["--host", "127.0.0.1", "--port", str(self.port), *arguments]
        if speculative_config is not None:
            command += ["--speculative-config", json.dumps(speculative_config)]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def is_ready(self) -> bool:
        """Whether it answers; raises ``ServerError`` if it has ended."""
        if self.process.poll() is not None:
            raise ServerError(
                f"vllm serve ended with status {self.process.returncode}; "
                f"{end_of_log(self.log)}"
            )
        try:
            return httpx.get(f"{self.url}/health", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.is_ready():
            if time.monotonic() > deadline:
                raise ServerError(
                    f"vllm serve was not up after {START_TIMEOUT_S:.0f} s; its log is "
                    f"{self.log}"
                )
            time.sleep(_POLL_S)

    def spec_decode_counters(self) -> dict[str, float]:
        """vLLM's speculative-decoding counters from ``/metrics``, summed over engines;
        those by draft position as ``ACCEPTED_AT`` and the position."""
        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        counters: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            if not family.name.startswith(SPEC_DECODE):
                continue
            for sample in family.samples:
                if not sample.name.endswith("_total"):
                    continue
                name = family.name.removeprefix(SPEC_DECODE)
                if "position" in sample.labels:
                    name += f".{sample.labels['position']}"
                counters[name] = counters.get(name, 0.0) + sample.value
        return counters

    def stop(self) -> int:
        """Ends the server as a service manager would; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
