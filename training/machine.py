"""
The machine a script runs on: which device and precision, what it can do at most, and what run.json says about it.
"""

import contextlib
import ctypes
import math
import os
import platform
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from contextlib import nullcontext

import numpy
import torch
import torch.distributed as dist

from configurator import UserError, is_out_of_memory, one_line, say
from training.accounting import components, totals

# dense peak TFLOP/s of matrix products by part of the GPU's name, the longer before the shorter: in half precision (bfloat16 and float16;
# the oldest have float16 alone), and in float32, which is TF32 where there is such. From the makers' data sheets, halved where they count
# sparsity: B and GB from NVIDIA's HGX and NVL72 pages, RTX from the whitepapers of Ampere GA102, Ada and Blackwell (with float32
# accumulation), the others from nvidia.com/data-center; MI300X from amd.com. A GPU that is not here has no MFU.
PEAK_TFLOPS = {
    'GB300': (2500, 1250), 'GB200': (2500, 1250), 'B300': (2250, 1125), 'B200': (2250, 1125), 'GH200': (989, 494),
    'H200 NVL': (835, 417), 'H200': (989, 494), 'H100 PCIe': (756, 378), 'H100 NVL': (835, 417), 'H100': (989, 494),
    'A100': (312, 156), 'A10': (125, 62.5), 'L40S': (362, 183), 'L4': (121, 60), 'RTX 6000 Ada': (364, 182), 'RTX A6000': (155, 77.4),
    'RTX 5090': (209.5, 104.8), 'RTX 5080': (112.6, 56.3), 'RTX 5070 Ti': (87.9, 43.9), 'RTX 5070': (61.7, 30.9),
    'RTX 4090': (165, 82.6), 'RTX 3090': (71, 35.6), 'MI300X': (1307, 654), 'V100': (125, 15.7), 'T4': (65, 8.1),
}
NO_BFLOAT16 = ('V100', 'T4')

# nothing else of the environment is written down: it may hold keys and tokens
ENVIRONMENT = ('CUDA_VISIBLE_DEVICES', 'OMP_NUM_THREADS', 'MKL_NUM_THREADS', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'SLURM_JOB_ID',
               'TORCHELASTIC_RESTART_COUNT', 'CUBLAS_WORKSPACE_CONFIG', 'PYTORCH_CUDA_ALLOC_CONF')


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
MICRO_BATCH_TOKENS = 2**14  # of an automatic micro-batch on a CPU
SMALL_MODEL = 30e6  # parameters below which a GPU waits for its kernels to be launched
# FLOPs of training from which compiling pays: it takes half a minute and more, and then a third off each step
WORTH_COMPILING = {'cpu': 1e13, 'cuda': 1e16}
MAX_MICRO_BATCH_TOKENS = 2**15  # of an automatic micro-batch on a GPU: more is not faster, and from 2^31 logits on slower


def choose_device(device='auto', dtype='auto', local_rank=0):
    """
    -> (torch.device, torch.dtype): what exists, unless asked for by name; a UserError when what was asked for does not exist.
    auto is CUDA, then Apple's MPS, then the CPU; bfloat16 where there is hardware for it, float16 on older GPUs, else float32.
    """
    if device == 'auto':
        device = 'cuda' if torch.cuda.is_available() else 'mps' if torch.backends.mps.is_available() else 'cpu'
    try:
        device = torch.device(device)
    except RuntimeError:
        raise UserError(f"device = {device!r}: must be auto, cpu, cuda, cuda:N or mps") from None
    if device.type not in ('cpu', 'cuda', 'mps'):
        raise UserError(f"device = {str(device)!r}: must be auto, cpu, cuda, cuda:N or mps")
    if device.type == 'mps' and not torch.backends.mps.is_available():
        raise UserError("device = 'mps': not available on this machine; use --device=cpu")
    if device.type == 'cuda':
        device = torch.device('cuda', local_rank if device.index is None else device.index)
        if device.index >= torch.cuda.device_count():
            raise UserError(f"device {device} is not there: this machine has {torch.cuda.device_count()} CUDA devices; "
                            "use --device=cpu or fewer processes")
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision('high')  # TF32
    # bfloat16 where there is hardware for it: a CPU without computes it correctly, but slower than float32
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False) if device.type == 'cuda' else device.type == 'cpu' and cpu_has_bf16()
    if dtype == 'auto':
        dtype = 'bfloat16' if bf16 else 'float16' if device.type == 'cuda' else 'float32'
    if dtype == 'bfloat16' and not bf16 and device.type != 'cpu':
        raise UserError(f"dtype = 'bfloat16': {device} has no bfloat16; use --dtype=float16 or float32")
    if device.type == 'cpu':
        keep_freed_memory()
    return device, getattr(torch, dtype)


