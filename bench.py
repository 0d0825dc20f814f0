"""
How fast is it, against what? Times our training, decoding and data loading side by side with a nanoGPT checkout, in one run.

    python bench.py --ref=../nanoGPT                              # one training step at the size of nanoGPT's README for CPUs
    python bench.py --preset=cpu_10m --mode=decode --ref=../nanoGPT
    python bench.py --ffns=gelu,swiglu,relu2                      # FFNs against each other, at matched parameters
    python bench.py --mode=gpu_check --ref=../nanoGPT             # what a GPU has to say, in eight minutes; --out=DIR keeps it

A machine's speed drifts, so only ratios within one run count: the sides take turns, forth and back (A B B A), and our side takes part
twice. How much it differs from itself is the noise, and a ratio closer to 1 than twice that is within it. The last line is JSON.
"""

import contextlib
import dataclasses
import importlib.util
import io
import itertools
import json
import math
import multiprocessing
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from typing import Literal

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # which python -P leaves out

import numpy as np
import torch

from comparison.matching import matched_width
from configurator import FilePath, UserError, configure, require, run_main
from data.tokens import Dataset, prepare_if_missing
from data.writer import cpu_count
from files import write_json
from model import FFNS, GPT
from sample import generate
from train import TrainConfig, TrainStep
from training.accounting import components, totals
from training.machine import (
    autocast,
    choose_compile,
    choose_device,
    describe_machine,
    device_name,
    dtype_name,
    find_micro_batch,
    pack_for_sampling,
    peak_flops,
    peak_memory,
)
from training.processes import Processes

HERE = os.path.dirname(os.path.abspath(__file__))
# nanoGPT's architecture, so that both sides compute the same function
NANOGPT = {'norm': 'layernorm', 'position': 'learned', 'qk_norm': False, 'tie_embeddings': True, 'init': 'gpt2', 'zero_init': False,
           'ffn': 'gelu', 'optimizer': 'adamw', 'beta2': 0.99, 'learning_rate': 1e-4}
PRESETS = {
    'cpu_char':  {'n_layer': 4,  'n_head': 4,  'n_embd': 128,  'block_size': 64,   'batch_size': 12, 'vocab_size': 65},
    'cpu_10m':   {'n_layer': 6,  'n_head': 6,  'n_embd': 384,  'block_size': 256,  'batch_size': 4,  'vocab_size': 65},
    'char_gpu':  {'n_layer': 6,  'n_head': 6,  'n_embd': 384,  'block_size': 256,  'batch_size': 64, 'vocab_size': 65, 'dropout': 0.2},
    'gpt2_124m': {'n_layer': 12, 'n_head': 12, 'n_embd': 768,  'block_size': 1024, 'batch_size': 12, 'vocab_size': 50304},
    'tiny':      {'n_layer': 1,  'n_head': 2,  'n_embd': 48,   'block_size': 32,   'batch_size': 4,  'vocab_size': 65, 'dropout': 0.2},
    'gpt2_350m': {'n_layer': 24, 'n_head': 16, 'n_embd': 1024, 'block_size': 1024, 'batch_size': 8,  'vocab_size': 50304},
}

# name: (seconds that it may take, arguments of this script), what is worth most first
GPU_CHECK = {
    'train-124m': (140, ['--preset=gpt2_124m', '--rounds=4']),
    'decode-124m': (90, ['--mode=decode', '--preset=gpt2_124m', '--rounds=4']),
    'train-char': (70, ['--preset=char_gpu', '--rounds=4']),
    'ffns-124m': (80, ['--ffns=gelu,swiglu,relu2', '--preset=gpt2_124m', '--rounds=4']),
    'tests': (100, ['-m', 'pytest', '-o', 'addopts=', '-v', 'tests/gpu']),
}


