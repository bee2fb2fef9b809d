"""A user's script of Lightning, in which nothing of fsdp_c stands.

    python lightning_script.py FOLDER NAME...

For each NAME (fabric, trainer, litgpt) it trains, saves a full and a sharded
checkpoint, and trains on from each. FOLDER gets the weights that each rank has after
that, and the module of their FSDP class. Lightning starts the second process.
test_launch.py launches it.
"""

import itertools
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from helpers.frameworks import (
    MLP_TASK,
    STEPS,
    fabric_of,
    fabric_setup,
    fabric_train,
    lightning_module,
    litgpt_task,
    trainer_of,
)

WORLD_SIZE = 2


def run_fabric(name: str, kind: str, folder: str) -> Any:
    task = litgpt_task() if name == "litgpt" else MLP_TASK
    fabric = fabric_of(kind, [], devices=WORLD_SIZE, task=task)
    state = fabric_setup(fabric, task, 0)
    fabric_train(fabric, task, state, range(STEPS))
    fabric.save(f"{folder}/checkpoint", state)
    state = fabric_setup(fabric, task, 1)
    fabric.load(f"{folder}/checkpoint", state)
    fabric_train(fabric, task, state, range(state["step"], 2 * STEPS))
    return state["model"]._forward_module


def run_trainer(_: str, kind: str, folder: str) -> Any:
    path = f"{folder}/checkpoint"
    options = {"devices": WORLD_SIZE, "folder": folder}
    trainer = trainer_of(kind, [], steps=STEPS, **options)
    trainer.fit(lightning_module(0))
    trainer.save_checkpoint(path)
    trainer = trainer_of(kind, [], steps=2 * STEPS, **options)
    trainer.fit(lightning_module(1), ckpt_path=path, weights_only=False)
    return trainer.strategy.model


def main(folder: str, *names: str) -> None:
    warnings.simplefilter("ignore")
    for name, kind in itertools.product(names, ("full", "sharded")):
        run = run_trainer if name == "trainer" else run_fabric
        own = Path(folder) / f"{name}-{kind}"
        own.mkdir(exist_ok=True)
        model = run(name, kind, str(own))
        weights = {
            key.removeprefix("net."): value for key, value in model.state_dict().items()
        }
        rank = torch.distributed.get_rank()
        torch.save((type(model).__module__, weights), own / f"rank-{rank}")


if __name__ == "__main__":
    main(*sys.argv[1:])