def cpu_has_bf16():
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def cpu_compiles():
    """ whether there is what torch.compile needs on a CPU: a C++ compiler, and Python's header files """
    compiler = shutil.which(os.environ.get('CXX', 'g++'))
    return sys.platform == 'linux' and bool(compiler) and os.path.exists(os.path.join(sysconfig.get_path('include'), 'Python.h'))


def choose_compile(config, device, dtype):
    if config.compile != 'auto':
        return config.compile
    flops = config.max_iters * config.batch_size * config.block_size * totals(components(config))['train_flops']
    worth = flops >= WORTH_COMPILING.get(device.type, math.inf)
    return worth and (device.type == 'cuda' or dtype == torch.bfloat16 and cpu_has_bf16() and cpu_compiles())


def uncompile(model):
    """ undo model.compile() """
    model._compiled_call_impl = None


def keep_freed_memory():
    """
    Tell glibc to keep what is freed: otherwise each large tensor goes back to the system and is faulted in again page by page.
    Medians of four processes each, in turn: 29 -> 25 ms a step at 4 x 128 with 768 tokens, 320 -> 260 ms at 6 x 384 with 1,024; no
    difference at the default size.
    """
    if sys.platform == 'linux':
        libc = ctypes.CDLL(None)
        if hasattr(libc, 'mallopt'):
            libc.mallopt(M_MMAP_THRESHOLD, 2**30)
            libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def autocast(device, dtype):
    """ the context in which models run: mixed precision with float32 weights, or nothing for float32 """
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def be_deterministic(device, compiled):
    """
    Same machine type, versions and number of processes: same bits. On a CPU nothing here is slower for it; on a GPU attention is, and
    the embedding's gradient. torch raises where it has no such algorithm.
    """
    if compiled:
        torch.use_deterministic_algorithms(True)
    else:
        torch.set_deterministic_debug_mode('error')  # the same, without importing the compiler
    torch.utils.deterministic.fill_uninitialized_memory = False  # we read none
    if device.type == 'cuda':
        os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
        torch.backends.cuda.enable_cudnn_sdp(False)


class PackedLinear(torch.nn.Module):
    """ A Linear for a CPU, its matrix laid out once as oneDNN's bfloat16 kernels read it; torch's own does it anew at each call. """

    def __init__(self, linear):
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().bfloat16(), None)
        self.bias = None if linear.bias is None else linear.bias.detach().bfloat16()

    def forward(self, x):
        return torch.ops.mkldnn._linear_pointwise(x.bfloat16(), self.weight, self.bias, 'none', [], '').type_as(x)


def pack_for_sampling(model, device, dtype):
    """
    Cast the weights once, not for each token. On a GPU all of the model becomes bfloat16. On a CPU, matrices alone are packed, which
    halves the time of products with few rows, and all else stays float32, attention above all: over cached keys and values it takes a
    third of its time in bfloat16. -> the dtype that autocast is left with.
    """
    if dtype != torch.bfloat16 or device.type == 'mps' or device.type == 'cpu' and not cpu_has_bf16():
        return dtype
    if device.type == 'cuda':
        model.to(dtype)
    else:
        for module in list(model.modules()):
            for name, child in module.named_children():
                if isinstance(child, torch.nn.Linear):
                    setattr(module, name, PackedLinear(child))
    return torch.float32


