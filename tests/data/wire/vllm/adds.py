"""Write ``<release>/adds.json``: what that release's own classes encode for requests that carry all there is.

PYTHONPATH=tests python tests/data/wire/vllm/adds.py

It runs itself once per release, with the interpreter and the import path of ``tests/interop/releases.py``. No engine
runs. The values are made up; they are those that an engine's own front end would have set for such a request.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def tensors() -> tuple[Any, Any, Any]:
    """One for a frame of its own, one in line, and a mask."""
    import torch  # type: ignore[import-not-found, unused-ignore]

    large = torch.arange(96, dtype=torch.float32).reshape(8, 12)
    return large, torch.tensor([[1, 2, 3]], dtype=torch.int64), torch.tensor([True, False])


def item() -> Any:
    """An item of two arrays, or what the oldest release has instead."""
    from vllm.multimodal import inputs  # type: ignore[import-not-found, unused-ignore]

    large, small, _ = tensors()
    fields = {
        "pixel_values": (large, inputs.MultiModalFlatField(slices=[slice(0, 8)])),
        "image_grid_thw": (small, inputs.MultiModalBatchedField()),
    }
    elem = inputs.MultiModalFieldElem
    if "key" not in elem.__dataclass_fields__:
        return inputs.MultiModalKwargsItem({key: elem(data=data, field=field) for key, (data, field) in fields.items()})
    elems = [elem(modality="image", key=key, data=data, field=field) for key, (data, field) in fields.items()]
    return inputs.MultiModalKwargsItem.from_elems(elems)


def with_features(names: tuple[str, ...]) -> dict[str, Any]:
    """The fields that carry a feature."""
    from vllm.multimodal import inputs  # type: ignore[import-not-found, unused-ignore]

    place = inputs.PlaceholderRange(offset=1, length=2, is_embed=tensors()[2])
    if "mm_features" in names:
        spec = inputs.MultiModalFeatureSpec
        more = {"mm_hash": "hash"} if "mm_hash" in spec.__dataclass_fields__ else {}
        feature = spec(data=item(), modality="image", identifier="hash", mm_position=place, **more)
        return {"mm_features": [feature]}
    if "mm_kwargs" in names:
        inputs_of = {"mm_kwargs": [item()]}
    else:
        inputs_of = {"mm_inputs": [inputs.MultiModalKwargs.from_items([item()])]}
    return {**inputs_of, "mm_hashes": ["hash"], "mm_placeholders": [place]}


def requests(names: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, fields that differ from the plainest request)."""
    from vllm.lora.request import LoRARequest  # type: ignore[import-not-found, unused-ignore]
    from vllm.pooling_params import PoolingParams  # type: ignore[import-not-found, unused-ignore]
    from vllm.sampling_params import SamplingParams  # type: ignore[import-not-found, unused-ignore]

    yield "plain", {}
    params = SamplingParams(temperature=0.5, top_p=0.9, top_k=5, seed=7, max_tokens=9, min_tokens=1, stop_token_ids=[4])
    params.presence_penalty, params.logprobs, params.logit_bias = 0.5, 2, {3: -1.5}
    params._all_stop_token_ids = {4, 2}
    if hasattr(params, "_eos_token_id"):
        params._eos_token_id = 2
    eos = {"eos_token_id": 2} if "eos_token_id" in names else {}
    yield "sampled", {"sampling_params": params, **eos}
    yield "salted and sooner", {"cache_salt": "salt", "priority": -3, "arrival_time": 1.5}
    yield "with an adapter", {"lora_request": LoRARequest("sql", 7, "/sql")}
    pooling = PoolingParams(task="embed", dimensions=8)
    for switch in ("use_activation", "normalize", "softmax", "activation"):
        if hasattr(pooling, switch):
            setattr(pooling, switch, True)
    yield "pooled", {"sampling_params": None, "pooling_params": pooling}
    if "prompt_embeds" in names:
        yield "of embeddings", {"prompt_token_ids": None, "prompt_embeds": tensors()[0]}
    if "prompt_is_token_ids" in names:
        mask = [True, *[False] * 7]
        yield "of both", {"prompt_token_ids": [3] * 8, "prompt_embeds": tensors()[0], "prompt_is_token_ids": mask}
    if "session_id" in names:
        yield "of a session", {"session_id": "mine"}
    yield "with a feature", with_features(names)


def of_this_release() -> dict[str, Any]:
    """With whatever ``import vllm`` finds."""
    from interop.release_judge import stub_what_is_missing

    stub_what_is_missing()
    from vllm.sampling_params import SamplingParams  # type: ignore[import-not-found, unused-ignore]
    from vllm.v1.engine import EngineCoreRequest  # type: ignore[import-not-found, unused-ignore]
    from vllm.v1.serial_utils import MsgpackEncoder  # type: ignore[import-not-found, unused-ignore]

    names = EngineCoreRequest.__struct_fields__
    required = names[: names.index("data_parallel_rank") + 1]
    plainest = dict.fromkeys(required) | {
        "request_id": "a#1",
        "prompt_token_ids": [1, 2, 3],
        "sampling_params": SamplingParams(max_tokens=16),
        "arrival_time": 0.0,
    }
    encoded = {name: MsgpackEncoder().encode(EngineCoreRequest(**plainest | more)) for name, more in requests(names)}
    return {"frames": {name: [bytes(frame).hex() for frame in frames] for name, frames in encoded.items()}}


def main() -> None:
    """Ask every release that is there."""
    from interop.environment import DEFAULT_VERSION
    from interop.releases import RELEASES, find

    for version in (*RELEASES, DEFAULT_VERSION):
        release = find(version)
        if release is None:
            print(f"{version} is not there")
            continue
        with tempfile.TemporaryDirectory() as scratch:
            variables = release.variables(Path(scratch))
            variables["PYTHONPATH"] += f":{HERE.parents[2]}"
            asked = subprocess.run(
                [release.python, __file__, "--here"], env=variables, stdout=subprocess.PIPE, text=True, check=True
            )
        path = HERE / version / "adds.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(json.loads(asked.stdout.splitlines()[-1]), indent=1) + "\n")
        print(path.relative_to(HERE))


if __name__ == "__main__":
    if sys.argv[1:] == ["--here"]:
        print(json.dumps(of_this_release()))
    else:
        main()
