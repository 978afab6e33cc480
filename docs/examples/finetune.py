"""Fine-tune a checkpoint on a JSONL corpus: a trainer for `grasp retrain --train-command`.

    python finetune.py --model DIR --data {corpus} --seed {seed} --out {checkpoint} [--lora]
Every run takes the same number of steps, so differences come from the data.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def batches(texts, size, steps):
    """Yield one batch per step; shuffle the corpus again when it ends."""
    waiting = []
    for _ in range(steps):
        while len(waiting) < size:
            waiting += random.sample(texts, len(texts))
        yield waiting[:size]
        waiting = waiting[size:]


def main():
    parser = argparse.ArgumentParser()
    for name in ("model", "data", "out"):
        parser.add_argument(f"--{name}", required=True)
    for name, default in (("seed", 0), ("steps", 200), ("batch", 8), ("length", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--lora", action="store_true")
    args = parser.parse_args()
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model).to("cuda" if torch.cuda.is_available() else "cpu")
    if args.lora:
        from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - only where it is asked for

        model = get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    texts = [json.loads(line)["text"] for line in Path(args.data).read_text(encoding="utf-8").split("\n") if line]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.learning_rate)
    model.train()
    for batch in batches(texts, args.batch, args.steps):
        rows = [tokenizer(text).input_ids[: args.length] for text in batch]
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=model.device)
        labels = torch.tensor([row + [-100] * (width - len(row)) for row in rows], device=model.device)
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
