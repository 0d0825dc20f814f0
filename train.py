"""
Train a GPT and log what its feed-forward layer costs and achieves.

    python train.py config/swiglu.py                              # 3 minutes on a laptop CPU, prepares its own data
    python train.py config/shakespeare_char.py config/gelu.py --seed=2 --max_iters=500
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_124m.py config/swiglu.py

The same command again continues the run, or says that it is finished.
"""

import gc
import math
import os
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import checkpoint
from configurator import UserError, configure, die, require
from data.tokens import Dataset, prepare_if_missing
from machine import (
    StepGraph,
    autocast,
    be_deterministic,
    choose_device,
    cpu_compiles,
    cpu_has_bf16,
    describe_machine,
    divisors,
    fit_micro_batch,
    peak_flops,
    peak_memory,
)
from model import GPT, GPTConfig, component_of, components, ffn_health, split_parts, table, totals
from optimizer import SpikeGuard, configure_optimizers, learning_rate, set_learning_rate
from tracking import Tracker, one_line, read_json
from weights import RUNS, gpt2_tokenizer, implied_by_weights, load_gpt2

MICRO_BATCH_TOKENS = 2**14  # of an automatic micro-batch on a CPU
SMALL_MODEL = 30e6  # parameters below which a GPU waits for its kernels to be launched
WORTH_COMPILING = 1e13  # FLOPs of training from which compiling pays on a CPU: it takes half a minute, and then a third off each step
HEALTH_TOKENS = 2**12  # validation tokens that the FFN diagnostics see
EVAL_BATCH_TOKENS = 2**13  # of a batch in evaluation; a constant, so that the loss does not depend on how training is cut up


@dataclass(frozen=True)
class TrainConfig(GPTConfig):
    # the run
    out_dir: str = ''  # run directory ('' = out/<ffn>; in a wandb sweep one for each trial)
    init_from: str = 'auto'  # auto = continue the same settings | scratch | resume = insist | gpt2, gpt2-medium, ... or a folder: weights
    seed: int = 1337  # of the initial weights, the order of the data, and dropout
    # data
    dataset: str = 'stdlib'  # a folder of data/, or a path
    vocab_size: int = 0  # number of token ids (0 = the dataset's; more pads the embedding)
    batch_size: int = 16  # sequences per optimizer step, over all processes
    micro_batch_size: int = 0  # sequences per forward pass (0 = choose); changes memory and speed, not the result
    # optimization
    max_iters: int = 720  # optimizer steps
    optimizer: Literal['muon', 'adamw'] = 'muon'  # for the matrices of the blocks; AdamW has the rest
    learning_rate: float = 1e-2  # peak, for both
    schedule: Literal['wsd', 'cosine', 'constant'] = 'wsd'  # after the warm-up: hold then fall linearly | cosine | hold
    warmup_iters: int = 50  # steps of linear warm-up
    lr_decay_iters: int = 0  # the step at which the schedule ends (0 = max_iters)
    decay_fraction: float = 0.5  # of the schedule that wsd spends falling
    min_lr: float = 0.0  # learning rate at the end of the schedule
    weight_decay: float = 0.1  # on matrices only
    beta1: float = 0.9  # AdamW
    beta2: float = 0.95  # AdamW
    muon_momentum: float = 0.9  # Muon
    grad_clip: float = 1.0  # largest norm of the gradient (0 = do not clip)
    skip_spikes: bool = False  # leave out steps whose gradient norm is over 6 standard deviations above its running mean
    # evaluation and logging
    eval_interval: int = 360  # steps between evaluations; the first is before training, the last step is always evaluated
    eval_tokens: int = 131072  # validation tokens per evaluation, always the same ones (0 = the whole split)
    eval_only: bool = False  # evaluate the run's newest checkpoint, or the weights of init_from, write nothing, and stop
    target_loss: float = 0.0  # stop once the validation loss is this low (0 = never)
    log_interval: int = 10  # steps between lines of training loss
    checkpoint_interval: int = 0  # steps between checkpoints (0 = at each evaluation); the last step is always saved
    keep_checkpoints: int = 2  # newest ones kept, besides best.pt
    # the machine
    device: str = 'auto'  # cpu, cuda, cuda:N, mps
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # of matrix products; weights are float32
    compile: Literal['auto', True, False] = 'auto'  # torch.compile (auto = on CUDA, and for long runs on a CPU with bfloat16)
    cuda_graph: Literal['auto', True, False] = 'auto'  # a whole step as one CUDA graph (auto = on CUDA, for small models without dropout)
    deterministic: Literal['auto', True, False] = 'auto'  # the same bits from the same run again (auto = on a CPU; slower on a GPU)
    # wandb
    wandb: Literal['auto', 'online', 'offline', 'disabled'] = 'auto'  # auto = online where a key is configured, else offline
    wandb_project: str = 'nanoffn'  # wandb project
    wandb_entity: str = ''  # user or team that the project belongs to ('' = your default)
    wandb_name: str = ''  # run name ('' = <ffn>-s<seed>)
    wandb_group: str = ''  # runs that belong together
    wandb_tags: str = ''  # comma-separated
    wandb_notes: str = ''  # what the run is about

    def __post_init__(self):
        super().__post_init__()
        for key in ('batch_size', 'eval_interval', 'log_interval', 'keep_checkpoints'):
            require(self, getattr(self, key) >= 1, key, "at least 1")
        for key in ('vocab_size', 'micro_batch_size', 'max_iters', 'warmup_iters', 'lr_decay_iters', 'min_lr', 'weight_decay',
                    'grad_clip', 'eval_tokens', 'target_loss', 'checkpoint_interval', 'seed'):
            require(self, getattr(self, key) >= 0, key, "at least 0")
        for key in ('beta1', 'beta2', 'muon_momentum'):
            require(self, 0 <= getattr(self, key) < 1, key, "at least 0 and below 1")
        require(self, self.learning_rate > 0, 'learning_rate', "above 0")
        require(self, self.min_lr <= self.learning_rate, 'min_lr', f"at most learning_rate = {self.learning_rate}")
        require(self, 0 <= self.decay_fraction <= 1, 'decay_fraction', "between 0 and 1")
        require(self, self.micro_batch_size == 0 or self.batch_size % self.micro_batch_size == 0, 'batch_size',
                f"a multiple of micro_batch_size = {self.micro_batch_size}")


