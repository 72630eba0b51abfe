"""TRL's `GRPOTrainer` with transformers' generation, one step a command: `worker.py` says how it is called.

    step   one optimizer step with generation; the seconds of its parts
    first  the same, and what it trained on: ids, logprobs, gradient norm
    bare   forward and backward of the last batch by transformers alone, the mean logprob as loss

The whole step runs from `on_step_begin` to `on_step_end`; the update is all of it after `_prepare_inputs`, which
generates and scores. Runs in .venv-trl.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch
import transformers
import trl  # pyright: ignore[reportMissingImports] (.venv-trl has it)
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from worker import Channel, Row, Settings, parse

MAX_STEPS = 1000
"""More than any comparison takes."""


def tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """One word an id: `t17` is 17."""
    words = Tokenizer(models.WordLevel({f"t{index}": index for index in range(vocab_size)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    last = f"t{vocab_size - 1}"
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token=last, pad_token=last)


class TimedTrainer(trl.GRPOTrainer):
    """Notes when the parts of a step end, and what the step was trained on."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.seconds: dict[str, float] = {}
        self.rows_BT = torch.empty(0)
        self.logprobs_BT = torch.empty(0)
        self.grad_norm = 0.0

    def _generate_single_turn(self, *arguments: Any, **keywords: Any) -> Any:
        started = time.perf_counter()
        said = super()._generate_single_turn(*arguments, **keywords)
        self.seconds["generate"] = time.perf_counter() - started
        return said

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        inputs = super()._prepare_inputs(generation_batch)
        self.seconds["prepared_at"] = time.perf_counter()
        return inputs

    def _get_per_token_logps_and_entropies(self, model: Any, input_ids: Any, *arguments: Any, **keywords: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(model, input_ids, *arguments, **keywords)
        self.rows_BT, self.logprobs_BT = input_ids, found[0].detach()
        return found

    def _clip_grad_norm(self, model: Any) -> Any:
        norm = super()._clip_grad_norm(model)
        self.grad_norm = float(norm)
        return norm


class Turns(TrainerCallback):
    """Lets the trainer do a step when a command asks for it."""

    def __init__(self, channel: Channel, settings: Settings) -> None:
        self._channel = channel
        self._settings = settings
        self._trainer: TimedTrainer | None = None
        self._wants_rows = False
        self._began = 0.0

    def attach(self, trainer: TimedTrainer) -> None:
        """The trainer whose callback this is."""
        self._trainer = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Wait for a turn."""
        while (command := self._channel.next_command()) is not None and command["do"] == "bare":
            self._channel.answer(bare_s=self._bare_s())
        if command is None:
            raise SystemExit(0)
        self._wants_rows = command["do"] == "first"
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Say how long it took."""
        now, trainer = time.perf_counter(), self._trainer
        assert trainer is not None
        if trainer.rows_BT.shape != (
            shape := (self._settings.batch, self._settings.prompt_tokens + self._settings.new_tokens)
        ):
            raise SystemExit(f"trl: a step must train on {shape} ids, got {tuple(trainer.rows_BT.shape)}")
        values: dict[str, Any] = {
            "whole_s": now - self._began,
            "generate_s": trainer.seconds["generate"],
            "update_s": now - trainer.seconds["prepared_at"],
        }
        if self._wants_rows:
            values |= {
                "rows": trainer.rows_BT.tolist(),
                "logprobs": trainer.logprobs_BT.tolist(),
                "grad_norm": trainer.grad_norm,
            }
        self._channel.answer(**values)

    def _bare_s(self) -> float:
        trainer = self._trainer
        assert trainer is not None
        ids_BT, num_new = trainer.rows_BT, self._settings.new_tokens
        started = time.perf_counter()
        logits_BTV = trainer.model(input_ids=ids_BT, logits_to_keep=num_new + 1, use_cache=False).logits[:, :-1]
        chosen_BT = logits_BTV.log_softmax(-1).gather(-1, ids_BT[:, -num_new:, None])
        chosen_BT.mean().backward()
        seconds = time.perf_counter() - started
        trainer.model.zero_grad()
        return seconds


def configuration(settings: Settings, folder: str) -> trl.GRPOConfig:
    """One batch a generation and one optimizer step a batch, in fp32."""
    return trl.GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=settings.batch,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_iterations=1,
        num_generations=settings.group,
        max_completion_length=settings.new_tokens,
        generation_kwargs={"min_new_tokens": settings.new_tokens},
        temperature=settings.temperature,
        beta=0.0,
        epsilon=settings.clip_low,
        epsilon_high=settings.clip_high,
        loss_type="dapo",
        scale_rewards="none",
        router_aux_loss_coef=0.0,
        optim="adamw_torch_fused",
        learning_rate=settings.lr,
        lr_scheduler_type="constant",
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        max_steps=MAX_STEPS,
        shuffle_dataset=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=settings.seed,
    )


def main() -> None:
    """Train until there are no more commands."""
    settings, channel = parse(__doc__), Channel()
    torch.set_num_threads(settings.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(settings.model / "bf16", dtype=torch.float32)
    prompts = [" ".join(f"t{token}" for token in ids) for step in range(MAX_STEPS) for ids in settings.prompt_ids(step)]

    def reward(completion_ids: list[Row], **_: Any) -> list[float]:
        return [settings.reward(ids) for ids in completion_ids]

    turns = Turns(channel, settings)
    with tempfile.TemporaryDirectory() as folder:
        arguments = configuration(settings, folder)
        trainer = TimedTrainer(
            model=model,
            args=arguments,
            reward_funcs=reward,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer(settings.vocab_size),
            callbacks=[turns],
        )
        turns.attach(trainer)
        channel.answer(
            version=f"trl {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}",
            settings={
                "optim": str(arguments.optim),
                "loss_type": arguments.loss_type,
                "beta": arguments.beta,
                "gradient_checkpointing": arguments.gradient_checkpointing,
                "dtype": str(model.dtype),
                "attention": model.config._attn_implementation,
                "experts": model.config._experts_implementation,
                "generation": "transformers, generate with a static number of new tokens",
            },
        )
        trainer.train()


if __name__ == "__main__":
    main()