@dataclass(frozen=True)
class BenchConfig:
    mode: Literal['train', 'peak', 'decode', 'data', 'startup', 'eval', 'quality', 'scale', 'gpu_check'] = 'train'  # what is timed
    preset: Literal[tuple(PRESETS)] = 'cpu_char'  # the shape of the model and the batch
    ref: FilePath = ''  # a nanoGPT checkout ('' = ours alone)
    out: FilePath = ''  # folder that keeps what gpu_check prints and finds ('' = none)
    dry: bool = False  # gpu_check with tiny shapes on this machine, whatever it has, to see that all of it runs
    ffns: str = ''  # comma-separated FFNs to time against each other instead, at matched parameters
    batch_size: int = 0  # sequences per step (0 = the preset's)
    rounds: int = 8  # turns of each side
    seconds: float = 0.5  # of a turn, at least
    threads: int = 0  # on a CPU (0 = all cores)
    device: str = 'auto'  # cpu, cuda, cuda:N, mps
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # of our matrix products
    compile: Literal['auto', True, False] = 'auto'  # torch.compile on our side (auto = as train.py does it in a long run)

    def __post_init__(self):
        for key in ('batch_size', 'threads'):
            require(self, getattr(self, key) >= 0, key, "at least 0")
        require(self, self.rounds >= 2, 'rounds', "at least 2")
        require(self, self.seconds > 0, 'seconds', "above 0")
        require(self, not self.ffns or self.mode == 'train' and not self.ref, 'ffns', "left out with --ref and with another --mode")
        for ffn in filter(None, self.ffns.split(',')):
            require(self, ffn in FFNS, 'ffns', f"comma-separated names of {', '.join(FFNS)}")


# -----------------------------------------------------------------------------
# timing


def synchronize(device):
    if device.type == 'cuda':
        torch.cuda.synchronize()
    elif device.type == 'mps':
        torch.mps.synchronize()


def cpu_ticks():
    """ (busy, all) of all cores since the system started; None where it does not say """
    try:
        with open('/proc/stat', encoding='utf-8') as file:
            ticks = [int(text) for text in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)  # idle, and waiting for a disk


def busy_cores(before, after):
    """ how many cores others kept busy between two cpu_ticks(), while this process slept """
    if not before or not after or after[1] == before[1]:
        return None
    return (os.cpu_count() or 1) * (after[0] - before[0]) / (after[1] - before[1])


def timed(call, device, n=1):
    """ seconds per call, over n calls """
    synchronize(device)
    start = time.perf_counter()
    for _ in range(n):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / n


