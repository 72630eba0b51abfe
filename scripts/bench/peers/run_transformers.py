"""`transformers` on the decoded weights: `workload.py` has the command line. Modes: the dtype of weights and compute.

Attention is the library's default, SDPA where the model allows it. `transformers` offers three ways through the
experts; `_loop` is the one that multiplies an expert at a time, the plain mode is the library's default, grouped_mm.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from workload import Answer, Engine, Prompts, Workload, parse, run

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_LOOP = "_loop"


class Transformers(Engine):
    """A causal language model with its own cache and `generate`."""

    peer = "transformers"
    version = transformers.__version__

    def __init__(self, workload: Workload) -> None:
        dtype = _DTYPES[workload.mode.removesuffix(_LOOP)]
        experts = {"experts_implementation": "eager"} if workload.mode.endswith(_LOOP) else {}
        model = transformers.AutoModelForCausalLM.from_pretrained(workload.model / "bf16", dtype=dtype, **experts)
        self._model: Any = model.eval().requires_grad_(False)

    def generate(self, prompts: Prompts, new_tokens: int) -> Prompts:
        """See `Engine`."""
        return self._run(prompts, new_tokens)[:, len(prompts[0]) :].tolist()

    def answers(self, prompts: Prompts, new_tokens: int) -> list[Answer]:
        """See `Engine`."""
        out = self._run(prompts, new_tokens, output_scores=True, return_dict_in_generate=True)
        ids_BT = out.sequences[:, len(prompts[0]) :]
        logprobs_BTV = torch.stack(out.scores, 1).float().log_softmax(-1)
        logprobs_BT = logprobs_BTV.gather(-1, ids_BT[..., None]).squeeze(-1)
        return list(zip(ids_BT.tolist(), logprobs_BT.tolist(), strict=True))

    @torch.inference_mode()
    def _run(self, prompts: Prompts, new_tokens: int, **arguments: Any) -> Any:
        ids = torch.tensor(prompts)
        return self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            eos_token_id=None,
            pad_token_id=0,
            **arguments,
        )


def main() -> None:
    """Measure one mode."""
    workload = parse(__doc__, [dtype + way for dtype in _DTYPES for way in ("", _LOOP)])
    torch.set_num_threads(workload.threads)
    run(workload, Transformers(workload))


if __name__ == "__main__":
    main()
