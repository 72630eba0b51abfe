"""llama.cpp through the Python binding's batch calls: `workload.py` has the command line. Runs in `.venv-peers`.

Modes are the GGUF files that `write_gguf.py` makes. One call takes all prompts, then one call a step takes the batch's
last ids; the greedy choice is NumPy's argmax over the step's logits. The cache is llama.cpp's default, fp16.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from workload import Answer, Engine, Prompts, Workload, parse, run

_BUILT = Path(sys.prefix) / "llama.cpp" / "build" / "bin"
_MODES = ("f32", "bf16", "q8_0", "mxfp4", "mxfp4_q8_0")
_LOG_LEVEL_ERROR = 4

Entry = tuple[int, int, int, bool]
"""Id, position, sequence, and whether its logits are wanted."""


def _binding() -> tuple[Any, str]:
    os.environ["LLAMA_CPP_LIB_PATH"] = str(_BUILT)
    import llama_cpp  # pyright: ignore[reportMissingImports]

    return llama_cpp.llama_cpp, llama_cpp.__version__


class LlamaCpp(Engine):
    """A context with one sequence a prompt."""

    peer = "llama.cpp"

    def __init__(self, workload: Workload) -> None:
        self._api, version = _binding()
        self.version = f"llama-cpp-python {version}"
        self._log = self._api.llama_log_callback(_print_errors)
        self._api.llama_log_set(self._log, ctypes.c_void_p())
        self._api.llama_backend_init()
        path = workload.model / f"{workload.mode}.gguf"
        model = self._api.llama_model_load_from_file(str(path).encode(), self._api.llama_model_default_params())
        if not model:
            raise SystemExit(f"{path}: must be a GGUF file that llama.cpp reads, got an error; make it with models.py")
        parameters = self._api.llama_context_default_params()
        parameters.n_ctx = workload.batch * workload.max_tokens
        parameters.n_batch = workload.batch * workload.prompt_tokens
        parameters.n_seq_max = workload.batch
        parameters.n_threads = parameters.n_threads_batch = workload.threads
        self._context = self._api.llama_init_from_model(model, parameters)
        if not self._context:
            raise SystemExit(f"{path}: a context must be made, got an error; take a smaller batch")
        self._vocab_size = workload.vocab_size
        self._batch = self._api.llama_batch_init(parameters.n_batch, 0, 1)

    def generate(self, prompts: Prompts, new_tokens: int) -> Prompts:
        """See `Engine`."""
        answers: Prompts = [[] for _ in prompts]
        for logits_BV in self._steps(prompts, answers, new_tokens):
            for answer, token in zip(answers, logits_BV.argmax(-1).tolist(), strict=True):
                answer.append(token)
        return answers

    def answers(self, prompts: Prompts, new_tokens: int) -> list[Answer]:
        """See `Engine`."""
        answers: Prompts = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        for logits_BV in self._steps(prompts, answers, new_tokens):
            shifted_BV = logits_BV.astype(np.float64) - logits_BV.max(-1, keepdims=True)
            best_B = -np.log(np.exp(shifted_BV).sum(-1))  # the chosen id has the largest logit: 0 after the shift
            for row, token in enumerate(logits_BV.argmax(-1).tolist()):
                answers[row].append(token)
                logprobs[row].append(float(best_B[row]))
        return list(zip(answers, logprobs, strict=True))

    def _steps(self, prompts: Prompts, answers: Prompts, new_tokens: int) -> Iterator[np.ndarray]:
        """The logits of each step, fp32 [B, V]; the caller adds an id to every answer before the next."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        length = len(prompts[0])
        entries = [
            (token, position, sequence, position == length - 1)
            for sequence, ids in enumerate(prompts)
            for position, token in enumerate(ids)
        ]
        for step in range(new_tokens):
            yield self._decode(entries, len(prompts))
            entries = [(answer[-1], length + step, sequence, True) for sequence, answer in enumerate(answers)]

    def _decode(self, entries: Iterable[Entry], num_rows: int) -> np.ndarray:
        """The wanted logits, fp32 [num_rows, V], in the order of the entries; a view that the next call overwrites."""
        batch, count = self._batch, 0
        for token, position, sequence, wanted in entries:
            batch.token[count] = token
            batch.pos[count] = position
            batch.n_seq_id[count] = 1
            batch.seq_id[count][0] = sequence
            batch.logits[count] = wanted
            count += 1
        batch.n_tokens = count
        if code := self._api.llama_decode(self._context, batch):
            raise SystemExit(f"llama_decode: must succeed, got code {code}; take a smaller batch")
        return np.ctypeslib.as_array(self._api.llama_get_logits(self._context), (num_rows, self._vocab_size))


def _print_errors(level: int, text: bytes, _: Any) -> None:
    if level == _LOG_LEVEL_ERROR:
        sys.stderr.write(text.decode(errors="replace"))


def main() -> None:
    """Measure one mode."""
    workload = parse(__doc__, _MODES)
    run(workload, LlamaCpp(workload))


if __name__ == "__main__":
    main()