def choose_micro_batch_size(config, share):
    """ sequences per forward pass, for a process whose share of the batch is that many sequences """
    fits = [n for n in divisors(share) if n == 1 or n * config.block_size <= MICRO_BATCH_TOKENS]
    return config.micro_batch_size or max(fits)


def accumulate(ddp, batches, n, scaler, device, dtype):
    """ the gradient of the mean loss over the n micro-batches (x, y), scaled by scaler, into p.grad; -> that loss, on the device """
    loss = torch.zeros((), device=device)
    for j, (x, y) in enumerate(batches):
        with ddp.no_sync() if isinstance(ddp, DistributedDataParallel) and j < n - 1 else nullcontext():
            with autocast(device, dtype):
                micro_loss = ddp(x, y)[1] / n
            scaler.scale(micro_loss).backward()
        loss += micro_loss.detach()
    return loss


def update(model, optimizers, scaler, grad_clip, guard=None):
    """ clip the gradients, step (unless guard finds a spike), and drop them; -> the norm before clipping, on the device """
    for optimizer in optimizers:
        scaler.unscale_(optimizer)  # clipping needs the true gradient
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf)
    skip = guard.judge(norm) if guard else None
    for optimizer in optimizers:
        scaler.step(optimizer, skip)
        optimizer.zero_grad()
    scaler.update()
    return norm


def choose_compile(config, device, dtype):
    if config.compile != 'auto':
        return config.compile
    if device.type != 'cpu':
        return device.type == 'cuda'
    flops = config.max_iters * config.batch_size * config.block_size * totals(components(config))['train_flops']
    return flops >= WORTH_COMPILING and dtype == torch.bfloat16 and cpu_has_bf16() and cpu_compiles()


def use_step_graph(config, device, world_size, micro_batches, scaler):
    """ whether a step is one CUDA graph: small models on one GPU, where a step is one micro-batch and has nothing random in it """
    possible = device.type == 'cuda' and world_size == micro_batches == 1 and not config.dropout and not scaler.is_enabled()
    if config.cuda_graph == 'auto':
        return possible and totals(components(config))['params'] < SMALL_MODEL
    if config.cuda_graph and not possible:
        raise UserError("cuda_graph = True: needs one CUDA device, one micro-batch per step, no dropout, and not float16")
    return config.cuda_graph