class Worker:
    """
    A side in a process of its own, or in n_processes that torch.distributed joins, as it is when it is used: build(device, *args) there
    makes the call that is timed. worker(n) -> seconds per call, over n calls; finish() -> the peak memory of one, in bytes.
    """

    def __init__(self, build, args, device, n_processes=1):
        context, self.pipes, self.processes = multiprocessing.get_context('spawn'), [], []
        threads = max(1, torch.get_num_threads() // n_processes)
        env = {'WORLD_SIZE': str(n_processes), 'MASTER_ADDR': 'localhost', 'MASTER_PORT': str(free_port())} if n_processes > 1 else {}
        for rank in range(n_processes):
            pipe, theirs = context.Pipe()
            ranks = {key: str(rank) for key in ('RANK', 'LOCAL_RANK')} if env else {}
            self.processes.append(context.Process(target=serve, args=(theirs, build, args, device, threads, env | ranks), daemon=True))
            self.processes[-1].start()
            self.pipes.append(pipe)
            theirs.close()

    def send(self, n):
        """ begin n calls """
        with contextlib.suppress(BrokenPipeError):  # which receive() will tell
            for pipe in self.pipes:
                pipe.send(n)

    def receive(self):
        try:
            return max(pipe.recv() for pipe in self.pipes)
        except (EOFError, ConnectionResetError):
            raise UserError("a side of the benchmark stopped, see above") from None

    def __call__(self, n):
        self.send(n)
        return self.receive()

    def finish(self):
        memory = self(0)
        for process in self.processes:
            process.join()
        return memory


def free_port():
    with socket.socket() as server:
        server.bind(('localhost', 0))
        return server.getsockname()[1]


def serve(pipe, build, args, device, threads, env):
    os.environ.update(env)
    if device.type == 'cpu':
        torch.set_num_threads(threads)
    call = build(device, *args)
    with contextlib.suppress(EOFError):  # the benchmark has ended early
        while n := pipe.recv():
            pipe.send(timed(call, device, n))
        pipe.send(peak_memory(device))


def take_turns(sides, rounds, seconds):
    """
    sides: {name: worker} -> {name: {'first': seconds of the first call, 'times': [seconds per call, one for each round]}}.
    The first calls, which compile, begin together. Then each is warmed up until three calls in a row agree within 5 %, or for four turns;
    the order is reversed in every other round.
    """
    out, calls = {}, {}
    for side in sides.values():
        side.send(1)
    firsts = {name: side.receive() for name, side in sides.items()}
    for name, side in sides.items():
        first, last = firsts[name], []
        while sum(last) < 4 * seconds and (len(last) < 3 or max(last[-3:]) > 1.05 * min(last[-3:])):
            last.append(side(1))
        out[name], calls[name] = {'first': first, 'times': []}, max(1, math.ceil(seconds / statistics.median(last[-3:])))
    for turn in range(rounds):
        for name in list(sides)[::-1] if turn % 2 else sides:
            out[name]['times'].append(sides[name](calls[name]))
    return out


def step_times(variants, n_processes=1):
    """ {ffn: seconds of a training step} of {ffn: TrainConfig}, each on n_processes, taking turns """
    config = next(iter(variants.values()))
    device, dtype = choose_device(config.device, config.dtype)
    workers = {ffn: Worker(our_step, (variant, dtype, choose_compile(variant, device, dtype)), device, n_processes)
               for ffn, variant in variants.items()}
    results = take_turns(workers, rounds=8, seconds=0.5)
    for worker in workers.values():
        worker.finish()
    return {ffn: statistics.median(row['times']) for ffn, row in results.items()}


def ratio(a, b):
    """ how many times as long a takes as b: the median over the rounds, in which they took turns """
    return statistics.median(x / y for x, y in zip(a['times'], b['times'], strict=True))


def noise(a, again):
    """ how far a side is from itself: the median over the rounds """
    return statistics.median(abs(x / y - 1) for x, y in zip(a['times'], again['times'], strict=True))


def judged(value, noise):
    return f"{value:.2f}x" + (" (within noise)" if abs(value - 1) < 2 * noise else "")


# -----------------------------------------------------------------------------
# the two sides


def our_config(config, **changes):
    shape = PRESETS[config.preset] | ({'batch_size': config.batch_size} if config.batch_size else {})
    return TrainConfig(**(NANOGPT | shape | changes))


def our_step(device, train_config, dtype, compiled):
    """ a call that takes one optimizer step as train.py does, on one of four batches that lie ready """
    processes = Processes()
    if processes.world_size > 1:
        device = torch.device(device.type)  # each has its own
    device, _ = choose_device(str(device), local_rank=processes.local_rank)  # sets up the process as train.py does
    processes.connect(device)
    share = train_config.batch_size // processes.world_size
    model = GPT(train_config, train_config.seed).to(device)
    micro = find_micro_batch(model, train_config, processes, device, dtype, None)
    step = TrainStep(model, train_config, device, dtype, micro, processes, compiled)
    batches, its = random_batches(replace(train_config, batch_size=share), device), itertools.count()

    def load(it, rows):
        x, y = next(batches)
        yield from zip(x.split(len(rows[0])), y.split(len(rows[0])), strict=True)
    return lambda: step(next(its), load)


def random_batches(shape, device):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(shape.vocab_size, (4, shape.batch_size, shape.block_size + 1), generator=generator).to(device)
    return itertools.cycle([(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in ids])


def nanogpt(ref):
    """ the module model.py of the checkout """
    path = os.path.join(ref, 'model.py')
    spec = importlib.util.spec_from_file_location('nanogpt_model', path)
    module = importlib.util.module_from_spec(spec)
    sys.modules['nanogpt_model'] = module
    spec.loader.exec_module(module)
    return module


def reference_model(ref, shape, device, compiled):
    module = nanogpt(ref)
    sizes = {key: getattr(shape, key) for key in ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd')}
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its parameter count
        model = module.GPT(module.GPTConfig(**sizes, dropout=shape.dropout, bias=False)).to(device)
        optimizer = model.configure_optimizers(1e-1, 1e-4, (0.9, 0.99), device.type)
    return torch.compile(model) if compiled else model, optimizer


def reference_step(device, ref, shape):
    """ the same for nanoGPT, as its train.py does it: on a GPU compiled and with bfloat16 autocast, on a CPU neither """
    model, optimizer = reference_model(ref, shape, device, compiled=device.type == 'cuda')
    batches = random_batches(shape, device)

    def step():
        x, y = next(batches)
        with autocast(device, torch.bfloat16 if device.type == 'cuda' else torch.float32):
            _, loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return step


def prompt_of_16(shape, batch_size, device):
    return torch.randint(shape.vocab_size, (batch_size, 16), generator=torch.Generator().manual_seed(0)).to(device)


def our_decode(device, shape, dtype, batch_size, n):
    """ a call that samples n tokens after a prompt of 16 """
    choose_device(str(device))
    model, prompt = GPT(shape, shape.seed).to(device), prompt_of_16(shape, batch_size, device)
    dtype = pack_for_sampling(model, device, dtype)

    def call():
        with autocast(device, dtype):
            for _ in generate(model, prompt, n):
                pass
    return call


def reference_decode(device, ref, shape, batch_size, n):
    model, prompt = reference_model(ref, shape, device, False)[0].eval(), prompt_of_16(shape, batch_size, device)

    def call():
        with autocast(device, torch.bfloat16 if device.type == 'cuda' else torch.float32):
            model.generate(prompt, n)
    return call


# -----------------------------------------------------------------------------
# modes; each prints a table and returns what goes into the JSON


def measure_peak(device, dtypes=None):
    """ {'float32', 'bfloat16': FLOP/s of a large matrix product, 'copy': bytes/s}, medians of 10 """
    n, out = (8192 if device.type == 'cuda' else 1024), {}
    for dtype in dtypes or (torch.float32, torch.bfloat16):
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        timed(lambda a=a, b=b: a @ b, device, 3)
        out[dtype_name(dtype)] = 2 * n**3 / statistics.median(timed(lambda a=a, b=b: a @ b, device) for _ in range(10))
    a = torch.empty(2**28 if device.type == 'cuda' else 2**25, device=device)  # floats
    b = torch.empty_like(a)
    timed(lambda: b.copy_(a), device, 3)
    out['copy'] = 2 * a.numel() * 4 / statistics.median(timed(lambda: b.copy_(a), device) for _ in range(10))
    return out


def bench_peak(config, device, dtype):
    peak = measure_peak(device)
    for key, value in peak.items():
        print(f"{key:<10} {value / 1e9:>12,.1f} {'GB/s' if key == 'copy' else 'GFLOP/s'}")
    return {'peak': peak}


def bench_train(config, device, dtype):
    shape = our_config(config)
    compiled = choose_compile(replace(shape, compile=config.compile, max_iters=10**6), device, dtype)
    builds = {}
    if config.ffns:
        for ffn in config.ffns.split(','):
            variant = our_config(config, ffn=ffn)
            builds[ffn] = our_step, (replace(variant, intermediate_size=matched_width(variant)), dtype, compiled), dtype
    else:
        builds['ours'] = our_step, (shape, dtype, compiled), dtype
        if config.ref:
            builds['nanoGPT'] = reference_step, (config.ref, shape), torch.bfloat16 if device.type == 'cuda' else torch.float32
        if compiled and device.type == 'cpu':
            builds['ours, eager'] = our_step, (shape, dtype, False), dtype
        if dtype != torch.float32 and device.type == 'cpu':
            builds['ours, float32'] = our_step, (shape, torch.float32, False), torch.float32
        ours = TrainConfig(**{key: getattr(shape, key) for key in PRESETS[config.preset]}, ffn='gelu')
        builds['ours, own recipe'] = our_step, (ours, dtype, compiled), dtype  # RoPE, QK-norm, RMSNorm, untied, Muon
        if device.type == 'cuda' and not config.batch_size and shape.batch_size != 64:
            large = replace(shape, batch_size=64)
            builds['ours, 64 sequences'] = our_step, (large, dtype, compiled), dtype
    names = list(builds)
    peak = measure_peak(device, {kind for _, _, kind in builds.values()})
    sides = {name: Worker(build, args, device) for name, (build, args, _) in builds.items()}
    results = take_turns({**sides, 'again': sides[names[0]]}, config.rounds, config.seconds)
    spread = noise(results[names[0]], results['again'])
    baseline = 'nanoGPT' if 'nanoGPT' in results else names[0]
    header = ('ms/step', 10), ('min', 9), ('tokens/s', 12), ('GFLOP/s', 10), ('of peak', 9), ('of sheet', 9), ('first s', 9), ('GiB', 7)
    print(f"{'side':<20}{''.join(f'{name:>{width}}' for name, width in header)}  against {baseline}")
    for name, (_, args, kind) in builds.items():
        train_config = next(arg for arg in args if isinstance(arg, TrainConfig))
        row, tokens = results[name], train_config.batch_size * train_config.block_size
        flops = totals(components(train_config))['train_flops'] * tokens
        seconds = statistics.median(row['times'])
        sheet = peak_flops(device_name(device), kind) if device.type == 'cuda' else None
        per_token = tokens / (shape.batch_size * shape.block_size)
        row |= {'ms': 1000 * seconds, 'tokens_per_sec': tokens / seconds, 'flops_per_sec': flops / seconds,
                'of_peak': flops / seconds / peak[dtype_name(kind)],
                'of_datasheet': flops / seconds / sheet if sheet else None,
                'memory': sides[name].finish(), 'ratio': ratio(results[baseline], row) * per_token}
        of_sheet = 'n/a' if sheet is None else f"{row['of_datasheet']:.1%}"
        print(f"{name:<20}{row['ms']:>10.2f}{1000 * min(row['times']):>9.2f}{row['tokens_per_sec']:>12,.0f}"
              f"{row['flops_per_sec'] / 1e9:>10,.0f}{row['of_peak']:>9.1%}{of_sheet:>9}{row['first']:>9.2f}"
              f"{(row['memory'] or 0) / 2**30:>7.2f}  {judged(row['ratio'], spread) if name != baseline else ''}")
    peaks = ', '.join(f'{key} {value / 1e9:,.0f}' for key, value in peak.items() if key != 'copy')
    print(f"noise {spread:.1%} ({names[0]} against itself, median of {config.rounds} rounds); peak measured here: {peaks} GFLOP/s, "
          f"copy {peak['copy'] / 1e9:,.0f} GB/s")
    return {'sides': results, 'noise': spread, 'peak': peak, 'ratio': results[names[0]]['ratio'] if config.ref else None}


def bench_decode(config, device, dtype):
    """ tokens sampled one by one after a prompt of 16, nothing recomputed on our side """
    shape, out = our_config(config), {}
    n = min(200, shape.block_size - 16)
    print(f"{'sequences':<12}{'ours tok/s':>12}{'nanoGPT':>10}{'ratio':>8}   {n} new tokens each")
    for batch_size in (1, 64) if device.type == 'cuda' else (1, 8):
        sides = {'ours': Worker(our_decode, (shape, dtype, batch_size, n), device)}
        if config.ref:
            sides['nanoGPT'] = Worker(reference_decode, (config.ref, shape, batch_size, n), device)
        results = take_turns({**sides, 'again': sides['ours']}, max(2, config.rounds // 2), config.seconds)
        for side in sides.values():
            side.finish()
        speed = {name: batch_size * n / statistics.median(row['times']) for name, row in results.items()}
        row = {'tokens_per_sec': speed, 'ratio': ratio(results['nanoGPT'], results['ours']) if config.ref else None,
               'noise': noise(results['ours'], results['again'])}
        theirs = f"{speed['nanoGPT']:>10,.0f}  {judged(row['ratio'], row['noise'])}" if config.ref else ""
        print(f"{batch_size:<12}{speed['ours']:>12,.0f}{theirs}")
        out[batch_size] = row
    return {'decode': out, 'ratio': out[1]['ratio']}


def bench_data(config, device, dtype):
    """ the batch of a step, made on the CPU: ours, and nanoGPT's get_batch """
    prepare_if_missing('stdlib')
    shape = our_config(config)
    data, steps, random = Dataset('stdlib', shape.block_size), itertools.count(), torch.Generator().manual_seed(0)
    B, T, tokens = shape.batch_size, shape.block_size, data.tokens['train']

    def theirs():  # nanoGPT's get_batch
        ix = torch.randint(len(tokens) - T, (B,), generator=random)
        torch.stack([torch.from_numpy((tokens[i:i + T]).astype(np.int64)) for i in ix])
        torch.stack([torch.from_numpy((tokens[i + 1:i + 1 + T]).astype(np.int64)) for i in ix])

    cpu = torch.device('cpu')
    ours = [timed(lambda: data.batch(range(B), next(steps), B, 1), cpu) for _ in range(200)]
    other = [timed(theirs, cpu) for _ in range(200)]
    rows = {name: {f'p{q}': float(np.percentile(times, q)) for q in (50, 95)} for name, times in (('ours', ours), ('nanoGPT', other))}
    for name, row in rows.items():
        print(f"{name:<10} p50 {1000 * row['p50']:.3f} ms, p95 {1000 * row['p95']:.3f} ms a batch of {B} x {T}")
    return {'data': rows, 'ratio': rows['nanoGPT']['p50'] / rows['ours']['p50']}


def run_train(*flags, env=None):
    """ -> wall seconds and summary of a run of train.py in a folder of its own """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, os.path.join(HERE, 'train.py'), f'--out_dir={folder}/run', '--wandb=disabled', *flags]
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})})
        wall = time.perf_counter() - start
        if done.returncode:
            raise UserError(f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1]}")
        with open(os.path.join(folder, 'run', 'summary.json')) as file:
            return wall, json.load(file)


