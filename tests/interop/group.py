"""Start and stop a real vLLM group, for tests: a tiny model with random weights, one or two ranks, on the CPU.

Plain blocking code on purpose: it serves fixtures of any scope, scripts, and Trio tests through ``trio.to_thread``. The
group dials a handshake address on the loopback interface, which the code under test binds before or after the start.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from interop.environment import Environment

HOST: Final = "127.0.0.1"

MODEL: Final[dict[str, Any]] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_sliding_window": False,
}
"""A mixture of experts: only such models step in lockstep (vLLM 0.14 and later). No weights and no tokenizer needed."""

DENSE: Final[dict[str, Any]] = {**MODEL, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
"""Without experts: on a CPU the engine can give adapters to no others."""

EOS: Final = 2
_WORDS: Final = {chr(at) if 32 <= at < 127 else f"<{at}>": at for at in range(256)}
TOKENIZER: Final[dict[str, Any]] = {
    "tokenizer.json": {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": EOS,
                "content": f"<{EOS}>",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "."},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": _WORDS, "unk_token": "<0>"},
    },
    "tokenizer_config.json": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": f"<{EOS}>",
        "model_max_length": 512,
    },
}
"""Structured outputs need one: a character each for the printable part of ASCII, names for the rest."""

MAX_MODEL_LEN: Final = 512
MAX_NUM_SEQS: Final = 8
NICENESS: Final = 10
"""An engine that waits for its other rank spins, two threads of each: with equal rights they starve everybody on a
small machine, for seconds. A server that shares its machine with them would want the same."""


class GroupNotRunning(Exception):
    """The engine has ended, or was not started; the message carries the end of its log."""


class VllmGroup:
    """One ``vllm serve --headless`` with all its ranks.

    Args:
        environment: the engine's environment.
        directory: a directory of its own for the model, the log and the overlay; stays when the group is stopped.
        port: where the ranks look for the handshake, on ``HOST``.
        ranks: the data-parallel size. With 1 the engine is a plain one, without waves.
        tokenizer: give it one, in which each token from 32 to 126 is that ASCII character.
        model: its configuration.
        arguments: more arguments for the command line, after ours, so that they win.
    """

    def __init__(
        self,
        environment: Environment,
        directory: Path,
        *,
        port: int,
        ranks: int = 2,
        tokenizer: bool = False,
        model: Mapping[str, Any] = MODEL,
        arguments: tuple[str, ...] = (),
    ) -> None:
        self.environment = environment
        self.directory = directory
        self.port = port
        self.ranks = ranks
        self.tokenizer = tokenizer
        self._model = model
        self.log_path = directory / "engine.log"
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def handshake(self) -> str:
        """The address to bind."""
        return f"tcp://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """The guard (``engine/launch.py``), which is the parent of all; also the id of their session."""
        if self._process is None:
            raise GroupNotRunning("it was not started")
        return self._process.pid

    def start(self) -> None:
        """Start it and return at once; the ranks are ready after 40 to 95 s, later on a busy machine."""
        if self._process is not None:
            raise RuntimeError("a group is started once")
        model = self.directory / "model"
        model.mkdir(parents=True, exist_ok=True)
        files = {"config.json": self._model, **(TOKENIZER if self.tokenizer else {})}
        for name, content in files.items():
            (model / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(model),
                env=self.environment.variables(self.directory / "overlay"),
                cwd=self.directory,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def command(self, model: Path) -> list[str]:
        """The command line that runs the group in the foreground."""
        options: dict[str, object] = {
            "load-format": "dummy",
            "dtype": "float32",
            "max-model-len": MAX_MODEL_LEN,
            "max-num-seqs": MAX_NUM_SEQS,
            # All prompts in one step: on a CPU a request with a seed must not take two, see VllmProtocol.seeds.
            "max-num-batched-tokens": MAX_NUM_SEQS * MAX_MODEL_LEN,
            "data-parallel-size": self.ranks,
            "data-parallel-size-local": self.ranks,
            "data-parallel-address": HOST,
            "data-parallel-rpc-port": self.port,
        }
        flags = ("--headless", "--enforce-eager", *([] if self.tokenizer else ["--skip-tokenizer-init"]))
        given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        launcher = ("nice", "-n", str(NICENESS), str(self.environment.python), str(self.environment.launcher))
        return [*launcher, "serve", str(model), *flags, *given, *self._arguments]

    def check_running(self) -> None:
        """Raise ``GroupNotRunning`` with the end of the log, if the engine has ended."""
        if self._process is None or self._process.poll() is not None:
            code = None if self._process is None else self._process.returncode
            raise GroupNotRunning(f"exit code {code}; the end of {self.log_path}:\n{self.log_tail()}")

    def log_tail(self, lines: int = 40) -> str:
        """The last lines of what the engine has printed."""
        try:
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return ""

    def engine_pids(self) -> dict[int, int]:
        """The engine process of each rank that is alive; they name themselves once they run."""
        return self._named("EngineCore")

    def worker_pids(self) -> dict[int, int]:
        """The process of each rank that holds the model."""
        return self._named("Worker")

    def states(self) -> dict[str, str]:
        """Name and pid of every process that names itself, and what it does: ``T`` is stopped, see proc_pid_stat(5)."""
        found = {}
        for pid in self.pids():
            name = _command_line(pid).partition("\0")[0]
            if name.startswith("VLLM::"):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    stat = Path(f"/proc/{pid}/stat").read_text()
                    found[f"{name.strip()} {pid}"] = stat.rpartition(")")[2].split()[0]
        return found

    def pids(self) -> list[int]:
        """Every process of the group that is alive."""
        return [] if self._process is None else _members(self._process.pid)

    def kill_rank(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to one rank's engine process."""
        os.kill(self.engine_pids()[rank], number)

    def stop(self, grace: float = 20.0) -> None:
        """Ask it to go, kill what is left after ``grace`` seconds, return when no process is left; can be repeated."""
        process = self._process
        if process is None:
            return
        try:
            # Frozen processes would sit out the whole grace.
            self._signal_all(signal.SIGCONT)
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(grace)
        finally:
            self._kill_all()
            assert process.stdin is not None
            process.stdin.close()
            process.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _kill_all(self) -> None:
        deadline = time.monotonic() + 10.0
        while self.pids():
            self._signal_all(signal.SIGKILL)
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes {self.pids()} of the group do not die")
            time.sleep(0.02)

    def _signal_all(self, number: signal.Signals) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _named(self, role: str) -> dict[int, int]:
        # A single engine carries no rank in its name (EngineCoreProc.run_engine_core in vllm/v1/engine/core.py).
        title = re.compile(rf"VLLM::{role}(?:_DP(\d+))?\b")
        matches = ((pid, title.match(_command_line(pid))) for pid in self.pids())
        return {int(match[1] or 0): pid for pid, match in matches if match is not None}


def free_port() -> int:
    """A port on ``HOST`` that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _members(session: int) -> list[int]:
    """Processes of a session, without those that are dead and only wait to be collected by their parent."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                # The second field is the name in parentheses and may contain anything: proc_pid_stat(5).
                state, _parent, _group, owner = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(owner) == session and state not in "ZX":
                    found.append(int(entry.name))
    return sorted(found)


def _command_line(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