def gradient_norms(model, scale=1.0):
    """ {component: norm of its gradient / scale}, as tensors; the squares add up to the square of the whole norm """
    squares = {}
    for name, p in model.named_parameters():
        for part, grad in split_parts(name, p.grad, model.config):
            squares.setdefault(component_of(part), []).append(grad.float().square().sum())
    return {component: torch.stack(values).sum().sqrt() / scale for component, values in squares.items()}


@torch.no_grad()
def evaluate(model, data, config, rank, world_size, device, dtype):
    """
    Validation loss over the fixed windows of the split: {'val/loss' in nats per token, 'val/stderr', 'val/bpb', 'val/tokens'}.

    The windows are cut into the same batches whatever micro_batch_size and the number of processes, each of which takes its
    share; sums are kept per window and added in one order, so the result depends on nothing but the weights and the data. The
    standard error is over windows: how well these tokens measure the loss, not how much it varies between seeds.
    """
    model.eval()
    starts, first = data.eval_windows(config.eval_tokens)
    rows = max(1, EVAL_BATCH_TOKENS // config.block_size)
    sums = torch.zeros(len(starts), dtype=torch.float64)
    for i in range(rank * rows, len(starts), rows * world_size):
        take = list(range(i, min(i + rows, len(starts))))
        x, y = data.eval_batch(starts[take + take[-1:] * (rows - len(take))])  # padded: always the same shape
        for row, window in enumerate(take):
            y[row, :first[window]] = -1
        with autocast(device, dtype):
            _, loss = model(x.to(device), y.to(device), reduction='none')
        sums[take] = loss.view(rows, -1).sum(1).cpu().double()[:len(take)]
    model.train()
    if world_size > 1:
        sums = sums.to(device)
        dist.all_reduce(sums)
    counts = torch.from_numpy(config.block_size - first).double()
    sums, n = sums.cpu(), len(starts)
    loss = (sums.sum() / counts.sum()).item()
    stderr = (sums / counts).std().item() / math.sqrt(n) if n > 1 else None
    return {'val/loss': loss, 'val/stderr': stderr, 'val/bpb': data.bits_per_byte(loss), 'val/tokens': int(counts.sum())}


SIGNALS = [getattr(signal, name) for name in ('SIGINT', 'SIGTERM', 'SIGUSR1', 'SIGHUP') if hasattr(signal, name)]


def watch_signals():
    """ -> a list that holds the number of the signal that asked the run to stop; a second one stops it at once """
    received, at = [], []

    def on_signal(number, frame):
        if received and time.monotonic() > at[0] + 0.5:  # what comes together is one: a launcher may pass on what the group got too
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        received.append(number)  # nothing else here: the loop finishes its step, saves and leaves
        at.append(time.monotonic())

    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, on_signal)
    return received


def default_out_dir(config):
    """ out/<ffn>; the trials of a wandb sweep differ in more than that, and one that was preempted comes again under its id """
    sweep, trial = os.environ.get('WANDB_SWEEP_ID'), os.environ.get('WANDB_RUN_ID')
    if sweep and trial:
        return os.path.join('out', f'sweep-{sweep}', f'{config.ffn}-s{config.seed}-{trial}')
    return os.path.join('out', config.ffn)


