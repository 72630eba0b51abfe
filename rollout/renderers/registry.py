"""The chat formats by name."""

from __future__ import annotations

from tokenizers import Tokenizer

from rollout.config import ChatFormat
from rollout.renderers.base import Renderer
from rollout.renderers.chatml import ChatmlRenderer
from rollout.renderers.deepseek import DeepseekRenderer
from rollout.renderers.harmony import HarmonyRenderer
from rollout.renderers.kimi import KimiRenderer
from rollout.renderers.native import NativeRenderer

RENDERERS: dict[ChatFormat, type[Renderer]] = {
    ChatFormat.native: NativeRenderer,
    ChatFormat.chatml: ChatmlRenderer,
    ChatFormat.qwen2_5: ChatmlRenderer,
    ChatFormat.smollm2: ChatmlRenderer,
    ChatFormat.harmony: HarmonyRenderer,
    ChatFormat.kimi: KimiRenderer,
    ChatFormat.deepseek: DeepseekRenderer,
}


def make_renderer(name: ChatFormat, tokenizer: Tokenizer) -> Renderer:
    """The renderer of the chat format `name` with `tokenizer`.

    Raises:
        RendererError: the tokenizer lacks a control token of the format.
    """
    return RENDERERS[name](name, tokenizer)
