"""TRL's own GRPO loss and its gradient on given tokens; runs in TRL's environment, not in ours.

    python trl_loss.py FOLDER       FOLDER has model/, batch.npz and settings.json, a list of
                                    attributes of the trainer; writes 0.npz, 1.npz, ... of `loss`
                                    and the gradient of each parameter
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

ARGS = {
    "use_bias_correction_kl": False, "delta": None, "steps_per_generation": 1,
    "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "entropy_target": None,
}  # fmt: skip
ATTRIBUTES = {
    "aux_loss_enabled": False, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None,
    "importance_sampling_level": "token", "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2,
    "use_vllm": False, "vllm_importance_sampling_correction": False,
    "current_gradient_accumulation_steps": 1, "_entropy_bonus_enabled": False,
    "use_adaptive_entropy": False,
}  # fmt: skip


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))
    inputs = {k: torch.from_numpy(v) for k, v in np.load(folder / "batch.npz").items()}
    for number, settings in enumerate(json.loads((folder / "settings.json").read_text())):
        trainer = object.__new__(GRPOTrainer)  # all that the loss reads of it
        trainer.__dict__.update(ATTRIBUTES, **settings)
        trainer.__dict__.update(
            model=model, accelerator=Accelerator(cpu=True), args=SimpleNamespace(**ARGS),
            _metrics={"eval": defaultdict(list)},
        )  # fmt: skip
        model.zero_grad()
        loss = trainer._compute_loss(model, inputs)
        loss.backward()
        gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}
        np.savez(folder / f"{number}.npz", loss=loss.detach().numpy(), **gradients)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
