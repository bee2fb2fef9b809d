"""Stands in for the package `datasets` in accelerate's scripts: nothing is downloaded.

Sentence pairs in the form of GLUE's MRPC: label 1 where both say the same.
"""

import random
from typing import Any

WORDS = ("a", "blue", "bird", "sings", "the", "old", "song", "again", "tonight", "here")
NUM_ROWS = {"train": 64, "validation": 24}


class Rows(list):
    """A dataset, with the methods that the scripts call."""

    def map(self, function: Any, remove_columns: Any = (), **_: Any) -> "Rows":
        columns = {key: [row[key] for row in self] for key in self[0]}
        added = dict(function(columns))
        return Rows(
            {
                **{k: v for k, v in row.items() if k not in remove_columns},
                **{key: values[index] for key, values in added.items()},
            }
            for index, row in enumerate(self)
        )

    def rename_column(self, old: str, new: str) -> "Rows":
        return Rows({new if k == old else k: v for k, v in r.items()} for r in self)


class Splits(dict):
    """Datasets by split; methods apply to all."""

    def map(self, function: Any, **options: Any) -> "Splits":
        return Splits({k: rows.map(function, **options) for k, rows in self.items()})

    def rename_column(self, old: str, new: str) -> "Splits":
        return Splits({k: rows.rename_column(old, new) for k, rows in self.items()})


def load_dataset(path: str, name: str, **_: Any) -> Splits:
    assert (path, name) == ("nyu-mll/glue", "mrpc"), (path, name)
    numbers = random.Random(11)
    splits = Splits()
    for split, num_rows in NUM_ROWS.items():
        rows = Rows()
        for index in range(num_rows):
            first = numbers.choices(WORDS, k=numbers.randint(4, 8))
            label = index % 2
            second = first if label else numbers.choices(WORDS, k=len(first))
            rows.append(
                {
                    "sentence1": " ".join(first),
                    "sentence2": " ".join(second),
                    "label": label,
                    "idx": index,
                }
            )
        splits[split] = rows
    return splits
