"""torchtune: the shape of its full_finetune_single_device recipe, on a small Llama over the bytes of a Python module.

pip install gossamer torchtune "torchao<0.14"    # the last torchtune imports what later versions of torchao dropped
python examples/torchtune_recipe.py --epochs 4
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from torchtune import modules, training
from torchtune.models.llama3_2 import llama3_2
from torchtune.modules.loss import CEWithChunkedOutputLoss
from torchtune.training.lr_schedulers import get_cosine_schedule_with_warmup

import gossamer

LENGTH, BATCH, ACCUMULATED = 64, 8, 2  # tokens, sequences, batches per step


def sequences() -> Tensor:
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    return text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)


def setup(steps: int) -> tuple[modules.TransformerDecoder, torch.optim.Optimizer, gossamer.Sparsifier]:
    size = {"embed_dim": 64, "intermediate_dim": 256, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    model = llama3_2(vocab_size=256, max_seq_len=LENGTH, **size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return model, optimizer, gossamer.Sparsifier(model, optimizer, sparsity=0.8, total_steps=steps)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    epochs = parser.parse_args().epochs
    training.set_seed(0)
    data, loss_fn = sequences(), CEWithChunkedOutputLoss(num_output_chunks=4)
    per_epoch = len(data) // (BATCH * ACCUMULATED)
    model, optimizer, sparsifier = setup(per_epoch * epochs)
    model.set_num_output_chunks(loss_fn.num_output_chunks)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=10, num_training_steps=per_epoch * epochs)
    for epoch in range(epochs):
        batches = data[torch.randperm(len(data))].split(BATCH)
        for number, batch in enumerate(batches[: per_epoch * ACCUMULATED], 1):
            loss = loss_fn(model(batch[:, :-1]), batch[:, 1:]) / ACCUMULATED
            loss.backward()
            if number % ACCUMULATED == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                schedule.step()
        print({"epoch": epoch, "loss": round(ACCUMULATED * loss.item(), 3), **sparsifier.metrics()})
    sparsifier.finish()
    print(gossamer.report(model))


if __name__ == "__main__":
    main()
