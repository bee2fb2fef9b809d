"""The fake CUDA itself: it computes as the CPU does, and it can fail as CUDA does."""

import copy
import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fakecuda.build import HERE, cuda_include
from fakecuda.device import (
    forget_failure,
    needs_fake,
    on_device,
    schedules,
    set_memory,
)
from helpers.distributed import distributed

NUM_SEEDS = 20
pytestmark = needs_fake


class Block(nn.Module):
    """Attention and a small network, as transformers have them."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first_norm = nn.LayerNorm(dim)
        self.packed = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.second_norm = nn.RMSNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.packed(self.first_norm(x)).chunk(3, -1)
        weights = (query @ key.transpose(-1, -2) / 4).softmax(-1)
        fused = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        x = x + self.out(weights @ value + fused)
        return x + self.down(functional.gelu(self.up(self.second_norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 16)
        self.blocks = nn.Sequential(Block(16), Block(16))
        self.head = nn.Linear(16, 31, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


LAYERS = {
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, bias=False), (2, 4, 7)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), (2, 4, 5, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 3, 3, stride=2), (2, 4, 5, 5)),
    "layer norm": (lambda: nn.LayerNorm(8), (2, 4, 8)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (2, 4, 8)),
    "batch norm": (lambda: nn.BatchNorm1d(4), (2, 4, 8)),
}


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@on_device
def test_recurrent_layers(kind: type[nn.RNNBase]) -> None:
    with torch.device("cpu"):
        layer = kind(4, 6, num_layers=2, dropout=0.0)
        x = torch.randn(3, 2, 4)
    found = []
    for device in ("cpu", "cuda"):
        model = copy.deepcopy(layer).to(device)
        mine = x.detach().clone().to(device).requires_grad_()
        out = model(mine)[0]
        out.square().sum().backward()
        grads = [param.grad for param in model.parameters()]
        found.append([each.cpu() for each in (out, mine.grad, *grads)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
@on_device
def test_layers(name: str, dtype: torch.dtype, is_training: bool) -> None:
    """Bit for bit, with gradients; the losses too that meta tensors get wrong."""
    make, shape = LAYERS[name]
    with torch.device("cpu"):
        layer = make().to(dtype).train(is_training)
        x = torch.randn(shape).to(dtype)
    found = []
    for device in ("cpu", "cuda"):
        model = copy.deepcopy(layer).to(device)
        mine = x.detach().clone().to(device).requires_grad_()
        out = model(mine)
        loss = functional.mse_loss(out.float(), torch.ones_like(out).float())
        loss.backward()
        grads = [param.grad for param in model.parameters()]
        found.append([each.cpu() for each in (out, loss, mine.grad, *grads)])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


@on_device
def test_batch_norm_with_statistics_in_fp32() -> None:
    """Weights in bf16 beside them, which only CUDA takes, and in backward only once."""
    with torch.device("cpu"):
        layer = nn.BatchNorm1d(4)
        x = torch.randn(3, 4, dtype=torch.bfloat16)
    found = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        model = copy.deepcopy(layer).to(device)
        for param in model.parameters():
            param.data = param.data.to(dtype)
        mine = x.detach().clone().to(device).requires_grad_()
        out = model(mine)
        out.float().square().mean().backward()
        assert all(param.grad.dtype == dtype for param in model.parameters())
        grads = [param.grad.bfloat16() for param in model.parameters()]
        values = [out, mine.grad, *grads, *model.buffers()]
        found.append([each.detach().cpu() for each in values])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
    images = torch.ones(2, 4, 3, 3, dtype=torch.bfloat16)
    wide = nn.BatchNorm2d(4)
    wide.weight.data = wide.weight.data.bfloat16()
    wide.bias.data = wide.bias.data.bfloat16()
    with pytest.raises(RuntimeError, match="Expected running_mean to have type BF"):
        wide(images).sum().backward()


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "AdamW_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def train(model: nn.Module, device: str, name: str) -> list[float]:
    """Return the losses of some steps; clip, and step with ``name``."""
    model.to(device)
    optimizer = OPTIMIZERS[name](model.parameters())
    losses = []
    for step in range(4):
        generator = torch.Generator("cpu").manual_seed(step)
        tokens = torch.randint(0, 31, (2, 7), generator=generator, device="cpu")
        tokens = tokens.to(device)
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_device
def test_training_matches_the_cpu(name: str) -> None:
    reference = Model().to("cpu").double()
    expected_params = copy.deepcopy(reference)
    expected = train(expected_params, "cpu", name)
    for _ in schedules(3):
        model = copy.deepcopy(reference)
        torch.testing.assert_close(train(model, "cuda", name), expected)
        for mine, theirs in zip(
            model.parameters(), expected_params.parameters(), strict=True
        ):
            torch.testing.assert_close(mine.cpu(), theirs)


@on_device
def test_random_numbers_are_the_generators() -> None:
    """A state that was kept gives the same numbers, whatever runs meanwhile."""
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    x = torch.randn(4, 8, requires_grad=True)
    state = torch.cuda.get_rng_state()
    plain = layer(x)
    plain.sum().backward()
    torch.rand(3)
    grad, x.grad = x.grad, None
    torch.cuda.set_rng_state(state)
    again = checkpoint(layer, x, use_reentrant=False)
    again.sum().backward()
    assert torch.equal(plain, again)
    assert torch.equal(grad, x.grad)
    assert not torch.equal(torch.rand(8), torch.rand(8))


def ready(stream: torch.cuda.Stream) -> torch.Tensor:
    """Return what a chain of work on ``stream`` made: ones, in the end."""
    with torch.cuda.stream(stream):
        x = torch.zeros(64)
        for _ in range(20):
            x = x + 0.05
        return x.round()


@on_device
def test_events_order_streams() -> None:
    for _ in schedules(NUM_SEEDS):
        writer, reader = torch.cuda.Stream(), torch.cuda.Stream()
        x = ready(writer)
        event = writer.record_event()
        reader.wait_event(event)
        with torch.cuda.stream(reader):
            y = x * 2
        reader.synchronize()
        assert event.query()
        assert y.cpu().sum().item() == 128


@on_device
def test_without_an_event_results_are_late() -> None:
    late = 0
    for _ in schedules(NUM_SEEDS):
        writer, reader = torch.cuda.Stream(), torch.cuda.Stream()
        x = ready(writer)
        with torch.cuda.stream(reader):
            y = x * 2
            late += y.sum().item() != 128
        torch.cuda.synchronize()
    assert late > NUM_SEEDS // 5


def reuse(*, is_recorded: bool) -> int:
    """Free memory that another stream reads; count the wrong results."""
    wrong = 0
    for _ in schedules(NUM_SEEDS):
        reader = torch.cuda.Stream()
        x = torch.ones(1024)
        reader.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(reader):
            busy = torch.zeros(8)
            for _ in range(5):
                busy = busy + 1
            y = x * 2
        if is_recorded:
            x.record_stream(reader)
        del x
        other = torch.full((1024,), 7.0)
        torch.cuda.synchronize()
        wrong += y.cpu().sum().item() != 2048
        assert other.cpu().sum().item() == 7 * 1024
    return wrong


@on_device
def test_memory_that_others_use_is_lost() -> None:
    assert reuse(is_recorded=False) > 0
    assert reuse(is_recorded=True) == 0


@on_device
def test_fresh_memory_is_poisoned() -> None:
    """What torch's allocator hands out again, too."""
    for _ in range(3):
        x = torch.empty(1000)
        assert x.cpu().isnan().all()
        x.zero_()
        assert x.cpu().sum().item() == 0
        del x


