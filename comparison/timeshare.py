"""
Where the time of a training step goes, component by component: an eager profile of the model alone, off the timed runs.
"""

import os
import statistics
import time

import torch

from configurator import say
from data.writer import cpu_count
from files import read_json, write_json
from model import GPT, GPTConfig
from training.machine import autocast, choose_device, choose_micro_batch_size, device_name

GROUPS = ('attention', 'ffn', 'norm', 'lm_head', 'rest')  # rest: embedding, residual additions, loss


def group_of(component):
    """ the group that a row of model.components() belongs to """
    group = component.partition('.')[0]
    return group if group in GROUPS else 'rest'


class Stopwatch:
    """ what runs between two marks takes, on the device: CUDA events there, which do not make it wait; else the clock """

    def __init__(self, device):
        self.device, self.marks = device, []

    def mark(self, label):
        """ from here on it is `label` that runs """
        if self.device.type == 'cuda':
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((label, event))
        else:
            if self.device.type == 'mps':
                torch.mps.synchronize()
            self.marks.append((label, time.perf_counter()))

    def seconds(self):
        """ {label: seconds} """
        if self.device.type == 'cuda':
            torch.cuda.synchronize()
        out = {}
        for (label, start), (_, end) in zip(self.marks, self.marks[1:], strict=False):
            span = start.elapsed_time(end) / 1000 if self.device.type == 'cuda' else end - start
            out[label] = out.get(label, 0.0) + span
        return out


def step_seconds(config, device, dtype, batch_size, steps=7, warmup=3):
    """
    [{(phase, group): seconds}] of training steps of the model that config describes: phase 'forward' or 'backward', group one of
    GROUPS. Optimizer, data and torch.compile are left out. Attention includes its projections, rotation and qk norms.
    """
    model = GPT(config).to(device)
    idx = torch.randint(config.vocab_size, (batch_size, config.block_size + 1), device=device)
    watch, phase = None, 'forward'

    def enter(group):
        return lambda *_: watch.mark((phase, group))

    def leave(*_):
        watch.mark((phase, 'rest'))

    modules = [(model.norm_f, 'norm'), (model.lm_head, 'lm_head')]
    for block in model.h:
        modules += [(block.attn, 'attention'), (block.ffn, 'ffn'), (block.norm_1, 'norm'), (block.norm_2, 'norm')]
    for module, group in modules:
        module.register_forward_pre_hook(enter(group))
        module.register_forward_hook(leave)
        module.register_full_backward_pre_hook(enter(group))
        module.register_full_backward_hook(leave)
    out = []
    for _ in range(warmup + steps):
        watch, phase = Stopwatch(device), 'forward'
        leave()
        with autocast(device, dtype):
            _, loss = model(idx[:, :-1], idx[:, 1:])
        phase = 'backward'
        leave()
        loss.backward()
        leave()
        out.append(watch.seconds())
        model.zero_grad(set_to_none=True)
    return out[warmup:]


def time_shares(configs, device, dtype, batch_size):
    """
    {ffn: {group: {'forward', 'backward': median seconds per step, 'share': of both together}}} for {ffn: config}; each FFN is visited
    twice, forth and back, so that a drift of the machine hits all alike.
    """
    steps = {ffn: [] for ffn in configs}
    for ffn in [*configs, *reversed(configs)]:
        steps[ffn] += step_seconds(configs[ffn], device, dtype, batch_size)
    out = {}
    for ffn, rows in steps.items():
        out[ffn] = {group: {phase: statistics.median(row[phase, group] for row in rows) for phase in ('forward', 'backward')}
                    for group in GROUPS}
        total = sum(sum(times.values()) for times in out[ffn].values())
        for times in out[ffn].values():
            times['share'] = (times['forward'] + times['backward']) / total
    return out


def profile(configs, machine, jobs, folder, idle):
    """ time_shares() of {ffn: config} as profile.json has them, else measured now; None while runs go on or where they were not made """
    path = os.path.join(folder, 'profile.json')
    shapes = {ffn: {key: getattr(config, key) for key in GPTConfig.__dataclass_fields__} for ffn, config in configs.items()}
    known = read_json(path)
    if all(known.get('shapes', {}).get(ffn) == shape for ffn, shape in shapes.items()):
        return known
    config = next(iter(configs.values()))
    device, dtype = choose_device(config.device, machine['dtype'])
    if not idle or device_name(device) != machine['device_name']:
        return None
    if device.type == 'cpu' and 'OMP_NUM_THREADS' not in os.environ:
        torch.set_num_threads(max(1, cpu_count() // jobs))
    say("measuring where the time of a step goes ...")
    batch_size = choose_micro_batch_size(config, config.batch_size // machine['world_size'])
    result = {'device_name': machine['device_name'], 'dtype': machine['dtype'], 'batch_size': batch_size, 'shapes': shapes,
              'threads': torch.get_num_threads() if device.type == 'cpu' else None, 'ffns': time_shares(configs, device, dtype, batch_size)}
    write_json(path, result)
    return result
