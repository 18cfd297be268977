"""TRL's `GRPOTrainer` on a task of ours, its weights saved every few steps; see `learning.py`.

Reads one JSON object from standard input: `folder` (the policy), `rows` (prompt and answer, in the
order in which they are to be met), `output`, and the settings of `learning.Settings`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def exact_match(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """As `recipes.tasks.embedded.exact_match`, which this environment cannot import."""
    return [
        float(completion.rpartition("\n")[2].strip(" ") == right)
        for completion, right in zip(completions, answer, strict=True)
    ]


def main() -> None:
    job = json.load(sys.stdin)
    settings = job["settings"]
    torch.set_num_threads(job["threads"])
    rows = settings["prompts_per_step"] * settings["group_size"]
    arguments = GRPOConfig(
        output_dir=job["output"],
        use_cpu=True, bf16=False, gradient_checkpointing=False, seed=settings["seed"],
        learning_rate=settings["learning_rate"], lr_scheduler_type="constant",
        optim="adamw_torch", adam_beta1=0.9, adam_beta2=0.95, weight_decay=0.0, max_grad_norm=1.0,
        beta=0.0, loss_type="dapo", num_iterations=1, epsilon=0.2,
        per_device_train_batch_size=rows, gradient_accumulation_steps=1,
        num_generations=settings["group_size"], temperature=1.0,
        max_completion_length=settings["max_tokens"],
        max_steps=settings["steps"], logging_steps=1, save_steps=settings["every"],
        save_only_model=True, report_to="none", disable_tqdm=True, shuffle_dataset=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(job["folder"], dtype=torch.float32),
        reward_funcs=exact_match,
        args=arguments,
        train_dataset=Dataset.from_list(job["rows"]),
        processing_class=AutoTokenizer.from_pretrained(job["folder"]),
    )
    trainer.train()
    seconds = sum(entry.get("step_time", 0.0) for entry in trainer.state.log_history)
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    with open(f"{job['output']}/rewards.json", "w", encoding="utf-8") as file:
        json.dump({"rewards": rewards, "seconds": seconds}, file)


if __name__ == "__main__":
    main()