def main():
    config = configure(TrainConfig, doc=__doc__, implied=implied_by_weights)
    config = replace(config, out_dir=os.path.normpath(config.out_dir or default_out_dir(config)))

    # the processes: one, or those of torchrun
    rank, world_size, local_rank = (int(os.environ.get(key, n)) for key, n in (('RANK', 0), ('WORLD_SIZE', 1), ('LOCAL_RANK', 0)))
    B, T = config.batch_size, config.block_size
    if B % (world_size * max(1, config.micro_batch_size)):
        raise UserError(f"batch_size = {B}: must be a multiple of {world_size} processes"
                        + (f" x micro_batch_size = {config.micro_batch_size}" if config.micro_batch_size else ""))
    say = print if rank == 0 else lambda line: None  # until there is a tracker
    device, dtype = choose_device(config.device, config.dtype, local_rank)
    stop_signals = watch_signals()
    if world_size > 1:
        dist.init_process_group('nccl' if device.type == 'cuda' else 'gloo')
        signal_group = dist.new_group(backend='gloo')  # through which the processes agree to stop, without waiting for their GPUs

    # the data; rank 0 makes it if need be, the others wait
    if rank == 0:
        prepare_if_missing(config.dataset)
    if world_size > 1:
        dist.barrier()
    data = Dataset(config.dataset, config.block_size)
    if 0 < config.vocab_size < data.meta['vocab_size']:
        raise UserError(f"vocab_size = {config.vocab_size}: dataset {config.dataset} has {data.meta['vocab_size']} token ids")
    config = replace(config, vocab_size=config.vocab_size or data.meta['vocab_size'])

    # what to start from; rank 0 holds the run directory until its process ends
    weights = None if config.init_from in RUNS else config.init_from
    if weights and data.meta['tokenizer'] != (tokenizer := gpt2_tokenizer(weights)):
        raise UserError(f"init_from = {weights!r} reads {tokenizer['name']} tokens, and dataset {config.dataset} is of "
                        f"{data.meta['tokenizer']['name']} tokens; choose another --dataset")
    settings = {**asdict(config), 'data': data.fingerprint, 'weights': weights and os.path.normpath(weights)}
    finished, path, state = False, None, None
    if config.eval_only and weights:
        path = weights
    elif config.eval_only:
        path, state = find_model(config.out_dir, settings)
    elif rank == 0:
        held, path, state = checkpoint.open_run(config.out_dir, config.init_from, settings, defaults=asdict(TrainConfig()))
        finished = is_finished(config, state)
    if world_size > 1 and not config.eval_only:
        shared = [finished, path]
        dist.broadcast_object_list(shared)
        finished, path = shared
        if rank > 0 and path:
            state = checkpoint.load(path)
    if finished:
        return

    model = GPT(config, config.seed).to(device)
    if state:
        model.load_state_dict(state['model'])
        settings['weights'] = state['config'].get('weights')
    elif weights:
        model.load_state_dict(load_gpt2(weights, config, say))
    # how a batch is cut up: into micro-batches, dealt out to the processes in turn
    share = B // world_size
    micro = choose_micro_batch_size(config, share)
    if device.type == 'cuda' and not config.micro_batch_size and not config.eval_only:
        micro = fit_micro_batch(model, config, share, device, dtype, say)
    micro_batches = range(rank, B // micro, world_size)
    compiled = choose_compile(config, device, dtype)
    if config.deterministic is True or config.deterministic == 'auto' and device.type == 'cpu':
        be_deterministic(device, compiled)
    if compiled:
        model.compile(dynamic=False)  # in place: the state dict keeps its names
    if config.eval_only:
        val = evaluate(model, data, config, rank, world_size, device, dtype)
        if rank == 0:
            print(f"{path}: {describe_val(val)}")
        return
    optimizers = configure_optimizers(model, config, device, dtype)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    guard = SpikeGuard(device) if config.skip_spikes else None
    if guard and device.type == 'mps':
        raise UserError("skip_spikes = True: not on mps; use another --device, or leave it out")
    start_iter, seconds, best_val, val = 0, 0.0, math.inf, None
    if state:
        start_iter, seconds, best_val, val = state['iter'], state['seconds'], state['best_val'], state['val']
        for optimizer, saved in zip(optimizers, state['optimizers'], strict=True):
            optimizer.load_state_dict(saved)
        scaler.load_state_dict(state['scaler'])
        if guard:
            guard.state.copy_(state['guard'])
        state = None  # frees its memory
    ddp = model
    if world_size > 1:
        ddp = DistributedDataParallel(model, device_ids=[device.index] if device.type == 'cuda' else None, gradient_as_bucket_view=True)

    # tokens that fit into a tenth of what is free on the GPU live there
    if device.type == 'cuda' and data.tokens['train'].nbytes < torch.cuda.mem_get_info(device)[0] / 10:
        data.keep_on(device)

    # say and log what this run is
    cost = totals(components(config))
    machine = describe_machine(device, world_size) | {'dtype': str(dtype).removeprefix('torch.'), 'compile': compiled}
    peak = peak_flops(machine['device_name'], dtype) if device.type == 'cuda' else None
    tracker = Tracker(rank == 0, config, start_iter, {
        'config': asdict(config), 'components': components(config), 'total': cost, 'machine': machine,
        'data': {'dataset': config.dataset, 'fingerprint': data.fingerprint, 'tokenizer': data.meta['tokenizer']['name'],
                 'vocab_size': data.meta['vocab_size'], 'tokens': data.meta['tokens'], 'bytes': data.meta['bytes']}})
    tracker.say(table(config))
    tracker.say(f"data     {config.dataset}: {data.meta['tokens']['train']:,} train and {data.meta['tokens']['val']:,} val tokens, "
                f"vocabulary {data.meta['vocab_size']:,}, fingerprint {data.fingerprint}")
    tracker.say(f"batch    {B} x {T} = {B * T:,} tokens per step (processes {world_size} x micro-batches {len(micro_batches)} x "
                f"sequences {micro}); {config.max_iters:,} steps are {config.max_iters * B * T / data.meta['tokens']['train']:.2f} epochs")
    tracker.say(f"machine  {device} ({machine['device_name']}), {machine['dtype']}, {'compiled' if compiled else 'eager'}")
    origin = f"continued from iter {start_iter}" if path else f"from {weights or 'scratch'}"
    tracker.say(f"run      {config.out_dir}, {origin}; "
                f"saved every {config.checkpoint_interval or config.eval_interval} steps and at the end")

    def load(it):
        """ this process's micro-batches of step `it`, on the device """
        for j in micro_batches:
            x, y = data.batch(range(j * micro, (j + 1) * micro), it, B, config.seed)
            if device.type == 'cuda' and not x.is_cuda:
                x, y = x.pin_memory(), y.pin_memory()
            if config.dropout:
                torch.manual_seed(((config.seed << 40) + (it << 16) + j) % 2**63)  # the same masks in a resumed run
            yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)

    mark, window, window_iters = time.perf_counter(), 0.0, 0  # seconds and steps since the last line, evaluation left out

    def lap():
        nonlocal mark
        if device.type == 'cuda':
            torch.cuda.synchronize()
        mark, before = time.perf_counter(), mark
        return mark - before

    def check_finite():
        if (bad := int(bad_iter)) >= 0:
            tracker.log({'iter': bad + 1, 'tokens': (bad + 1) * B * T, 'diverged': True})
            tracker.finish(exit_code=1)
            raise UserError(f"the loss is not finite at iter {bad + 1} (the batch of sequences {bad * B:,} to {(bad + 1) * B - 1:,}, "
                            f"learning rate {learning_rate(bad, config):.3g}, gradient norm {float(norm):.3g}); last checkpoint: "
                            f"{(checkpoint.paths(config.out_dir) or ['none'])[-1]}; lower learning_rate or set grad_clip")

    failures = 0

    def save(it, is_best, insist):
        """ a full disk is a warning twice in a row, unless insist """
        nonlocal failures
        if rank > 0:
            return
        tracker.sync()
        try:
            checkpoint.save(config.out_dir, {
                'model': model.state_dict(), 'optimizers': [optimizer.state_dict() for optimizer in optimizers],
                'scaler': scaler.state_dict(), 'guard': guard and guard.state, 'iter': it, 'seconds': seconds + window, 'val': val,
                'best_val': best_val, 'config': settings, 'tokenizer': data.meta['tokenizer'], 'world_size': world_size,
                'versions': machine['versions'],
            }, config.keep_checkpoints, is_best)
            failures = 0
        except checkpoint.NoSpace as e:
            failures += 1
            if insist or failures == 3:
                tracker.finish(exit_code=1)
                raise UserError(f"{e}; make room, then the same command continues from the newest") from None
            tracker.say(f"warning: {e}; training goes on, and the next save is at the next interval")

    step_graph = None
    if use_step_graph(config, device, world_size, len(micro_batches), scaler):
        step_graph = StepGraph(lambda x, y: (accumulate(model, [(x, y)], 1, scaler, device, dtype),
                                             update(model, optimizers, scaler, config.grad_clip, guard)))

    # the loop goes round once more than there are steps: evaluate, save, then leave or take a step
    stop, norms = False, {}
    norm, bad_iter, skipped = (torch.full((), value, device=device) for value in (0.0, -1, 0))  # stay on the device between lines
    ddp.train()
    if device.type == 'cuda':
        gc.collect()
        gc.freeze()  # what lives until the end need not be looked at again and again, while the GPU waits
    for it in range(start_iter, max(start_iter, config.max_iters) + 1):
        last = it >= config.max_iters
        evaluating = (last or it % config.eval_interval == 0) and not (val and val['iter'] == it)
        saving = last or it > start_iter and (stop or it % (config.checkpoint_interval or config.eval_interval) == 0)
        is_best = False
        if evaluating or saving:
            window += lap()
            check_finite()
        if evaluating:
            val = {'iter': it, **evaluate(model, data, config, rank, world_size, device, dtype)}
            is_best, best_val = it > start_iter and val['val/loss'] < best_val, min(best_val, val['val/loss'])
            last = last or val['val/loss'] <= config.target_loss
            record = {'iter': it, 'tokens': it * B * T, 'flops': it * B * T * cost['train_flops'], 'seconds': seconds + window,
                      **{key: value for key, value in val.items() if key != 'iter'},
                      **{f'grad_norm/{component}': value.item() for component, value in norms.items()}}
            if rank == 0:
                x, _ = data.eval_batch(data.eval_windows(HEALTH_TOKENS)[0])
                with autocast(device, dtype):
                    health = ffn_health(model, x.to(device))
                for name, values in health.items():
                    record[f'ffn/{name}'] = sum(values) / len(values)
                    record.update({f'ffn/{layer}/{name}': value for layer, value in enumerate(values)})
                tracker.say(f"iter {it}: {describe_val(val)}; FFN hidden rms {record['ffn/hidden_rms']:.3g}, "
                            f"dead units {record['ffn/dead_frac']:.1%}")
            tracker.log(record)
        if saving or is_best or last:
            save(it, is_best, insist=stop or last)
        if evaluating or saving:
            lap()  # not training time
        if last or stop:
            break

        # one optimizer step
        lr = learning_rate(it, config)
        set_learning_rate(optimizers, lr, device)
        wants_norms = it + 1 == config.max_iters or (it + 1) % config.eval_interval == 0
        if step_graph and not wants_norms:  # the graph leaves no gradients to look at
            loss, norm = step_graph(*next(load(it)))
        else:
            loss = accumulate(ddp, load(it), len(micro_batches), scaler, device, dtype)
            if wants_norms:
                norms = gradient_norms(model, scaler.get_scale())
            norm = update(model, optimizers, scaler, config.grad_clip, guard)
        bad = ~loss.isfinite() if scaler.is_enabled() else ~(loss.isfinite() & norm.isfinite())
        bad_iter = torch.where((bad_iter < 0) & bad, it, bad_iter)
        skipped += ~norm.isfinite()  # with float16 the scaler skips such a step
        window_iters += 1

        # look at the numbers, which waits for the device: every step on a CPU, else every log_interval
        n = it + 1
        if device.type == 'cpu':
            check_finite()
        stop = bool(stop_signals)
        if world_size > 1:  # all stop after the same step
            asked = torch.tensor(float(stop))
            dist.all_reduce(asked, dist.ReduceOp.MAX, group=signal_group)
            stop = bool(asked)
        if n == 1 or n % config.log_interval == 0 or n == config.max_iters:
            mean_loss = loss / world_size
            if world_size > 1:
                dist.all_reduce(mean_loss)
            train_loss = mean_loss.item()
            check_finite()
            window += lap()
            seconds += window
            step_time, speed = window / window_iters, window_iters * B * T / window
            flops = speed * cost['train_flops']
            mfu = flops / (peak * world_size) if peak else None
            window, window_iters = 0.0, 0
            tracker.log({'iter': n, 'tokens': n * B * T, 'flops': n * B * T * cost['train_flops'], 'seconds': seconds, 'lr': lr,
                         'train/loss': train_loss, 'grad_norm': norm.item(), 'tokens_per_sec': speed, 'mfu': mfu,
                         **({'skipped_steps': int(skipped)} if scaler.is_enabled() else {}),
                         **({'spikes': int(guard.state[3])} if guard else {})})
            # a narrow terminal cuts what comes last
            tracker.progress(n, f"loss {train_loss:.5f} | eta {clock((config.max_iters - n) * step_time)} | {1000 * step_time:.0f} ms | "
                                f"{speed:,.0f} tok/s | mfu {f'{mfu:.1%}' if mfu else 'n/a'} | {flops / 1e9:,.0f} GFLOP/s | lr {lr:.2e}")

    seconds += window
    if world_size > 1:
        dist.barrier(signal_group)  # until rank 0 has saved: torchrun ends all when one has left
    if not last:
        number = (stop_signals or [signal.SIGTERM])[0]
        tracker.say(f"stopped by {signal.Signals(number).name} at iter {it}, saved; the same command continues from there")
        tracker.finish(exit_code=128 + number, preempted=number != signal.SIGINT)  # which a person sends, or wandb's stop button
        sys.exit(128 + number)
    summary = {'iter': it, 'val_loss': val['val/loss'], 'val_stderr': val['val/stderr'], 'val_bpb': val['val/bpb'],
               'best_val_loss': best_val, 'tokens': it * B * T, 'seconds': seconds, 'params': cost['params'],
               'flops': it * B * T * cost['train_flops'], 'peak_memory': peak_memory(device)}
    memory = f"{summary['peak_memory'] / 2**30:.2f} GiB" if summary['peak_memory'] else "n/a"
    tracker.say(f"final {describe_val(val)}; best {best_val:.5f}\n"
                f"trained on {summary['tokens']:,} tokens in {clock(seconds)}, peak memory {memory}\n"
                f"next: python sample.py --out_dir={config.out_dir}")
    tracker.finish(summary)


