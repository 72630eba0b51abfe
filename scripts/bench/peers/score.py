"""How far the logprobs that engines report for their own answers are from `transformers` in fp32 on the same weights.

    python scripts/bench/peers/score.py MODEL ANSWERS...

Each file of answers is scored as it stands, prompt and answer in one forward, so it does not matter that engines say
different things. Prints one line of JSON a file: the mean and the largest difference in nats.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import transformers


@torch.inference_mode()
def main() -> None:
    """Score every file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("answers", type=Path, nargs="+")
    arguments = parser.parse_args()
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model / "bf16", dtype=torch.float32).eval()
    for path in arguments.answers:
        rows = json.loads(path.read_text())
        ids_BT = torch.tensor([row["prompt"] + row["ids"] for row in rows])
        reported_BT = torch.tensor([row["logprobs"] for row in rows], dtype=torch.float64)
        num_new = reported_BT.shape[1]
        logits_BTV = model(ids_BT).logits[:, -num_new - 1 : -1].double()
        expected_BT = logits_BTV.log_softmax(-1).gather(-1, ids_BT[:, -num_new:, None]).squeeze(-1)
        difference = (reported_BT - expected_BT).abs()
        result = {
            "answers": str(path),
            "tokens": difference.numel(),
            "mean_abs_nats": difference.mean().item(),
            "max_abs_nats": difference.max().item(),
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