def bench_startup(config, device, dtype):
    """ the command line to the end of the first step, with an empty and then with a filled compile cache """
    prepare_if_missing('stdlib')
    flags = [f'--{key}={value}' for key, value in PRESETS[config.preset].items() if key != 'vocab_size']
    flags += [f'--device={device}', '--max_iters=1', '--eval_tokens=1']
    with tempfile.TemporaryDirectory() as cache:
        cold, warm = (run_train(*flags, f'--compile={config.compile}', env={'TORCHINDUCTOR_CACHE_DIR': cache})[0] for _ in range(2))
    print(f"cold {cold:.1f} s, warm {warm:.1f} s")
    return {'startup': {'cold': cold, 'warm': warm}, 'ratio': cold / warm}


def bench_eval(config, device, dtype):
    """ which part of a default run is not training """
    prepare_if_missing('stdlib')
    wall, summary = run_train(f'--device={device}')
    share = 1 - summary['seconds'] / wall
    print(f"{wall:.1f} s in all, {summary['seconds']:.1f} s of training: {share:.1%} for start, evaluation and checkpoints")
    return {'overhead': share, 'wall': wall, 'ratio': None}


def bench_quality(config, device, dtype):
    """ seconds to the validation loss of nanoGPT's README for CPUs: its command against ours, on Tiny Shakespeare """
    target = 1.8857  # of nanoGPT's 2,000 steps, over the full validation split
    prepare_if_missing('shakespeare_char')
    shape = ['--n_layer=4', '--n_head=4', '--n_embd=128', '--block_size=64', '--batch_size=12', '--dropout=0.0']
    wall, summary = run_train('config/shakespeare_char.py', *shape, '--learning_rate=8e-3', '--max_iters=280', '--eval_interval=280',
                              f'--target_loss={target}', f'--device={device}')
    print(f"ours     {wall:>7.1f} s to {summary['val_loss']:.4f} in {summary['iter']} steps ({summary['seconds']:.1f} s of training)")
    if not config.ref:
        return {'ours': wall, 'ratio': None}
    with tempfile.TemporaryDirectory() as folder:
        data = os.path.join('data', 'shakespeare_char')
        os.makedirs(os.path.join(folder, data))
        for name in ('train.py', 'model.py', 'configurator.py', 'config'):
            os.symlink(os.path.join(os.path.abspath(config.ref), name), os.path.join(folder, name))
        for split in ('train', 'val'):  # the same ids: nanoGPT's vocabulary is the sorted characters too
            os.symlink(os.path.join(HERE, data, f'{split}.bin'), os.path.join(folder, data, f'{split}.bin'))
        with open(os.path.join(folder, data, 'meta.pkl'), 'wb') as file:  # without it nanoGPT takes GPT-2's vocabulary
            file.write(b"(dp0\nVvocab_size\np1\nI65\ns.")  # {'vocab_size': 65}
        command = [sys.executable, 'train.py', 'config/train_shakespeare_char.py', '--device=cpu', '--compile=False', '--eval_iters=20',
                   '--log_interval=1', *shape, '--max_iters=2000', '--lr_decay_iters=2000']
        start = time.perf_counter()
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        theirs = time.perf_counter() - start
        if done.returncode:
            raise UserError(f"nanoGPT failed: {done.stderr.strip().splitlines()[-1]}")
        losses = re.findall(r'val loss ([\d.]+)', done.stdout)
    print(f"nanoGPT  {theirs:>7.1f} s for its 2,000 steps (its own estimate of the loss: {losses[-1]})\nratio    {theirs / wall:.2f}x")
    return {'ours': wall, 'nanoGPT': theirs, 'ratio': theirs / wall}