@on_device
def test_copies_follow_the_stream() -> None:
    for _ in schedules(NUM_SEEDS):
        pinned = torch.ones(256, device="cpu").pin_memory()
        x = pinned.to("cuda", non_blocking=True)
        x += 1
        back = torch.empty(256, device="cpu", pin_memory=True)
        back.copy_(x, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        assert back.sum().item() == 512
        plain = torch.full((256,), 3.0, device="cpu")
        y = plain.to("cuda", non_blocking=True)
        plain.zero_()  # it has been read
        assert y.sum().item() == 768


@on_device
def test_pinned_copies_are_late() -> None:
    """The host reads too early what is copied to pinned memory."""
    late = 0
    for _ in schedules(NUM_SEEDS):
        back = torch.zeros(256, device="cpu", pin_memory=True)
        x = ready(torch.cuda.current_stream())
        back[:64].copy_(x, non_blocking=True)
        late += back.sum().item() != 64
        torch.cuda.synchronize()
        assert back.sum().item() == 64
    assert late > NUM_SEEDS // 2


@on_device
def test_failures_of_tasks_are_raised() -> None:
    index = torch.tensor([5])
    x = torch.zeros(3)[index]  # out of bounds: only the task sees that
    with pytest.raises(RuntimeError, match=r"device-side assert.*index"):
        x.cpu()
    with pytest.raises(RuntimeError, match="device-side assert"):  # from now on
        torch.cuda.synchronize()
    forget_failure()
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="same device"):
        torch.zeros(3) + torch.zeros(3, device="cpu")
    with pytest.raises(RuntimeError, match="same device"):
        torch.equal(torch.zeros(()), torch.zeros((), device="cpu"))
    with pytest.raises(RuntimeError, match="same device"):
        torch.zeros(3, 2).index_select(0, torch.zeros(1, device="cpu").long())