class Clock:
    """ seconds of training, since `seconds` had passed; what is between pause() and resume() is not in them """

    def __init__(self, device, seconds=0.0):
        self.device, self.before, self.window, self.mark = device, seconds, 0.0, time.perf_counter()

    @property
    def seconds(self):
        return self.before + self.window

    def lap(self):
        """ seconds since this was called last, all that was launched done """
        if self.device.type == 'cuda':
            torch.cuda.synchronize()
        self.mark, mark = time.perf_counter(), self.mark
        return self.mark - mark

    def pause(self):
        self.window += self.lap()

    resume = lap

    def read(self):
        """ seconds of training since this was called last """
        self.pause()
        self.before, self.window, window = self.seconds, 0.0, self.window
        return window


def use_step_graph(config, device, world_size, micro_batches, scaler):
    """ whether a step is one CUDA graph: small models on one GPU, where a step is one micro-batch """
    possible = device.type == 'cuda' and world_size == micro_batches == 1 and not scaler.is_enabled()
    if config.cuda_graph == 'auto':
        return possible and totals(components(config))['params'] < SMALL_MODEL
    if config.cuda_graph and not possible:
        raise UserError("cuda_graph = True: needs one CUDA device, one micro-batch per step, and not float16")
    return config.cuda_graph


class StepGraph:
    """
    step(x, y) -> tensors, as one CUDA graph: launched whole, where launching the kernels of a small model one by one takes longer than
    they do. Shapes and addresses must stay the same, and step may leave no gradients behind. The first three calls run as they are, on
    a stream of their own, so that everything is set up before the capture.
    """

    def __init__(self, step):
        self.step, self.calls, self.graph, self.side = step, 0, None, torch.cuda.Stream()

    def __call__(self, x, y):
        self.calls += 1
        if self.calls <= 3:
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                out = self.step(x, y)
            torch.cuda.current_stream().wait_stream(self.side)
            return out
        if self.graph is None:
            self.x, self.y = x.clone(), y.clone()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):  # records, runs nothing
                self.out = self.step(self.x, self.y)
            self.graph = graph
        self.x.copy_(x)
        self.y.copy_(y)
        self.graph.replay()
        return tuple(tensor.clone() for tensor in self.out)


def choose_micro_batch_size(config, share):
    """ sequences per forward pass, for a process whose share of the batch is that many sequences """
    fits = [n for n in divisors(share) if n == 1 or n * config.block_size <= MICRO_BATCH_TOKENS]
    return config.micro_batch_size or max(fits)


def divisors(n):
    return [i for i in range(1, n + 1) if n % i == 0]


def find_micro_batch(model, config, processes, device, dtype, state):
    """ choose_micro_batch_size, on a GPU by trying; a run that is to have the same bits again keeps that of its checkpoint's state """
    share = config.batch_size // processes.world_size
    if device.type != 'cuda' or config.micro_batch_size:
        return choose_micro_batch_size(config, share)
    saved = config.deterministic is True and state and state.get('micro_batch_size')
    return saved if saved and share % saved == 0 else fit_micro_batch(model, config, share, device, dtype, processes)


def largest_that_fits(sizes, attempt, say=print):
    """ the largest of sizes (ascending) for which attempt(n) does not run out of memory """
    for n in reversed(sizes):
        try:
            attempt(n)
            return n
        except (MemoryError, RuntimeError) as e:
            if not is_out_of_memory(e):
                raise
            say(f"micro-batches of {n} sequences do not fit into memory")
    raise UserError("out of memory: not even one sequence fits; a larger --loss_chunks needs less and has the same result, or choose a "
                    "smaller --block_size or model")