def bench_scale(config, device, dtype):
    """ how the step time grows with context, width, depth and vocabulary """
    shape, out = our_config(config), {}
    compiled = choose_compile(replace(shape, compile=config.compile), device, dtype)
    for key, factors in (('block_size', (1, 2, 4)), ('n_embd', (1, 2, 4)), ('n_layer', (1, 2, 4)), ('vocab_size', (1, 8, 64))):
        for factor in factors:
            changed = replace(shape, **{key: getattr(shape, key) * factor})
            worker = Worker(our_step, (changed, dtype, compiled), device)
            times = take_turns({'ours': worker}, 3, config.seconds)['ours']['times']
            worker.finish()
            seconds = statistics.median(times)
            flops = totals(components(changed))['train_flops'] * changed.batch_size * changed.block_size
            out[f'{key}={getattr(changed, key)}'] = {'ms': 1000 * seconds, 'flops_per_sec': flops / seconds}
            print(f"{key:<12}{getattr(changed, key):>8,}{1000 * seconds:>10.2f} ms{flops / seconds / 1e9:>10,.0f} GFLOP/s", flush=True)
    return {'scale': out, 'ratio': None}


def bench_gpu_check(config, device, dtype):
    """ training, decoding and the tests of a GPU, each in a process of its own and under a limit of its own, shown as they come """
    if device.type != 'cuda' and not config.dry:
        raise UserError("mode = 'gpu_check': no CUDA device here; --dry runs it with tiny shapes on what there is")
    if config.out:
        os.makedirs(config.out, exist_ok=True)
    out = {}
    for name, (limit, args) in GPU_CHECK.items():
        if name != 'tests':
            args = ['bench.py', *args, *([f'--ref={config.ref}'] if config.ref and 'ffns' not in name else [])]
        if config.dry:
            small = ['--preset=tiny', '--rounds=2', '--seconds=0.01', '--compile=False', f'--device={device}']
            args = [arg for arg in args if not arg.startswith('--preset')] + (['--collect-only'] if name == 'tests' else small)
        print(f"\n$ python {' '.join(args)}", flush=True)
        out[name] = run_for([sys.executable, '-u', *args], limit, config.out and os.path.join(config.out, f'{name}.log'))
        print(f"{name}: {out[name]['seconds']:.0f} s, exit status {out[name]['rc']}", flush=True)
        if config.out:
            write_json(os.path.join(config.out, 'gpu_check.json'), out)
    return {'checks': out, 'ratio': None}


