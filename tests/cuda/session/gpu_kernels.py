"""Bandwidth and host time of fsdp_c's kernels beside torch's: python gpu_kernels.py.

Everything is timed by events over buffers much larger than the L2 cache; the last
column is the share of what a device-to-device copy reaches. Needs a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "cuda")]

import test_kernels as kernels  # noqa: E402  (the C structures)

WIDTH = 4096
# A block of a 7B model: attention, MLP, two norms.
SHAPES = [WIDTH * WIDTH] * 4 + [WIDTH * 11008] * 3 + [WIDTH, WIDTH]
TOTAL = sum(SHAPES)
Body = Callable[[], object]


def device_ms(body: Body, repeats: int = 20) -> float:
    """Return the median of the device's time for ``body``."""
    for _ in range(3):
        body()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        body()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def host_us(body: Body, repeats: int = 100) -> float:
    """Return the host's time for a call of ``body``."""
    torch.cuda.synchronize()
    begin = time.perf_counter_ns()
    for _ in range(repeats):
        body()
    total = time.perf_counter_ns() - begin
    torch.cuda.synchronize()
    return total / repeats / 1e3


def tensors(numels: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(n, device="cuda").to(dtype) for n in numels]


class Library:
    """The kernels' table, called on the current stream."""

    def __init__(self, path: Path) -> None:
        entry = ctypes.CDLL(str(path)).fsdp_cuda_kernels_table
        entry.restype = ctypes.POINTER(kernels.Table)
        torch.zeros(1, device="cuda")  # the context
        found = entry(None)
        if not found:
            raise RuntimeError(f"{path}: the kernels cannot run on this GPU")
        self.table = found.contents
        self.stream = torch.cuda.current_stream().cuda_stream

    def packer(
        self,
        sources: Sequence[Tensor],
        target: Tensor,
        scale: float = 1.0,
        *,
        add: bool = False,
    ) -> Body:
        numels = [source.numel() for source in sources]
        targets = target[: sum(numels)].split(numels)
        items = kernels.items_of(targets, sources, [add] * len(sources))
        call = functools.partial(
            self.table.pack, *(items, len(items), scale, self.stream, None)
        )
        return functools.partial(_checked, call, [sources, target, items])

    def norm(self, data: Sequence[Tensor]) -> Body:
        spans = kernels.spans_of(data)
        nbytes = ctypes.c_int64()
        _checked(
            functools.partial(self.table.norm_scratch, spans, len(spans), nbytes, None)
        )
        scratch = torch.empty(nbytes.value, dtype=torch.uint8, device="cuda")
        out = torch.zeros((), dtype=torch.float64, device="cuda")
        call = functools.partial(
            self.table.norm,
            *(spans, len(spans), 2.0, scratch.data_ptr(), out.data_ptr()),
            *(self.stream, None),
        )
        return functools.partial(_checked, call, [data, spans, scratch, out])

    def scale(self, data: Sequence[Tensor], factor: Tensor) -> Body:
        spans = kernels.spans_of(data)
        call = functools.partial(
            self.table.scale, *(spans, len(spans), factor.data_ptr(), self.stream, None)
        )
        return functools.partial(_checked, call, [data, spans, factor])


def _checked(call: Callable[[], int], kept: object = None) -> None:
    """Call a kernel; ``kept`` lives as long as the call may be made."""
    status = call()
    assert status == 0, f"status {status}"


class Report:
    def __init__(self, ceiling: float) -> None:
        self.ceiling = ceiling

    def row(self, name: str, nbytes: int, body: Body) -> None:
        ms = device_ms(body)
        rate = nbytes / ms / 1e6
        share = rate / self.ceiling
        print(f"{name:<58}{ms:9.3f} ms {rate:8.0f} GB/s {share:6.1%}", flush=True)

    def torchs(self, name: str, nbytes: int, body: Body) -> None:
        self.row(f"    torch {name}", nbytes, body)


