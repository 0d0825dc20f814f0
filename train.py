"""
Train a GPT and log what its feed-forward layer costs and achieves.

    python train.py config/swiglu.py                              # 3 minutes on a laptop CPU, prepares its own data
    python train.py config/shakespeare_char.py config/gelu.py --seed=2 --max_iters=500
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_124m.py config/swiglu.py

The same command again continues the run, or says that it is finished.
"""

import gc
import os
import signal
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Literal

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # which python -P leaves out

import torch
from torch.nn.parallel import DistributedDataParallel

from configurator import FilePath, UserError, configure, is_out_of_memory, memory_for, one_line, require, run_main, what_is_wrong
from data.tokens import Dataset, prepare_if_missing
from model import GPT, GPTConfig
from training import checkpoint, rundir
from training.evaluation import describe_val, evaluate
from training.health import gradient_norms
from training.machine import (
    Clock,
    StepGraph,
    autocast,
    be_deterministic,
    choose_compile,
    choose_device,
    describe_machine,
    divisors,
    dtype_name,
    find_micro_batch,
    less_memory,
    uncompile,
    use_step_graph,
    versions,
)
from training.optimizer import SpikeGuard, configure_optimizers, learning_rate, set_learning_rate
from training.pretrained import implied_by_weights, load_gpt2
from training.processes import Processes, once, say_once, watch_signals
from training.records import announce, describe_run, log_evaluation, log_step, summarize
from training.tracking import Tracker, default_out_dir


@dataclass(frozen=True)
class TrainConfig(GPTConfig):
    # the run
    out_dir: FilePath = ''  # run directory ('' = out/<ffn>; in a wandb sweep one for each trial)
    init_from: FilePath = 'auto'  # auto = continue the same settings | scratch | resume = insist | weights: gpt2, ... or a folder
    seed: int = 1337  # of the initial weights, the order of the data, and dropout
    # data
    dataset: FilePath = 'stdlib'  # a folder of data/, or a path
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
    target_loss: float = 0.0  # stop once the validation loss is below this (0 = never)
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
    wandb_project: str = ''  # wandb project ('' = nanoffn). Where a setting is empty, wandb's own variable counts: WANDB_PROJECT, ...
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


def main():
    config = configure(TrainConfig, doc=__doc__, implied=implied_by_weights)
    config = replace(config, out_dir=os.path.normpath(config.out_dir or default_out_dir(config)))
    processes, stop_signals = Processes(), watch_signals()
    check_batch_size(config, processes.world_size)
    device, dtype = choose_device(config.device, config.dtype, processes.local_rank)
    processes.connect(device)

    data = open_dataset(config, processes)
    config = replace(config, vocab_size=config.vocab_size or data.meta['vocab_size'])
    start = rundir.choose_start(config, data, processes, dtype)
    if start.finished:
        return processes.leave()
    compiled = choose_compile(config, device, dtype)
    if config.deterministic is True or config.deterministic == 'auto' and device.type == 'cpu':
        be_deterministic(device, compiled)  # before the first product

    with memory_for("building the model", "choose a smaller one"):
        model = GPT(config, config.seed).to(device)
        if start.state:
            model.load_state_dict(start.state['model'])
        elif start.weights:
            model.load_state_dict(load_gpt2(start.weights, config, processes.say))

    if config.eval_only:
        processes.say(f"{start.path}: {describe_val(evaluate(model, data, config, processes, device, dtype))}")
        return processes.leave()

    micro = find_micro_batch(model, config, processes, device, dtype, start.state)
    step = TrainStep(model, config, device, dtype, micro, processes, compiled)
    if start.state:
        step.load_state_dict(start.state)
        start.state = None  # frees its memory
    # tokens that fit into a tenth of what is free on the GPU live there
    if device.type == 'cuda' and data.tokens['train'].nbytes < torch.cuda.mem_get_info(device)[0] / 10:
        data.keep_on(device)
    machine = describe_machine(device, processes.world_size) | {'dtype': dtype_name(dtype), 'compile': compiled}
    tracker = Tracker(processes.rank == 0, config, start.iter, describe_run(config, data, machine, start))
    announce(step, data, machine, start, tracker)
    try:
        train(config, data, step, start, processes, stop_signals, tracker)
    except UserError:
        tracker.finish(exit_code=1)
        raise