def run_for(command, limit, log):
    """
    command's output, shown as it comes and kept in log; it is ended, with all that it started, after limit seconds.
    -> {rc, seconds, result: its last line of JSON or None}
    """
    start, result = time.perf_counter(), None
    process = subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors='replace',
                               env={**os.environ, 'WANDB_MODE': 'disabled'}, start_new_session=True)
    timer = threading.Timer(limit, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    try:
        with open(log or os.devnull, 'w', encoding='utf-8') as file:
            for line in process.stdout:
                file.write(line)
                file.flush()
                if line.startswith('{"config": '):  # as main ends
                    result = json.loads(line)
                else:
                    print(line, end='', flush=True)
        rc = process.wait()
    finally:  # Ctrl-C, too, ends it
        timer.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return {'rc': rc, 'seconds': time.perf_counter() - start, 'result': result}


def main():
    config = configure(BenchConfig, doc=__doc__)
    config = replace(config, ref=config.ref and os.path.abspath(config.ref))  # for processes that start elsewhere
    device, dtype = choose_device(config.device, config.dtype)
    if config.ref and not os.path.isfile(os.path.join(config.ref, 'model.py')):
        raise UserError(f"ref = {config.ref!r}: no model.py there; git clone https://github.com/karpathy/nanoGPT and name its folder")
    if device.type == 'cpu':
        torch.set_num_threads(config.threads or cpu_count())
    ticks = cpu_ticks()
    time.sleep(1)
    busy, machine = busy_cores(ticks, cpu_ticks()), describe_machine(device, 1)
    warning = f"  WARNING: others keep {busy:.1f} of its cores busy" if busy and busy > 0.2 else ""
    print(f"{config.mode} {config.preset}: {machine['device_name']}, {dtype_name(dtype)}, {torch.get_num_threads()} threads, "
          f"torch {torch.__version__}{warning}", flush=True)
    result = globals()[f'bench_{config.mode}'](config, device, dtype)
    print(json.dumps({'config': dataclasses.asdict(config), 'machine': machine, 'busy_cores': busy, **result}))


if __name__ == '__main__':
    run_main(main)
