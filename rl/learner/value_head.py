"""The critic: a linear value head on the policy's trunk, in fp32, with an optimizer of its own.

It reads the same hidden state that the next token's logits are computed from, so a token's value is that of the state
before it. Its gradient reaches the trunk too (weighed with `algorithm.value_coef`). It is no part of the model: nothing
of it is quantized or published, and it is saved beside the optimizer's state. Both start at 0: the first values are 0.

The learning rate is its own because a head that starts from nothing has further to go than a trunk that is fine-tuned;
it is constant. Gradients are summed over the ranks, like the trunk's: the losses carry their global denominators.

Shapes: R trainable tokens, D model dim.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from model.parallel.groups import Ranks
from rl.learner.counted_file import load_counted, save_counted
from rl.learner.deepspeed import MOMENTS

VALUE_HEAD_FILE = "value_head.safetensors"


class ValueHeadError(ValueError):
    """A checkpoint without the value head that the run needs, or with one of another size."""


class ValueHead(nn.Module):
    """Values of hidden states."""

    def __init__(self, hidden_size: int, *, lr: float, beta1: float, beta2: float, max_grad_norm: float):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size))
        self.bias = nn.Parameter(torch.zeros(1))
        self._max_grad_norm = max_grad_norm
        self._optimizer = torch.optim.AdamW(self.parameters(), lr=lr, betas=(beta1, beta2), weight_decay=0.0)

    def forward(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """fp32 [R]."""
        return hidden_RD.float() @ self.weight + self.bias

    def step(self, ranks: Ranks) -> None:
        """Add the ranks' gradients up, clip (that of the head alone), update, clear; all ranks call it.

        The sum is in rank order on every rank, so that the heads stay the same to the last bit.
        """
        own = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters()]
        everyones = ranks.gather(own)
        for index, parameter in enumerate(self.parameters()):
            parameter.grad = torch.stack([gradients[index] for gradients in everyones]).sum(0)
        nn.utils.clip_grad_norm_(self.parameters(), self._max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        """Write parameters, moments and the number of steps taken."""
        stored = {name: p.detach().clone() for name, p in self.named_parameters()}
        num_steps = 0
        for name, parameter in self.named_parameters():
            state = self._optimizer.state.get(parameter)
            if state:
                num_steps = int(state["step"])
                stored |= {f"{moment}/{name}": state[moment].clone() for moment in MOMENTS}
        save_counted(folder / VALUE_HEAD_FILE, stored, num_steps)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote, to the last bit. Raises ValueHeadError when it is missing or another's."""
        file = folder / VALUE_HEAD_FILE
        if not file.is_file():
            raise ValueHeadError(
                f"checkpoint {folder.name}: must hold the value head of the run, got no {VALUE_HEAD_FILE}; resume with "
                "the algorithm it was saved with"
            )
        stored, num_steps = load_counted(file)
        if stored["weight"].shape != self.weight.shape:
            raise ValueHeadError(
                f"checkpoint {folder.name}: its value head must read {len(self.weight)} numbers, got "
                f"{len(stored['weight'])}; use the model settings it was saved with"
            )
        self._optimizer.state.clear()
        for name, parameter in self.named_parameters():
            parameter.copy_(stored[name])
            if num_steps:
                moments = {moment: stored[f"{moment}/{name}"].clone() for moment in MOMENTS}
                self._optimizer.state[parameter] = {"step": torch.tensor(float(num_steps)), **moments}