# -----------------------------------------------------------------------------
# what happens before the first step


def check_batch_size(config, world_size):
    if config.batch_size % (world_size * max(1, config.micro_batch_size)):
        raise UserError(f"batch_size = {config.batch_size}: must be a multiple of {world_size} processes"
                        + (f" x micro_batch_size = {config.micro_batch_size}" if config.micro_batch_size else ""))


def open_dataset(config, processes):
    """ rank 0 makes it if need be, the others wait """
    if processes.rank == 0:
        prepare_if_missing(config.dataset)
    processes.wait()
    data = Dataset(config.dataset, config.block_size)
    if 0 < config.vocab_size < data.meta['vocab_size']:
        raise UserError(f"vocab_size = {config.vocab_size}: dataset {config.dataset} has {data.meta['vocab_size']} token ids")
    return data


# -----------------------------------------------------------------------------
# one optimizer step


class TrainStep:
    """
    One optimizer step of a model, and what lasts from one to the next: the optimizers, float16's loss scale, the guard against spikes.

    All that can fail is done before weights and state change. So a step that fails for what 'auto' chose (compiling, a CUDA graph, the
    size of a micro-batch) is taken again without it.
    """

    def __init__(self, model, config, device, dtype, micro, processes, compiled=False):
        self.model, self.config, self.device, self.dtype, self.processes, self.compiled = model, config, device, dtype, processes, compiled
        self.optimizers = configure_optimizers(model, config, device, dtype)
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
        self.guard = SpikeGuard(device) if config.skip_spikes else None
        # on the device, until someone asks: norms of the last gradient; the step's number, the first bad one, how many were skipped
        self.norms, self.norm = None, torch.zeros((), device=device)
        self.it, self.bad_iter, self.skipped = (torch.full((), value, device=device) for value in (0, -1, 0))
        self.given_up, self.synchronizing, self.say = [], False, say_once
        self.ddp = model
        if processes.world_size > 1:
            self.ddp = DistributedDataParallel(model, device_ids=[device.index] if device.type == 'cuda' else None, broadcast_buffers=False)
        if compiled:
            model.compile(dynamic=False)  # in place: the state dict keeps its names
        self.cut_up(micro)

    def cut_up(self, micro):
        """ self.rows: which sequences of the batch each micro-batch of this process has """
        share = self.config.batch_size // self.processes.world_size
        first = self.processes.rank * share
        self.rows = [range(start, start + micro) for start in range(first, first + share, micro)]
        self.graph = None
        if use_step_graph(self.config, self.device, self.processes.world_size, len(self.rows), self.scaler):
            self.graph = StepGraph(lambda x, y: self.take([(x, y)]))

    def __call__(self, it, load):
        """ step `it`; load(it, rows) -> the micro-batches (x, y), on the device; -> the mean loss over them, on the device """
        set_learning_rate(self.optimizers, learning_rate(it, self.config))
        self.it.fill_(it)
        while True:
            try:
                batches = load(it, self.rows)
                loss, self.norms, self.norm = self.graph(*next(batches)) if self.graph else self.take(batches)
                return loss
            except Exception as e:
                if not self.give_up(e):
                    raise

    def take(self, batches):
        loss = self.accumulate(batches)
        return loss, *self.update(loss)

    def accumulate(self, batches):
        """ the gradient of the mean loss over the batches, scaled, into p.grad """
        loss, n, self.synchronizing = torch.zeros((), device=self.device), len(self.rows), False
        for j, (x, y) in enumerate(batches):
            with self.ddp.no_sync() if self.ddp is not self.model and j < n - 1 else nullcontext():
                with autocast(self.device, self.dtype):
                    micro_loss = self.ddp(x, y)[1] / n
                self.synchronizing = self.ddp is not self.model and j == n - 1
                self.scaler.scale(micro_loss).backward()
            loss += micro_loss.detach()
        return loss

    def update(self, loss):
        """ clip the gradients, step (unless they are a spike, or overflow in float16), and drop them; -> their norms before clipping """
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)  # clipping needs the true gradient
        norms = gradient_norms(self.model)
        norm, skip = norms.norm(), None
        if self.guard:
            skip, guard_state = self.guard.judge(norm)
        if self.scaler.is_enabled():  # one decision for all optimizers: an overflow in one's gradients is in the norm of all
            overflow = ~norm.isfinite()
            skip = overflow.float() if skip is None else torch.maximum(skip, overflow.float())
            for p in self.model.parameters():
                p.grad = torch.where(overflow, 0.0, p.grad)
        if self.config.grad_clip:
            true_norm = norm if skip is None else norm.nan_to_num()
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), self.config.grad_clip, true_norm)
        for optimizer in self.optimizers:
            optimizer.prepare(skip)

        # from here on things change
        for optimizer in self.optimizers:
            optimizer.apply(skip)
            optimizer.zero_grad()
        if self.guard:
            self.guard.state.copy_(guard_state)
        bad = ~loss.isfinite() if self.scaler.is_enabled() else ~(loss.isfinite() & norm.isfinite())
        self.bad_iter.copy_(torch.where((self.bad_iter < 0) & bad, self.it, self.bad_iter))
        self.skipped += ~norm.isfinite()
        self.scaler.update()
        return norms, norm

    def give_up(self, error):
        """ make do without what 'auto' chose, if that may have been the reason, for a step to be taken again; -> whether there was such """
        if self.processes.world_size > 1 and self.synchronizing:  # the others are in the middle of it
            return False
        self.model.zero_grad(set_to_none=True)
        scaler, self.scaler = self.scaler.state_dict(), torch.amp.GradScaler(self.device.type, enabled=self.scaler.is_enabled())
        if scaler:
            self.scaler.load_state_dict(scaler)
        if self.device.type == 'cuda':
            torch.cuda.empty_cache()
        micro = len(self.rows[0])
        if self.graph and self.config.cuda_graph == 'auto':
            self.graph, what, flag = None, "the CUDA graph", '--cuda_graph=True'
        elif is_out_of_memory(error) and self.config.micro_batch_size == 0 and micro > 1:
            self.cut_up(divisors(micro)[-2])
            what, flag = f"micro-batches of {micro} sequences, for {len(self.rows[0])} at a time", f'--micro_batch_size={micro}'
        elif self.compiled and self.config.compile == 'auto' and not is_out_of_memory(error):
            self.compiled, what, flag = False, "torch.compile", '--compile=True'
            uncompile(self.model)
        else:
            return False
        self.given_up.append(what)
        self.say(f"warning: training goes on without {what} ({one_line(error)[:200]}); {flag} would insist on it")
        return True

    def check_finite(self, tracker, saving_at=None):
        """ a UserError if a loss was not finite, or what is to be saved after so many steps is not; waits for the device """
        what, bad = "the loss", int(self.bad_iter)
        if bad < 0 and saving_at:
            what, bad = checkpoint.not_finite(checkpoint.tensors_of(self.state_dict())), saving_at - 1
        if what and bad >= 0:
            B = self.config.batch_size
            tracker.log({'iter': bad + 1, 'tokens': (bad + 1) * B * self.config.block_size, 'diverged': True})
            raise UserError(f"{what} is not finite at iter {bad + 1} (the batch of sequences {bad * B:,} to {(bad + 1) * B - 1:,}, "
                            f"learning rate {learning_rate(bad, self.config):.3g}, gradient norm {float(self.norm):.3g}); last checkpoint: "
                            f"{(checkpoint.paths(self.config.out_dir) or ['none'])[-1]}; lower learning_rate or set grad_clip")

    def state_dict(self):
        return {'model': self.model.state_dict(), 'optimizers': [optimizer.state_dict() for optimizer in self.optimizers],
                'scaler': self.scaler.state_dict(), 'guard': self.guard and self.guard.state}

    def load_state_dict(self, state):
        """ all but the model """
        for optimizer, saved in zip(self.optimizers, state['optimizers'], strict=True):
            optimizer.load_state_dict(saved)
        if state['scaler']:  # empty, where the run was not in float16 so far
            self.scaler.load_state_dict(state['scaler'])
        if self.guard:
            self.guard.state.copy_(state['guard'])


