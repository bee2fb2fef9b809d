"""Nothing of torch's FullyShardedDataParallel runs on a module of ours.

See Note [torch's class as a base].
"""

import pytest
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

import fsdp_c
from fsdp_c._fsdp1.torch_class import REFUSED, TorchClass, names_of_torch

OWN = [
    each
    for each in fsdp_c.FSDP.__mro__
    if each.__module__.startswith("fsdp_c.") and each is not TorchClass
]
# What torch's class overrides of nn.Module, and we do not.
OF_MODULE = {"__init__"}  # nn.Module's own, called by name


def _is_own(name: str) -> bool:
    return any(name in vars(each) for each in OWN)


def test_every_name_of_torchs_class_is_decided() -> None:
    """A method that a newer torch brings: write it, or add it to REFUSED."""
    undecided = {
        name
        for name in names_of_torch()
        if not _is_own(name) and name not in REFUSED and name not in OF_MODULE
    }
    assert not undecided
    # And what was decided is still a question.
    assert not set(REFUSED) - set(names_of_torch())
    assert not {name for name in REFUSED if _is_own(name)}


def test_no_name_resolves_to_torchs_class() -> None:
    found = {}
    for name in dir(fsdp_c.FSDP):
        owner = next(each for each in fsdp_c.FSDP.__mro__ if name in vars(each))
        if owner not in nn.Module.__mro__ and owner not in {*OWN, TorchClass}:
            found[name] = owner
    # Documentation and the like.
    assert set(found) <= {"__weakref__"}


@pytest.mark.parametrize(
    "name", sorted(set(names_of_torch()) & set(vars(nn.Module)) - {"__init__"})
)
def test_super_reaches_nn_modules_own(name: str) -> None:
    found = vars(TorchClass)[name]
    assert found is getattr(nn.Module, name)
    assert found is not vars(TorchFSDP)[name]


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refusals_name_the_remedy(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"{name} belongs to torch"):
        getattr(fsdp_c.FSDP, name)()
