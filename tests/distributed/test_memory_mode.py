"""Training with blocks that stay for the run, the default of FSDP_C_MEMORY.

On the CPU the other tests run with ``least`` (tests/conftest.py).
"""

import pytest

from helpers.distributed import distributed, every_strategy
from helpers.reference import Differential
from helpers.transports import OWN, over


@pytest.mark.cpu_only("the mode of a CPU")
@every_strategy
@pytest.mark.parametrize("transport", [OWN, "c10d"])
@pytest.mark.parametrize("schedule", ["zsu zsu", "znsu znsu", "zpsu zpsu", "sku sku"])
@pytest.mark.parametrize("model", ["mlp", "uneven", "called_twice", "mixed_dtype"])
@distributed(world_size=(2, 3))
def test_blocks_that_stay(
    model: str, schedule: str, transport: str, strategy: str, use_orig_params: bool
) -> None:
    with over(transport), pytest.MonkeyPatch.context() as patch:
        patch.delenv("FSDP_C_MEMORY")
        differential = Differential.of_model(
            model, strategy=strategy, use_orig_params=use_orig_params
        )
        differential.run(schedule)
        differential.evaluate()


@pytest.mark.cpu_only("the mode of a CPU")
@pytest.mark.parametrize("mode", ["fast", "least"])
@distributed(world_size=2)
def test_what_stays(mode: str) -> None:
    import fsdp_c

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_C_MEMORY", mode)
        differential = Differential.of_model("mlp", strategy="FULL_SHARD")
        differential.run("zsu zsu")
        stats = fsdp_c.memory_stats(differential.model)
    assert (stats["arena_nbytes"] > 0) == (mode == "fast")


@pytest.mark.cpu_only("the mode of a CPU")
@distributed(world_size=2)
def test_an_unknown_mode() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_C_MEMORY", "lest")
        differential = Differential.of_model("mlp", strategy="FULL_SHARD")
        with pytest.raises(ValueError, match="must be fast or least, got 'lest'"):
            differential.forward()
