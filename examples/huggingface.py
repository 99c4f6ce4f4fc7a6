"""A model of Hugging Face with a data collator of its own; its weights as it reads them.

    torchrun --nproc-per-node 2 examples/huggingface.py FOLDER
"""

from __future__ import annotations

import os
import sys

import torch
from transformers import DefaultDataCollator, GPT2Config, GPT2LMHeadModel

import flexsearch


def sentences(count: int, length: int = 16) -> list[dict[str, list[int]]]:
    """Tokens that count upwards from anywhere: easy to predict."""
    rows = [[(start + k) % 32 for k in range(length)] for start in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


def main(folder: str | None = None, steps: int = 6, batch: int = 4) -> tuple[float, float]:
    """Train; returns the losses of the first and the last step. Writes the model into ``folder``."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=16, vocab_size=32, bos_token_id=0, eos_token_id=0)
    model, collate, dataset = GPT2LMHeadModel(config), DefaultDataCollator(), sentences(batch * steps)
    topology = f"ethernet-1g:{os.environ.get('WORLD_SIZE', '1')}"
    example = dict(collate(dataset[:batch]))  # the model returns its loss, so there is no loss=...
    plan = flexsearch.optimize(model, example, topology, budget=50, processes=1)
    step = flexsearch.parallelize(model, plan)
    optimizer = torch.optim.AdamW(step.parameter_groups(decay=0.01), lr=1e-2)
    losses = []
    for part in step.loader(dataset, collate_fn=collate):
        losses.append(step(part).loss.item())
        step.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    if folder is not None:
        step.save_safetensors(folder)  # for GPT2LMHeadModel.from_pretrained(folder)
        if step.rank == 0:
            config.save_pretrained(folder)
    if step.rank == 0:
        print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else None)