def load_batches(data, config, device, it, rows):
    """ the micro-batches of step `it` on the device; rows: which sequences of the batch each has """
    for sequences in rows:
        x, y = data.batch(sequences, it, config.batch_size, config.seed)
        if device.type == 'cuda' and not x.is_cuda:
            x, y = x.pin_memory(), y.pin_memory()
        if config.dropout:
            j = sequences.start // len(sequences)
            torch.manual_seed(((config.seed << 40) + (it << 16) + j) % 2**63)  # the same masks in a resumed run
        yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)


# -----------------------------------------------------------------------------
# the loop


def train(config, data, step, start, processes, stop_signals, tracker):
    device, is_main = step.device, processes.rank == 0
    clock, saver = Clock(device, start.seconds), checkpoint.Saver(config.out_dir, config.keep_checkpoints, tracker)
    load = partial(load_batches, data, config, device)
    val, best_val, logged, stop = start.val, start.best_val, start.iter, False
    step.model.train()
    if is_main:
        step.say = tracker.say

    # it goes round once more than there are steps: evaluate, save, then leave or take a step
    for it in range(start.iter, max(start.iter, config.max_iters) + 1):
        last = it >= config.max_iters
        evaluating = (last or it % config.eval_interval == 0) and not (val and val['iter'] == it)
        saving = last or it > start.iter and (stop or it % (config.checkpoint_interval or config.eval_interval) == 0)
        is_best = False
        if evaluating or saving:
            clock.pause()
            step.check_finite(tracker)
        if evaluating:
            with memory_for("evaluating", "choose a smaller --block_size or model"):
                val = {'iter': it, **evaluate(step.model, data, config, processes, device, step.dtype)}
            is_best, best_val = it > start.iter and val['val/loss'] < best_val, min(best_val, val['val/loss'])
            last = last or val['val/loss'] < config.target_loss
            if is_main:
                log_evaluation(val, data, step, clock.seconds, tracker)
        if is_main and (saving or is_best or last):
            step.check_finite(tracker, saving_at=it)
            saver.save({**step.state_dict(), 'iter': it, 'seconds': clock.seconds, 'val': val, 'best_val': best_val,
                        'config': {**asdict(config), **start.identity}, 'schedule': start.schedule, 'dtype': dtype_name(step.dtype),
                        'micro_batch_size': len(step.rows[0]), 'world_size': processes.world_size, 'tokenizer': data.meta['tokenizer'],
                        'versions': versions()}, is_best, insist=stop or last)
        if evaluating or saving:
            clock.resume()
        if last or stop:
            break

        n = it + 1  # steps that are taken after this one
        with memory_for(f"in a step of {len(step.rows[0])} sequences at a time", less_memory(len(step.rows[0]))):
            loss = step(it, load)

        if n == start.iter + 5 and device.type == 'cuda':
            gc.collect()
            gc.freeze()  # what was made by now lives until the end, and need not be looked at while the GPU waits
        # look at the numbers, which waits for the device: every step on a CPU, else every log_interval
        if device.type == 'cpu':
            step.check_finite(tracker)
        stop = processes.any(stop_signals)  # all stop after the same step
        if n == 1 or n % config.log_interval == 0 or n == config.max_iters:
            mean_loss = processes.sum(loss / processes.world_size).item()
            step.check_finite(tracker)
            step_time, logged = clock.read() / (n - logged), n
            log_step(n, mean_loss, step, step_time, clock.seconds, processes, tracker)

    processes.leave()  # when rank 0 has saved, too: torchrun ends all when one has left
    if not last:
        number = (stop_signals or [signal.SIGTERM])[0]
        tracker.say(f"stopped by {signal.Signals(number).name} at iter {it}, saved; the same command continues from there")
        tracker.finish(exit_code=128 + number, preempted=number != signal.SIGINT)  # which a person sends, or wandb's stop button
        sys.exit(128 + number)
    tracker.finish(summarize(it, val, best_val, step, clock.seconds, tracker))


def explain(error):
    """ as what_is_wrong, said by one process """
    text = what_is_wrong(error)
    if type(error).__module__.startswith(('torch._dynamo', 'torch._inductor')):
        text = f"torch.compile failed ({one_line(error)}); use --compile=False"
    return text and once(text)


if __name__ == '__main__':
    run_main(main, explain)