@on_device
def test_memory_has_an_end() -> None:
    torch.cuda.synchronize()
    set_memory(256 << 20)
    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"256.00 MiB"):
        torch.empty(512 << 20, dtype=torch.uint8)
    kept = [torch.empty(32 << 20, dtype=torch.uint8) for _ in range(4)]
    before = torch.cuda.memory_allocated()
    del kept
    assert before - torch.cuda.memory_allocated() == 128 << 20
    torch.empty(192 << 20, dtype=torch.uint8)  # of what the cache gives back
    set_memory(0)


@on_device
def test_misuse_is_named() -> None:
    """Each call that is wrong fails with CUDA's code, and says its name."""
    runtime = ctypes.CDLL(None)
    runtime.cudaGetErrorString.restype = ctypes.c_char_p

    def text(code: int) -> str:
        runtime.cudaGetLastError()
        return str(runtime.cudaGetErrorString(code).decode())

    event = ctypes.c_void_p()
    runtime.cudaEventCreate(ctypes.byref(event))
    runtime.cudaEventDestroy(event)
    code = runtime.cudaEventRecord(event, None)
    assert text(code).startswith("invalid resource handle")
    assert "cudaEventRecord: " in text(code)
    stream = ctypes.c_void_p()
    runtime.cudaStreamCreate(ctypes.byref(stream))
    assert runtime.cudaStreamDestroy(stream) == 0
    assert "cudaStreamSynchronize: " in text(runtime.cudaStreamSynchronize(stream))
    x = torch.zeros(8)
    address = ctypes.c_void_p(x.data_ptr() + (4 << 20))
    code = runtime.cudaMemsetAsync(address, 0, ctypes.c_size_t(64 << 20), None)
    assert "cudaMemsetAsync: " in text(code)
    code = runtime.cudaFree(ctypes.c_void_p(x.data_ptr() + 4))
    assert "cudaFree: " in text(code)
    assert "device 7 of 1" in text(runtime.cudaSetDevice(7))


@on_device
def test_what_cannot_be_is_named() -> None:
    x = torch.randn(2, 2, 4, 4)
    with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
        torch.ops.aten._flash_attention_forward(
            x, x, x, None, None, 2, 2, 0.0, False, False
        )


