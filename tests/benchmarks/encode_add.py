"""What it costs to check a request and to make its ADD, beside MessagePack alone.

python tests/benchmarks/encode_add.py
"""

from __future__ import annotations

from collections.abc import Callable

import msgpack
from read_outputs import shortest

from lockstep_trio import EngineCoreRequest, SamplingParams, VllmProtocol
from lockstep_trio.engines.protocol import RankInfo


def adds(version: str) -> Callable[[EngineCoreRequest], object]:
    """What makes the ADD for engines of a release."""
    protocol = VllmProtocol(vocab_size=151_936, version=version, max_model_len=32_768)
    session = protocol.session([RankInfo(0, data_parallel_size=1)])
    return lambda request: session.encode_add(request, "request-1#1")


def main() -> None:
    """Print a line per case."""
    few = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=512, eos_token_id=2)
    for length in (1, 128, 4_096, 32_000):
        request = EngineCoreRequest([at * 7 % 151_936 for at in range(length)], few)
        array = ["request-1#1", request.prompt_token_ids, None, {"max_tokens": 512}, None, 0.0, None, None, None]
        alone = shortest(lambda: msgpack.packb(array))  # noqa: B023  # run at once
        for version in ("0.32.0", "0.10.0"):
            encode = adds(version)
            took = shortest(lambda: encode(request))  # noqa: B023
            print(f"{length:6} tokens, vLLM {version}: {took:8.1f} us, {took / alone:5.2f} x MessagePack alone")


if __name__ == "__main__":
    main()
