"""`transformers` on the decoded weights: `workload.py` has the command line. Modes: the dtype of weights and compute.

Attention is the library's default, SDPA where the model allows it. `transformers` offers three ways through the
experts; `_loop` is the one that multiplies an expert at a time, the plain mode is the library's default, grouped_mm.
"""

from __future__ import annotations

import torch
import transformers
from workload import Engine, Prompts, Workload, parse, run

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
        self._model = model.eval().requires_grad_(False)

    @torch.inference_mode()
    def generate(self, prompts: Prompts, new_tokens: int) -> Prompts:
        """See `Engine`."""
        ids = torch.tensor(prompts)
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        return out[:, ids.shape[1] :].tolist()

    @torch.inference_mode()
    def prompt_logprobs(self, prompts: Prompts) -> list[list[float]]:
        """See `Engine`."""
        ids = torch.tensor(prompts)
        logprobs = self._model(ids).logits[:, :-1].float().log_softmax(-1)
        return logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1).tolist()


def main() -> None:
    """Measure one mode."""
    workload = parse(__doc__, [dtype + way for dtype in _DTYPES for way in ("", _LOOP)])
    torch.set_num_threads(workload.threads)
    run(workload, Transformers(workload))


if __name__ == "__main__":
    main()
