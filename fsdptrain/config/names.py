"""The most used keys and values of other training tools, and the recipe key that replaces each of them.

The tools are FSDP1, Accelerate, DeepSpeed, the Hugging Face Trainer, TRL, Axolotl, torchtune and LLaMA-Factory. The
tables are those at the end of `docs/from-fsdp1.md`, which ships with the package: to add a name, add it there.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import yaml

from fsdptrain.run_folder.files import shipped


def _rows(heading: str) -> list[tuple[list[str], str]]:
    """Return the rows of the tables below a heading of the document: the words of the first column, and the second."""
    text = shipped("docs", "from-fsdp1.md").read_text(encoding="utf-8")
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+`) \| (.+) \|$", section, re.MULTILINE)
    return [(_quoted(words), says) for words, says in rows]


def _quoted(text: str) -> list[str]:
    return re.findall("`(.+?)`", text)


@cache
def replacements() -> dict[str, str]:
    """Return foreign name → the text that replaces it. In a name `*` matches any characters.

    A text starts with a recipe key or section, or with the reason why there is none ("not …", "always …", "derived …").
    """
    document = str(shipped("docs", "from-fsdp1.md"))
    return {
        name: text.replace("`", "").replace("this document", document)
        for names, text in _rows("Names")
        for name in names
    }


@cache
def foreign_values() -> dict[str, dict[Any, Any]]:
    """Return key → foreign value → the recipe's value, which a message suggests; it is never substituted silently."""
    found: dict[str, dict[Any, Any]] = {}
    for [key], pairs in _rows("Values"):
        for pair in pairs.split("; "):
            *foreign, meant = map(yaml.safe_load, _quoted(pair))
            found.setdefault(key, {}).update(dict.fromkeys(foreign, meant))
    return found


def replacement_of(word: str) -> str | None:
    """Return the text that replaces a foreign name; None for a name that no other tool uses.

    A name of FSDP1 may have the prefix `fsdp_`, as in Accelerate's files.
    """
    for name in (word, word.removeprefix("fsdp_")):
        if text := replacements().get(name):
            return text
    return next((text for name, text in replacements().items() if "*" in name and fnmatchcase(word, name)), None)


def nearest_foreign_name(word: str) -> str | None:
    """Return the foreign name that a word misspells; None if no foreign name is close. The first letter must match."""
    candidates = [name for name in replacements() if name[:1] == word[:1] and "*" not in name]
    return next(iter(get_close_matches(word, candidates, n=1, cutoff=0.85)), None)


def leading_key(text: str) -> str | None:
    """Return the key or section that a text of `replacements` starts with; None if it starts with a reason."""
    key = text.partition(":")[0]
    return None if " " in key else key


def replacement_message(text: str) -> str:
    """Return a text of `replacements` as the predicate of a sentence whose subject is the foreign name."""
    key = leading_key(text)
    return f"is {text}" if key is None else f"is called {key} here{text.removeprefix(key)}"
