"""A hook of MkDocs (`make docs`): the pages of the reference that are made from the code.

The keys of a recipe come from its schema, the commands with their options from the command line.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import fsdptrain
from fsdptrain.cli import app
from fsdptrain.config.keys import KEYS, json_schema


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {"reference/recipe.md": recipe(), "reference/commands.md": commands(), "reference/python.md": python()}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def recipe() -> str:
    """Return the page of the recipe's keys."""
    head = "# Recipe\n\nEvery key, with its type and default. `fsdptrain schema` prints the same as a JSON Schema.\n"
    return "\n".join([head, *_keys(json_schema(), "")])


def _keys(section: dict[str, Any], prefix: str) -> Iterator[str]:
    leaves = {key: value for key, value in section["properties"].items() if "properties" not in value}
    if leaves:
        yield "| key, type, default | |\n| --- | --- |"
    for key, value in leaves.items():
        default = json.dumps(value.get("default"), ensure_ascii=False)
        cells = f"`{prefix}{key}`<br>{KEYS[prefix + key].type_words}<br>`{default}`", value["description"]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    for key, value in section["properties"].items():
        if "properties" in value:
            yield f"\n## {prefix}{key}\n\n{value['description']}\n"
            yield from _keys(value, f"{prefix}{key}.")


def commands() -> str:
    """Return the page of the commands."""
    return "\n".join(["# Commands\n", *_commands(typer.main.get_command(app), "fsdptrain")])


def _commands(command: Any, name: str) -> Iterator[str]:
    for word, child in getattr(command, "commands", {}).items():
        yield from _commands(child, f"{name} {word}")
    if hasattr(command, "commands"):
        return
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    options = [param for param in command.params if param.param_type_name == "option"]
    words = [name, *(str(each.metavar or each.name) for each in arguments)]
    yield f"\n## {name}\n\n`{' '.join(words)}`\n"
    yield inspect.cleandoc(command.help or "") + "\n"
    if options:
        yield "| option | |\n| --- | --- |"
    for each in options:
        yield f"| `{', '.join(each.opts)}` | {(each.help or '').replace('|', chr(92) + '|')} |"
    yield f"\n{command.epilog}\n"


def python() -> str:
    """Return the page of the functions for Python programs."""
    from fsdptrain import api

    parts = [f"# Python\n\n```python\n{inspect.cleandoc(api.__doc__ or '')}\n```\n"]
    for name in fsdptrain.__all__:
        function = getattr(fsdptrain, name)
        parts.append(
            f"## {name}\n\n```python\n{name}{inspect.signature(function)}\n```\n\n{inspect.getdoc(function)}\n"
        )
    return "\n".join(parts)
