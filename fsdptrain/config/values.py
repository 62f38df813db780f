"""Check single values: types, limits, and the value that was probably meant."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fsdptrain.config.names import MEANT
from fsdptrain.config.schema import (
    Recipe,
    all_fields,
    attribute,
    fits,
    form_words,
    forms_of,
    get,
    limits_of,
    spelled,
    type_words,
    words_of,
)
from fsdptrain.config.syntax import _RecipeLoader
from fsdptrain.errors import Problem


def _not_taken(path: str, value: Any) -> str:
    """What to say about a value that its key does not take: what it takes, and the nearest value if there is one."""
    near = next((meant for meant in _candidates(path, value) if _accepted(path, meant)), None)
    hint = ""
    if isinstance(value, str) and "${" in value:
        hint = "; ${key} stands for another key of the recipe, not for a variable of the environment (~ is your home)"
    elif isinstance(near, (int, float)) and isinstance(value, str) and _number(value) == near:
        hint = f"; did you mean {value.strip().replace(',', '')}, a number without quotes?"
    elif near is not None:
        hint = f"; did you mean {_yaml(near)}?"
    return f"{_show(value)} is not {_expected(path)}{hint}"


def _candidates(path: str, value: Any) -> Iterator[Any]:
    """Yield what may have been meant by a value, the likeliest first."""
    words = words_of(path)
    said = value.lower() if isinstance(value, str) else value
    if isinstance(value, (str, bool, type(None))) and said in (known := MEANT.get(path, {})):
        yield known[said]
    if isinstance(value, str):
        yield from {"yes": [True], "on": [True], "true": [True], "no": [False], "off": [False], "false": [False]}.get(
            value.strip().lower(), []
        )
        yield from [number] if (number := _number(value)) is not None else []
        yield from (spelled(path, word) for word in get_close_matches(value.lower(), [w.lower() for w in words], n=1))
        yield [value]
    if isinstance(value, int):
        yield bool(value)
    if isinstance(value, float) and value.is_integer():
        yield int(value)
    for form in forms_of(path):
        if isinstance(form, dict):  # its value alone was written
            yield {next(iter(form)).rstrip("?"): value}


def _number(text: str) -> Any:
    """Return the number that a text would be without quotes and commas, else None."""
    try:
        value = yaml.load(text.strip().replace(",", ""), Loader=_RecipeLoader) if len(text) < 30 else None
    except (yaml.YAMLError, ValueError):
        return None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _accepted(path: str, value: Any) -> bool:
    """Whether a key takes this value, by its type and its limits."""
    forms = forms_of(path)
    if _open(path) or (forms and not any(fits(value, form) for form in forms)):
        return False
    config = OmegaConf.structured(Recipe)
    try:
        OmegaConf.update(config, attribute(path), value, merge=False)
        return _unconverted(value, OmegaConf.select(config, attribute(path))) and not _limit_broken(
            path,
            get(OmegaConf.to_object(config), path),  # type: ignore[arg-type]
        )
    except (OmegaConfBaseException, ValueError, TypeError, OverflowError, RecursionError):
        return False


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


def _unconverted(written: Any, read: Any) -> bool:
    """Whether OmegaConf kept the value's kind: it would take `"010"` for ten and 1 for true."""
    if isinstance(written, str) and "${" in written:
        return True
    if isinstance(read, bool) or isinstance(written, bool):
        return written is read
    if isinstance(written, list) and not isinstance(read, str):
        return all(_unconverted(a, b) for a, b in zip(written, read, strict=False))
    return not isinstance(read, (int, float)) or not isinstance(written, str)


def _out_of_range(recipe: Recipe, where: dict[str, str]) -> list[Problem]:
    """Values of the right type outside their limits."""
    problems = []
    for path, spec in all_fields():
        value = get(recipe, path)
        written = [place for place in where if place == path or place.startswith(f"{path}.")]
        if not written and path != "output_dir":
            continue
        if value is None and None in spec.metadata.get("forms", (None,)):
            continue
        message = _limit_broken(path, value)
        if path == "optim.betas" and not (len(value) == 2 and all(0 <= beta < 1 for beta in value)):
            message = f"{_show(value)} are not two numbers in [0, 1)"
        if message:
            problems.append(Problem(message, path, where[written[-1]] if written else None))
    return problems


def _limit_broken(path: str, value: Any) -> str | None:
    limits = limits_of(path)
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} is not a finite number"
    if "at_least" in limits and value < limits["at_least"]:
        return f"{value} is too small: at least {limits['at_least']}"
    if "above" in limits and value <= limits["above"]:
        return f"{value} is too small: above {limits['above']}"
    if "at_most" in limits and value > limits["at_most"]:
        return f"{value} is too large: at most {limits['at_most']}"
    if isinstance(value, str) and not value.strip() and "any_text" not in limits:
        return "is empty"
    if "forms" in limits and not any(fits(value, form) for form in limits["forms"]):
        return _not_taken(path, value)
    for name, item in value.items() if "values" in limits else ():
        if not any(fits(item, form) for form in limits["values"]):
            return f"{name}: {_show(item)} is not {form_words(limits['values'])}"
    return _number_out_of_range(value, small="forms" in limits)


def _number_out_of_range(value: Any, small: bool) -> str | None:
    """Counts inside the small mappings (`{train: N}`, `{every: n}`, …) are positive; a fraction is below 1."""
    for name, number in value.items() if small and isinstance(value, dict) else ():
        if isinstance(number, int) and number > 2**53:
            return f"{name}: {number} is too large"
        if name == "fraction" and not 0 < number < 1:
            return f"fraction {number} is not between 0 and 1"
        if name == "train" and isinstance(number, int) and number < 257:
            return f"train: {number} is too small: the 256 bytes and the end of text are always in the vocabulary"
        if name in ("every", "min_params", "max_rows") and isinstance(number, int) and number < 1:
            return f"{name}: {number} is too small: at least 1"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 2**53:
        return f"{value} is too large"
    return None


def _open(path: str) -> bool:
    """Below these keys the person names the keys."""
    return path.startswith(("model.config.", "data.columns."))


def _expected(path: str) -> str:
    return "a plain value" if _open(path) else type_words(path)


def _show(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, (bool, type(None))) else str(value)
    text = repr(value) if isinstance(value, str) else text
    return text if len(text) <= 60 else text[:57] + "…"