def measure_packs(library: Library, report: Report, a: Tensor, b: Tensor) -> None:
    half = torch.empty(TOTAL, device="cuda", dtype=torch.bfloat16)
    grads = tensors(SHAPES, torch.bfloat16)
    parts, parts32 = list(half.split(SHAPES)), list(a.split(SHAPES))
    n = TOTAL
    report.row("cast fp32 -> bf16, one item", 6 * n, library.packer([a], half))
    report.torchs("copy_", 6 * n, lambda: half.copy_(a))
    report.row("cast bf16 -> fp32, one item", 6 * n, library.packer([half], a))
    report.torchs("copy_", 6 * n, lambda: a.copy_(half))
    report.row("pack bf16 -> bf16, 9 gradients", 4 * n, library.packer(grads, half))
    report.torchs("_foreach_copy_", 4 * n, lambda: torch._foreach_copy_(parts, grads))
    report.torchs("cat(out=)", 4 * n, lambda: torch.cat(grads, out=half))
    scaled = library.packer(grads, a, 0.125)
    report.row("pack bf16 -> fp32 * 1/8, 9 gradients", 6 * n, scaled)
    copy = functools.partial(torch._foreach_copy_, parts32, grads)
    report.torchs("_foreach_copy_ (no scale)", 6 * n, copy)
    odd = torch.empty(n + 1, device="cuda", dtype=torch.bfloat16)[1:]
    report.row("cast fp32 -> bf16, no common boundary", 6 * n, library.packer([a], odd))
    added = library.packer([half], a, 0.125, add=True)
    report.row("accumulate bf16 into fp32", 10 * n, added)
    report.torchs("add_(alpha)", 10 * n, lambda: a.add_(half, alpha=0.125))
    added = library.packer([b], a, 0.125, add=True)
    report.row("accumulate fp32 into fp32", 12 * n, added)
    report.torchs("add_(alpha)", 12 * n, lambda: a.add_(b, alpha=0.125))


def measure_clipping(library: Library, report: Report, a: Tensor) -> None:
    a.normal_()
    for dtype in (torch.float32, torch.bfloat16):
        data = list(a.to(dtype).split(SHAPES))
        nbytes = TOTAL * dtype.itemsize
        report.row(f"norm {dtype}, 9 spans", nbytes, library.norm(data))
        norms = functools.partial(torch._foreach_norm, data)
        report.torchs("_foreach_norm", nbytes, lambda norms=norms: torch.stack(norms()))
    factor = torch.tensor(0.999, device="cuda")
    parts = list(a.split(SHAPES))
    report.row("scale fp32, 9 spans", 8 * TOTAL, library.scale(parts, factor))
    report.torchs(
        "_foreach_mul_", 8 * TOTAL, lambda: torch._foreach_mul_(parts, factor)
    )


def measure_host(library: Library) -> None:
    print("\nhost time of a call (ctypes and Python included), small tensors")
    for count in (1, 16, 100, 400, 2000):
        small = tensors([512] * count, torch.bfloat16)
        target = torch.empty(512 * count, device="cuda", dtype=torch.bfloat16)
        parts = list(target.split([512] * count))
        bodies = {
            "fsdp_c": library.packer(small, target),
            "_foreach_copy_": functools.partial(torch._foreach_copy_, parts, small),
        }
        figures = [
            f"{name} {host_us(body):8.1f} us host, {1e3 * device_ms(body):7.1f} us GPU"
            for name, body in bodies.items()
        ]
        print(f"{count:5} items: {'; '.join(figures)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--library",
        type=Path,
        default=ROOT / "fsdp_c" / "_cuda.so",
        help="the kernels (default: %(default)s)",
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: torch finds no GPU", file=sys.stderr)
        return 2
    library = Library(args.library)
    a, b = (torch.randn(TOTAL, device="cuda") for _ in range(2))
    ceiling = 8 * TOTAL / device_ms(lambda: a.copy_(b)) / 1e6
    print(
        f"{torch.cuda.get_device_name()}: a copy reaches {ceiling:.0f} GB/s; "
        f"{TOTAL / 1e6:.0f} M elements"
    )
    report = Report(ceiling)
    measure_packs(library, report, a, b)
    measure_clipping(library, report, a)
    measure_host(library)
    return 0


if __name__ == "__main__":
    sys.exit(main())