def find_model(out_dir, settings):
    """ -> path, state of the checkpoint that eval_only evaluates; a UserError when it is of another model or other data """
    path, state = checkpoint.load_latest(out_dir)
    if not state:
        raise UserError(f"eval_only: no checkpoint in {out_dir}; name the run with --out_dir")
    keys = {*GPTConfig.__dataclass_fields__, 'data'} - checkpoint.MAY_CHANGE - {'dropout'}
    differences = [f"{key} is {state['config'].get(key)!r}, not {settings[key]!r}" for key in sorted(keys)
                   if state['config'].get(key) != settings[key]]
    if differences:
        raise UserError(f"eval_only: {path} differs from the settings: {', '.join(differences)}")
    return path, state


def is_finished(config, state):
    """ whether the run in out_dir has nothing left to do, which is then said with its result """
    summary = read_json(os.path.join(config.out_dir, 'summary.json'))
    if not state or summary.get('iter') != state['iter']:
        return False
    if state['iter'] < config.max_iters and summary['val_loss'] > config.target_loss:
        return False
    print(f"{config.out_dir} is finished at iter {state['iter']}: {describe_val(state['val'])}\n"
          "continue it with a larger --max_iters, or start afresh with "
          + ("--init_from=scratch" if config.init_from in RUNS else "another --out_dir"))
    return True


def describe_val(val):
    stderr = f" ± {val['val/stderr']:.4f}" if val['val/stderr'] is not None else ""
    return f"val loss {val['val/loss']:.5f}{stderr} nats per token on {val['val/tokens']:,} tokens, {val['val/bpb']:.4f} bits per byte"


def clock(seconds):
    minutes, seconds = divmod(int(seconds), 60)
    return f'{minutes // 60}:{minutes % 60:02}:{seconds:02}' if minutes >= 60 else f'{minutes}:{seconds:02}'


if __name__ == '__main__':
    try:
        main()
    except (UserError, torch.OutOfMemoryError) as e:
        die(e if isinstance(e, UserError) else "out of memory; set a smaller --micro_batch_size, which does not change the result")
    except OSError as e:
        if e.errno not in checkpoint.NO_SPACE:
            raise
        die(f"{e.filename or 'a file of the run'} could not be written: {e.strerror}; make room, then the same command continues")
    except Exception as e:
        if not type(e).__module__.startswith(('torch._dynamo', 'torch._inductor')):
            raise
        die(f"torch.compile failed ({one_line(e)}); use --compile=False")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
