"""The definition of routing: which experts a token gets from its router logits, and with what weights.

    scores    softmax of the logits over all experts, or a sigmoid of each (DeepSeek-V3, section 2.1.2)
    choice    the K largest scores, best first; with a selection bias the K largest of score + bias, within the groups
              whose two best sum highest. Of equal ones the expert, or the group, with the smaller index
    weights   the chosen scores (without bias), divided by their sum if `normalize`, times `scaling`

Without bias and groups the choice is made on the logits themselves, with which either score grows.

Shapes: T packed tokens, E experts, K experts a token, N groups of experts.
"""

from __future__ import annotations

import torch


def route(
    logits_TE: torch.Tensor,
    *,
    top_k: int,
    scores: str,
    normalize: bool,
    scaling: float,
    selection_bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose and weigh.

    Args:
        logits_TE: fp32.
        top_k: K.
        scores: "softmax" or "sigmoid".
        normalize: Whether a token's weights sum to `scaling`.
        scaling: Factor of all weights.
        selection_bias: fp32 [E], added to the scores in the choice only.
        num_groups: N, a divisor of E with two experts or more in a group.
        top_groups: Groups that a token may choose from.

    Returns:
        Choices, int64 [T, K], and weights, fp32 [T, K].
    """
    with torch.no_grad():
        chosen_TK = _choose(logits_TE, top_k, scores, selection_bias, num_groups, top_groups)
    return chosen_TK, weigh(logits_TE, chosen_TK, scores=scores, normalize=normalize, scaling=scaling)


def weigh(
    logits_TE: torch.Tensor, chosen_TK: torch.Tensor, *, scores: str, normalize: bool, scaling: float
) -> torch.Tensor:
    """The weights of a choice, fp32 [T, K]; differentiable in the logits."""
    picked_TK = logits_TE.gather(-1, chosen_TK)
    if scores == "sigmoid":
        weights_TK = picked_TK.sigmoid()
        if normalize:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    elif normalize:  # a softmax over all, divided by the chosen ones' sum, is a softmax over the chosen ones
        weights_TK = picked_TK.softmax(-1)
    else:
        weights_TK = logits_TE.softmax(-1).gather(-1, chosen_TK)
    return weights_TK if scaling == 1.0 else weights_TK * scaling


def _choose(
    logits_TE: torch.Tensor,
    top_k: int,
    scores: str,
    selection_bias: torch.Tensor | None,
    num_groups: int,
    top_groups: int,
) -> torch.Tensor:
    if selection_bias is None and num_groups == 1:
        return _largest(logits_TE, top_k)
    scores_TE = logits_TE.sigmoid() if scores == "sigmoid" else logits_TE.softmax(-1)
    if selection_bias is not None:
        scores_TE = scores_TE + selection_bias.float()
    if num_groups > 1:
        grouped_TNE = scores_TE.unflatten(-1, (num_groups, -1))
        best_TN = _largest(grouped_TNE.topk(2, dim=-1).values.sum(-1), top_groups)
        closed_TN = torch.ones_like(grouped_TNE[..., 0], dtype=torch.bool).scatter_(-1, best_TN, False)
        scores_TE = grouped_TNE.masked_fill(closed_TN.unsqueeze(-1), -torch.inf).flatten(-2)
    return _largest(scores_TE, top_k)


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the largest along the last axis; `topk` promises no order of equal ones."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]
