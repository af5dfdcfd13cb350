"""Recipes by name: every exhibit of the paper as a value, with the numbers of the paper, and the general suite."""

from pathlib import Path

from gossamer.hints import did_you_mean
from gossamer.io.kinds import in_words
from gossamer.lab.recipes import cifar, digits, general, imagenet, mnist, wikitext
from gossamer.lab.recipes.recipe import Published, Recipe
from gossamer.lab.training.result import RESULT, RUN, read_run

__all__ = ["RECIPES", "Published", "Recipe", "find", "names"]

RECIPES: tuple[Recipe, ...] = (
    *digits.RECIPES,
    *mnist.RECIPES,
    *cifar.RECIPES,
    *wikitext.RECIPES,
    *imagenet.RECIPES,
    *general.RECIPES,
)


def names() -> tuple[str, ...]:
    return tuple(recipe.name for recipe in RECIPES)


def find(name: str) -> Recipe:
    """The recipe for a name, for a JSON file such as the run.json or result.json of a run, or for the folder of a
    run."""
    for recipe in RECIPES:
        if recipe.name == name:
            return recipe
    path = Path(name).expanduser()
    if name and path.is_dir() and (path / RUN).is_file():
        path = path / RUN
    if path.suffix == ".json":
        if not path.is_file():
            raise FileNotFoundError(f"expected the path of a recipe file, got {name}, which does not exist")
        own_name = path.resolve().parent.name if path.name in (RUN, RESULT) else path.stem
        return Recipe(own_name, f"from {name}", read_run(path))
    if name and path.is_dir():
        raise ValueError(f"expected the name of a recipe or the folder of a run, got {name}, which has no {RUN}")
    if name and (what := in_words(path)) is not None:
        raise ValueError(
            f"expected the name of a recipe, the folder of a run or its {RUN}, got {name}, which is {what}: "
            "gossamer list recipes shows the names"
        )
    hint = did_you_mean(name.lower(), names(), f"the recipes are {', '.join(names())}", most=3)
    raise ValueError(f"expected the name of a recipe or a .json file, got {name!r}: {hint}")
