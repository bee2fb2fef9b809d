"""Stands in for the package `evaluate` in accelerate's scripts: accuracy only."""

from typing import Any


class Accuracy:
    def __init__(self) -> None:
        self.hits: list[bool] = []

    def add_batch(self, predictions: Any, references: Any) -> None:
        self.hits += (predictions == references).tolist()

    def compute(self) -> dict[str, float]:
        accuracy = sum(self.hits) / len(self.hits)
        self.hits = []
        return {"accuracy": accuracy}


def load(path: str, name: str) -> Accuracy:
    assert (path, name) == ("glue", "mrpc"), (path, name)
    return Accuracy()