@distributed(world_size=3, device="cuda")
def test_collectives_follow_the_stream(rank: int) -> None:
    for _ in schedules(5):
        x = torch.zeros(16)
        for _ in range(rank + 1):
            x = x + 1
        dist.all_reduce(x)
        gathered = torch.empty(48)
        dist.all_gather_into_tensor(gathered, x + rank)
        piece = torch.empty(16)
        dist.reduce_scatter_tensor(piece, gathered)
        work = dist.broadcast(piece, 1, async_op=True)
        work.wait()
        assert gathered[::16].tolist() == [6, 7, 8]
        assert piece.tolist() == [21] * 16
        dist.barrier()


@distributed(world_size=2, device="cuda")
def test_messages_and_averages(rank: int) -> None:
    sent = torch.full((100_000,), float(rank + 1))
    received = torch.empty(100_000)
    operations = [
        dist.P2POp(dist.isend, sent, 1 - rank),
        dist.P2POp(dist.irecv, received, 1 - rank),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert received.sum().item() == 100_000 * (2 - rank)
    parts = torch.arange(4.0) + 10 * rank
    swapped = torch.empty(4)
    dist.all_to_all_single(swapped, parts)
    first = 2 * rank
    assert swapped.tolist() == [first, first + 1, first + 10, first + 11]
    dist.all_reduce(sent, dist.ReduceOp.AVG)
    assert sent[0].item() == 1.5
    largest = torch.tensor([rank, 5 - rank])
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    assert largest.tolist() == [1, 5]


@distributed(world_size=2, device="cuda")
@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3, 3)])
def test_batch_norm_over_ranks(rank: int, shape: tuple[int, ...]) -> None:
    """As over the whole batch; rank 0 has more of it."""
    with torch.device("cpu"):
        whole = torch.randn(shape, requires_grad=True)
        reference = nn.BatchNorm2d(4) if len(shape) == 4 else nn.BatchNorm1d(4)
        torch.nn.init.normal_(reference.weight)
    mine = slice(0, 4) if rank == 0 else slice(4, 6)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(reference)).cuda()
    x = whole.detach()[mine].cuda().requires_grad_()
    out = model(x)
    expected = reference(whole)
    out.pow(3).sum().backward()
    expected.pow(3).sum().backward()
    grads = [param.grad for param in model.parameters()]
    for each in grads:
        dist.all_reduce(each)
    found = [out, x.grad, *grads, *model.buffers()]
    wanted = [expected[mine], whole.grad[mine]]
    wanted += [param.grad for param in reference.parameters()]
    wanted += reference.buffers()
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)


@on_device
def test_products_of_two_dtypes_are_refused() -> None:
    """By the call, with CUDA's text, as programs look for it."""
    x = torch.ones(2, 4, dtype=torch.float16)
    for bias in (True, False):
        layer = nn.Linear(4, 4, bias=bias)
        with pytest.raises(RuntimeError, match="mat1 and mat2 must have the same dty"):
            layer(x)
    torch.cuda.synchronize()


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_streams_under_sanitizers(sanitizer: str, tmp_path: Path) -> None:
    """Chains over streams, memory in their order, and graphs; then with a wait less."""
    program = str(tmp_path / "check_streams")
    rooms = ("runtime", "driver")
    sources = [path for room in rooms for path in (HERE / room).glob("*.c")]
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", f"-fsanitize={sanitizer}"]
    flags += ["-isystem", str(cuda_include()), f"-I{HERE / 'runtime'}"]
    files = [str(HERE / "check_streams.c"), *map(str, sources)]
    libraries = ["-lpthread", "-ldl", "-lrt", "-o", program]
    subprocess.run(["gcc", *flags, *files, *libraries], check=True)
    command = ["env", "-u", "LD_PRELOAD", program, "200"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    # Whether a wait less is seen depends on how the threads meet.
    forgetting = (
        subprocess.run([*command, "forget"], capture_output=True, check=False)
        for _ in range(10)
    )
    assert any(each.returncode != 0 for each in forgetting)
