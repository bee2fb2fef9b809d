"""The padding of keep_whole(): arithmetic on the shapes of models, without tensors.

    python benchmarks/keep_whole.py

One unit per layer, or of several, and one of the rest. Rows: of all parameters of two
dimensions or more; of experts in one tensor, the rows of each. Matrices: those of the
layers, whole, as for Muon; of experts in one tensor, each expert's.
"""

from collections.abc import Callable
from math import prod

import torch

from fsdp_c import _native

RANKS = (2, 8, 64)
LAYERS = (1, 2, 4, 8, 12)
Shape = tuple[int, ...]
Unit = tuple[Shape, ...]


def transformer(
    dim: int, layers: int, rest: tuple[Shape, ...], *, inputs_in_rows: bool = False
) -> list[Unit]:
    """As torch.nn.Linear has its weights, or transformers' Conv1D in GPT-2."""
    matrices: list[Shape] = [(3 * dim, dim), (dim, dim), (4 * dim, dim), (dim, 4 * dim)]
    if inputs_in_rows:
        matrices = [(shape[1], shape[0]) for shape in matrices]
    return [rest, *[(*matrices, (3 * dim,), (4 * dim,), *[(dim,)] * 6)] * layers]


def vit(dim: int, layers: int) -> list[Unit]:
    rest = [(dim, 3, 16, 16), (1, 197, dim), (1, 1, dim), (1000, dim), (1000,)]
    return transformer(dim, layers, (*rest, *[(dim,)] * 3))


def llama(feed_forward: tuple[Shape, ...], vocabulary: int) -> list[Unit]:
    attention = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096))
    layer = (*attention, *feed_forward, (4096,), (4096,))
    return [((vocabulary, 4096), (vocabulary, 4096), (4096,)), *[layer] * 32]


MLP = ((14336, 4096), (14336, 4096), (4096, 14336))
GPT2 = ((50257, 768), (1024, 768), (768,), (768,))
MODELS: dict[str, list[Unit]] = {
    "GPT-2 (124M), Linear": transformer(768, 12, GPT2),
    "GPT-2 (124M), Conv1D": transformer(768, 12, GPT2, inputs_in_rows=True),
    "Llama 3 8B": llama(MLP, 128256),
    "Mixtral 8x7B, experts apart": llama(((8, 4096), *MLP * 8), 32000),
    "Mixtral 8x7B, experts in one tensor": llama(
        ((8, 4096), (8, 28672, 4096), (8, 4096, 14336)), 32000
    ),
    "ViT-B/16": vit(768, 12),
    "ViT-L/16": vit(1024, 24),
}


def rows(shape: Shape, _is_layer: bool) -> int:
    if len(shape) < 2:
        return 0
    return shape[-1] if len(shape) < 4 else prod(shape[1:])


def matrices(shape: Shape, is_layer: bool) -> int:
    return prod(shape[-2:]) if is_layer and len(shape) > 1 else 0


def grouped(units: list[Unit], num_layers: int) -> list[Unit]:
    """Return units of several layers, and that of the rest."""
    layers = units[1:]
    starts = range(0, len(layers), num_layers)
    return [units[0], *(sum(layers[i : i + num_layers], ()) for i in starts)]


def padding(
    units: list[Unit], num_ranks: int, block: Callable[[Shape, bool], int]
) -> float:
    """Return the padding of all units as a part of their elements."""
    numel = padded = 0
    for index, unit in enumerate(units):
        layout = _native.Layout(
            [(prod(shape), torch.float32, True) for shape in unit],
            num_ranks,
            align_params=True,
            align_shards=True,
            block_numels=[block(shape, index > 0) for shape in unit],
        )
        for _, _, _, unsharded_numel, _, padded_numel in layout.segments:
            numel += unsharded_numel
            padded += padded_numel
    return padded / numel - 1


def print_table(
    title: str, heads: list[str], row: Callable[[list[Unit]], list[float]]
) -> None:
    print(f"| {title} | {' | '.join(heads)} |")
    print(f"| --- |{' ---: |' * len(heads)}")
    for name, units in MODELS.items():
        values = [f"{100 * value:.2f}" for value in row(units)]
        print(f"| {name} | {' | '.join(values)} |")
    print()


def main() -> None:
    kinds = {"rows": rows, "matrices": matrices}
    print_table(
        "padding (%): blocks, ranks",
        [f"{kind}, {n}" for kind in kinds for n in RANKS],
        lambda units: [padding(units, n, kinds[k]) for k in kinds for n in RANKS],
    )
    print_table(
        "padding (%): whole matrices, 8 ranks; layers in a unit",
        [str(n) for n in LAYERS],
        lambda units: [padding(grouped(units, n), 8, matrices) for n in LAYERS],
    )


if __name__ == "__main__":
    main()