def less_memory(micro):
    """ the settings with which a step of `micro` sequences at a time needs less """
    if micro > 1:
        return f"--micro_batch_size={divisors(micro)[-2]} needs less, and has the same result"
    return "a larger --loss_chunks needs less and has the same result, or choose a smaller --block_size or model"


def fit_micro_batch(model, config, share, device, dtype, processes):
    """ the largest micro-batch, up to 32k tokens, that fits into the GPU's memory, found by trying; no gradients are left behind """
    def attempt(n):
        try:
            idx = torch.zeros(n, config.block_size, dtype=torch.long, device=device)
            with autocast(device, dtype):
                model(idx, idx)[1].backward()
        finally:
            model.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()

    try:
        attempt(1)  # so that cuBLAS has its handles, for which there may be no room later
        # what will be there besides: the optimizer's two averages, what it computes, DDP's buckets; and room for what is not foreseen
        copies = 4 if processes.world_size > 1 else 3
        reserve = torch.empty(copies * sum(p.numel() for p in model.parameters()), device=device)
        torch.cuda.set_per_process_memory_fraction(0.92, device)
        sizes = [n for n in divisors(share) if n == 1 or n * config.block_size <= MAX_MICRO_BATCH_TOKENS]
        micro = largest_that_fits(sizes, attempt, processes.say)
        del reserve
    except RuntimeError as e:  # whatever it is, training itself will show
        micro = choose_micro_batch_size(config, share)
        say(f"warning: the largest micro-batch could not be tried out ({one_line(e)[:200]}); taking {micro} sequences")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)  # or this would be the run's
    if dist.is_initialized():  # the same everywhere
        smallest = torch.tensor(micro, device=device)
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        micro = int(smallest)
    return micro


def peak_flops(device_name, dtype):
    """ peak FLOP/s of a GPU by name and torch dtype (float32 runs as TF32 where there is TF32), or None where it is not known """
    words = device_name.replace('-', ' ').split()
    for name, (half, single) in PEAK_TFLOPS.items():
        if all(word in words for word in name.split()) and 'Laptop' not in words:
            if dtype == torch.bfloat16 and name in NO_BFLOAT16:
                return None
            return 1e12 * (single if dtype == torch.float32 else half)
    return None


def git_state():
    """ the checkout's commit, with '+' for uncommitted changes; None where this is none, but perhaps a folder of another repository """
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    env = {key: value for key, value in os.environ.items() if not key.startswith('GIT_')}  # of a hook that this may run in

    def git(*command):
        return subprocess.run(['git', *command], cwd=here, env=env, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        if os.path.realpath(git('rev-parse', '--show-toplevel')) != os.path.realpath(here):
            return None
        return git('rev-parse', 'HEAD') + ('+' if git('status', '--porcelain') else '')
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def device_name(device):
    """ the model of the GPU, or of the CPU where the system tells """
    if device.type == 'cuda':
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError, StopIteration):  # Linux on x86
        with open('/proc/cpuinfo', encoding='utf-8', errors='replace') as file:
            return next(line for line in file if line.startswith('model name')).partition(': ')[2].strip()
    return platform.processor() or platform.machine()


def dtype_name(dtype):
    return str(dtype).removeprefix('torch.')


def versions():
    return {'python': platform.python_version(), 'torch': str(torch.__version__), 'numpy': numpy.__version__}


def describe_machine(device, world_size):
    return {'device': str(device), 'device_name': device_name(device), 'world_size': world_size, 'host': socket.gethostname(),
            'threads': torch.get_num_threads(), 'argv': sys.argv, 'git': git_state(),
            'environment': {key: os.environ[key] for key in ENVIRONMENT if key in os.environ},
            'versions': versions()}


def peak_memory(device):
    """ bytes: of the GPU where there is one, else of the process; None where the system does not say """
    if device.type == 'cuda':
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024)
