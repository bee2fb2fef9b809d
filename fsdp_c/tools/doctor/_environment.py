"""The environment switches that fsdp_c and its build read: one table."""

from typing import NamedTuple


class Switch(NamedTuple):
    """One environment variable."""

    name: str
    default: str  # what holds where it is not set
    meaning: str


# Read while a program runs. tests/unit/test_doctor.py holds this against the sources.
SWITCHES = (
    Switch(
        "FSDP_C_CUDA",
        "1",
        "0: ATen's kernels on CUDA tensors, not those of fsdp_c",
    ),
    Switch(
        "FSDP_C_CUDA_LIBRARY",
        "_cuda.so beside the extension",
        "the file of the kernels for CUDA tensors; for tests without a GPU",
    ),
    Switch(
        "FSDP_C_HOST_ID",
        "the machine's start and PID namespace",
        "a name of this rank's host; ranks with one name share a host",
    ),
    Switch(
        "FSDP_C_INSTALL",
        "0",
        "1: fsdp_c takes the place of torch's FSDP; set by python -m fsdp_c launch",
    ),
    Switch(
        "FSDP_C_NCCL_LIBRARY",
        "the loaded one, the wheel's, the system's",
        "the file of libnccl",
    ),
    Switch(
        "FSDP_C_NCCL_SPLIT",
        "0",
        "1: reductions have a communicator of their own beside the gathers'; the "
        "same on all ranks",
    ),
    Switch(
        "FSDP_C_TRACE",
        "nothing is recorded",
        "a folder: each rank writes a timeline of its third to fifth step there",
    ),
    Switch(
        "FSDP_C_TRANSPORT",
        "shared memory between the gloo ranks of a host, NCCL called from C",
        "c10d: the group's own backend carries all collectives; "
        "flat: gloo groups on several hosts use it, those of one host do not; "
        "rings: ranks of a host do not read each other's memory (process_vm_readv); "
        "copy: shards are private memory, which is gathered, not read in place",
    ),
    Switch(
        "FSDP_USE_FULL_PREC_IN_EVAL",
        "0",
        "1: forward in eval mode computes in the parameters' own dtypes",
    ),
    Switch(
        "FSDP_USE_UNSAFE_SETATTR",
        "0",
        "1: a module's own __setattr__ is not called",
    ),
    Switch(
        "LOCAL_WORLD_SIZE",
        "the number of devices",
        "ranks on this host, for HYBRID_SHARD without groups; torchrun sets it",
    ),
    Switch(
        "NCCL_GRAPH_REGISTER",
        "0, set by capture_step",
        "NCCL's: 1 registers the buffers of captured collectives, which expandable "
        "segments of torch's allocator do not allow",
    ),
    Switch(
        "NCCL_LAUNCH_ORDER_IMPLICIT",
        "1, set by import fsdp_c",
        "NCCL's: 0 starts kernels of different communicators in any order",
    ),
)

# Read by setup.py.
BUILD_SWITCHES = (
    Switch("CC", "Python's", "the C compiler"),
    Switch("CXX", "Python's", "the C++ compiler"),
    Switch("CUDA_HOME", "CUDA_PATH, then PATH", "the CUDA toolkit, for its nvcc"),
    Switch("CUDA_PATH", "PATH", "the same, where CUDA_HOME is not set"),
    Switch(
        "FSDP_C_CUDA",
        "built where nvcc is found and torch is a CUDA build",
        "the CUDA kernels; 0: never, 1: an error without nvcc",
    ),
    Switch("FSDP_C_DEBUG", "0", "1: no optimisation, asserts"),
    Switch("FSDP_C_SANITIZE", "0", "1: address and undefined behaviour sanitizers"),
    Switch("MAX_JOBS", "the number of cores", "files compiled at a time"),
)

# torch's own, where they change what fsdp_c does or how fast it is.
TORCH_SWITCHES = (
    Switch(
        "GLOO_SOCKET_IFNAME",
        "the address of the host name",
        "the network interface of gloo",
    ),
    Switch("OMP_NUM_THREADS", "all cores", "threads of one rank on the CPU"),
    Switch(
        "TORCH_DISTRIBUTED_DEBUG",
        "OFF",
        "INFO: ranks compare, before every collective, which one it is",
    ),
    Switch(
        "TORCH_FR_BUFFER_SIZE",
        "torch's",
        "0: no flight recorder, which takes the GIL in every gloo collective",
    ),
)
