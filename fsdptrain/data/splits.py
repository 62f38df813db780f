"""Names of the files in a folder → its splits, as the Hub and `datasets` lay them out."""

from __future__ import annotations

import os
import re
import string
from collections.abc import Collection

from fsdptrain.errors import DataError, listed

# Words in the names of files and folders → kinds of splits, in the order in which `datasets` looks for them.
TRAIN, VALIDATION, TEST = "train", "validation", "test"
KINDS_OF_SPLITS = {
    TRAIN: {"train", "training"},
    VALIDATION: {"validation", "valid", "dev", "val"},
    TEST: {"test", "testing", "eval", "evaluation"},
}
SHARD = re.compile(r"(\w+(?:\.\w+)*)-[0-9]{5}-of-[0-9]{5}")
# Files with the suffix of data that describe a data set or a model.
DESCRIPTIONS = frozenset(
    {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json", "metadata.json"}
    | {"readme.txt", "license.txt", "requirements.txt"}
)


def split_of(name: str) -> str:
    """Return the split of a file by its path below a folder: that in the name of a shard, else a kind; empty for none.

    A folder's name comes before the file's.
    """
    *folders, file = name.split("/")
    if shard := SHARD.match(file):
        return shard[1]
    return next((kind for part in (*folders, file) if (kind := _kind_of(part))), "")


def _kind_of(name: str) -> str:
    """Return the kind of split that a word in a name stands for: that of `train_sft` is `train`; empty for none."""
    words = {*re.split(r"[-._ 0-9]+", name.lower())}
    return next((kind for kind, known in KINDS_OF_SPLITS.items() if words & known), "")


def splits_to_train(splits: Collection[str], place: str) -> set[str]:
    """Return which of a folder's splits are trained: the one for training, without it those that are no known kind.

    If there is nothing else, a folder of held-out data is read. Raises DataError for several splits for training.
    """
    kinds = {split: _kind_of(split) for split in splits}
    train = [split for split, kind in kinds.items() if kind == TRAIN]
    if TRAIN in train or len(train) == 1:
        return {TRAIN} if TRAIN in train else {*train}
    if train:
        raise DataError(
            f"data.path: {place} has several splits for training ({listed(train)}): name the files of one, such as "
            f"{place.rstrip('/')}/**/{train[0]}-*"
        )
    return {split for split, kind in kinds.items() if not kind} or {*splits}


def split_to_hold_out(splits: Collection[str]) -> str | None:
    """Return the split that evaluates what is trained: a validation split, else a test split; None without one."""
    return next((split for kind in (VALIDATION, TEST) for split in splits if _kind_of(split) == kind), None)


def pattern_of(names: Collection[str], others: Collection[str]) -> str | None:
    """Return the path of one file, or a glob that matches these files and no others; None if that is not found."""
    if len(names) == 1:
        return next(iter(names))
    folder, _, beginning = os.path.commonprefix([*names]).rpartition("/")  # noqa: RUF071
    file = os.path.commonprefix([name.rpartition("/")[2] for name in names]).rstrip(string.digits)  # noqa: RUF071
    if not any(other.startswith(f"{folder}/{beginning.rstrip(string.digits)}") for other in others):
        return f"{folder}/{beginning.rstrip(string.digits)}*"
    below = (other for other in others if other.startswith(f"{folder}/"))
    if not file or any(other.rpartition("/")[2].startswith(file) for other in below):
        return None
    return f"{folder}/**/{file}*"
