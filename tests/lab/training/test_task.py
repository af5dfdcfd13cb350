from pathlib import Path

import pytest
from torch import nn

from gossamer.lab.training import Run, train
from gossamer.lab.training.task import ImageTask, Tell, TextTask

IMAGES = Run(model="digits_cnn", model_options={"width": 4}, data="digits", batch_size=8, validation=10, device="cpu")
WORDS = Run(model="lstm_lm", model_options={"hidden": 8}, data="wikitext2", batch_size=4, bptt=7, device="cpu")


@pytest.mark.parametrize(("kind", "run", "data"), [(ImageTask, IMAGES, "images"), (TextTask, WORDS, "text")])
def test_the_test_set_is_looked_at_once_after_the_last_step(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    kind: type[ImageTask | TextTask],
    run: Run,
    data: str,
) -> None:
    request.getfixturevalue(data)
    seen: list[str] = []
    evaluate = kind.evaluate

    def noting(task: ImageTask | TextTask, model: nn.Module, part: str, tell: Tell) -> float:
        seen.append(part)
        return evaluate(task, model, part, tell)  # type: ignore[arg-type]

    monkeypatch.setattr(kind, "evaluate", noting)
    train(run.with_settings(["epochs=3"]), tmp_path)
    assert seen == ["validation"] * 4 + ["test"]  # after each epoch, and of the finished network
