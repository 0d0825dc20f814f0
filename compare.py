"""
Which feed-forward layer wins, and is that more than luck? Trains several FFNs over several seeds under equal conditions.

    python compare.py                                             # relu, gelu, swiglu x 3 seeds on the embedded data
    python compare.py config/shakespeare_char.py --ffns=gelu,swiglu,geglu,relu2 --n_seeds=5
    python compare.py config/gpt2_124m.py --n_gpus=8 --ffns=gelu,swiglu              # one run at a time over 8 GPUs
    python compare.py config/gpt2_124m.py --n_gpus=8 --jobs=8 --ffns=gelu,swiglu     # eight one-GPU runs side by side
    python compare.py --report_only                               # the report again, from the runs that exist
    python compare.py --runs=out/gelu,out/swiglu                  # compare runs that were trained by hand

Every setting of train.py passes through. Runs live in out/compare/<name>/<ffn>-s<seed>/; the same command again keeps what is
finished and continues what is not. The report is out/compare/<name>/report.md, with plots and results.json beside it.
"""

import ctypes
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal

import torch

import checkpoint
from configurator import UserError, configure, die, require
from data.tokens import Dataset, prepare_if_missing
from data.writer import cpu_count
from machine import choose_device, device_name
from model import FFNS, GPTConfig, components
from report import IGNORED, add_profile, finite, headline, log_to_wandb, make_results, match_line, read_run, summary_table, write_report
from timeshare import time_shares
from tracking import last_record, read_json, read_metrics, write_json
from train import TrainConfig, choose_micro_batch_size, clock

HERE = os.path.dirname(os.path.abspath(__file__))
STATUSES = ('done', 'running', 'left', 'diverged', 'failed')
TUNING_SEED = 10**6  # above `seed`: the runs that choose a learning rate are never those of the report
MAX_TUNING_STEPS = 6  # extensions of the grid of learning rates


@dataclass(frozen=True)
class CompareConfig(TrainConfig):
    # the comparison
    name: str = ''  # of the comparison, whose folder is out/compare/<name> ('' = <dataset>-<match>)
    ffns: str = 'relu,gelu,swiglu'  # comma-separated names of model.FFNS, or all; takes the place of ffn
    baseline: str = ''  # the FFN that the others are measured against ('' = gelu if it takes part, else the first)
    n_seeds: int = 3  # seeds per FFN, from `seed` up
    match: Literal['params', 'flops', 'time', 'width4d'] = 'params'  # what is made equal; width4d: every FFN as wide, which is not a match
    width_multiple: int = 0  # matched widths are multiples of this (0 = 8 below 512, 64 above)
    margin: float = 0.005  # nats per token; a difference that is surely smaller is a tie
    tune_lr: str = ''  # multiples of learning_rate to try for each FFN on other seeds, as 0.5,1,2 ('' = the same for all)
    tune_seeds: int = 1  # seeds per FFN and learning rate of that search
    n_gpus: int = 0  # GPUs (with device=cpu: processes) to use (0 = one device)
    jobs: int = 1  # runs side by side, which share the GPUs or the CPU's cores
    report_only: bool = False  # make the report again from the runs that exist
    runs: str = ''  # comma-separated run directories to compare instead of training any

    def __post_init__(self):
        super().__post_init__()
        for key in ('n_seeds', 'tune_seeds', 'jobs'):
            require(self, getattr(self, key) >= 1, key, "at least 1")
        for key in ('width_multiple', 'n_gpus', 'margin'):
            require(self, getattr(self, key) >= 0, key, "at least 0")
        names = self.ffn_names
        for name in names:
            require(self, name in FFNS, 'ffns', f"comma-separated names of {', '.join(FFNS)}, or all")
        require(self, len(set(names)) == len(names) >= 2 or self.runs or self.report_only, 'ffns', "at least two different FFNs")
        require(self, self.baseline in ('', *names) or self.runs or self.report_only, 'baseline', f"one of {', '.join(names)}")
        require(self, all(multiple > 0 for multiple in self.lr_multiples), 'tune_lr', "comma-separated numbers above 0, as 0.5,1,2")
        require(self, len(self.lr_multiples) != 1, 'tune_lr', "at least two multiples of learning_rate")
        require(self, self.n_gpus % self.jobs == 0, 'n_gpus', f"a multiple of jobs = {self.jobs}")
        require(self, self.match != 'time' or self.jobs == 1 or self.n_gpus, 'jobs',
                "1 when match = 'time', or each with GPUs of its own (n_gpus)")
        require(self, self.batch_size % self.processes == 0, 'batch_size', f"a multiple of the {self.processes} processes of a run")
        # settings of a single run that would make the runs unequal, or no runs at all
        for key in ('eval_only', 'target_loss', 'init_from', 'multiple_of', 'wandb_name', 'wandb_group'):
            default = TrainConfig.__dataclass_fields__[key].default
            why = "; widths are solved here, see width_multiple" if key == 'multiple_of' else ""
            require(self, getattr(self, key) == default, key, f"left at {default!r} in a comparison{why}")

    @property
    def ffn_names(self):
        return list(FFNS) if self.ffns == 'all' else [name.strip() for name in self.ffns.split(',')]

    @property
    def base(self):
        return self.baseline or ('gelu' if 'gelu' in self.ffn_names else self.ffn_names[0])

    @property
    def lr_multiples(self):
        try:
            return sorted({float(text) for text in self.tune_lr.split(',')}) if self.tune_lr else []
        except ValueError:
            return [math.nan]  # which no check lets pass

    @property
    def processes(self):
        return max(1, self.n_gpus // self.jobs)


# -----------------------------------------------------------------------------
# what is made equal


def ffn_cost(config, width, match):
    """ of all layers' FFN at a hidden width: its parameters, or its forward FLOPs per token when match is 'flops' """
    rows = components(replace(config, intermediate_size=width))
    return sum(row['flops' if match == 'flops' else 'params'] for row in rows if row['name'].startswith('ffn.'))


def matched_width(config, match='params', multiple=0):
    """
    The hidden width at which config.ffn costs what the ungated reference costs, which is config.intermediate_size wide, or 4 *
    n_embd: the multiple nearest in cost. match: what counts, 'params' or 'flops' ('time' takes the width of params; 'width4d' that
    of the reference itself). multiple: 0 for 8 below 512 and 64 above, where GPUs gain from it.
    """
    width = config.intermediate_size or 4 * config.n_embd
    if match == 'width4d':
        return width
    target = ffn_cost(replace(config, ffn='relu'), width, match)
    # the cost is a straight line in the width, so two points give the ideal width
    at_0, at_1 = (ffn_cost(config, n, match) for n in (1, 2))
    ideal = 1 + (target - at_0) / (at_1 - at_0)
    multiple = multiple or (8 if ideal < 512 else 64)
    below = max(multiple, multiple * int(ideal // multiple))
    return min((below, below + multiple), key=lambda n: abs(ffn_cost(config, n, match) - target))


def train_config(config, **changes):
    """ the settings of one run, without those of the comparison """
    return TrainConfig(**{field.name: getattr(config, field.name) for field in fields(TrainConfig)} | changes)


def run_config(variant, folder, seed, label=''):
    return replace(variant, seed=seed, out_dir=os.path.join(folder, f'{variant.ffn}{label}-s{seed}'),
                   wandb_name=f'{variant.ffn}{label}-s{seed}', wandb_group=os.path.basename(folder))


def make_variants(config, vocab_size):
    """ {ffn: TrainConfig}: equal in everything but the FFN and its width """
    # curves need points: eight evaluations, unless these would read more tokens than training does
    interval = max(1, config.max_iters // 8, config.eval_tokens // (config.batch_size * config.block_size))
    base = train_config(config, vocab_size=vocab_size, eval_interval=min(config.eval_interval, interval))
    return {ffn: replace(base, ffn=ffn, intermediate_size=matched_width(replace(base, ffn=ffn), config.match, config.width_multiple))
            for ffn in config.ffn_names}


# -----------------------------------------------------------------------------
# the runs


def arguments(config):
    """ the command line that makes train.py's settings these """
    default = TrainConfig()
    return [f'--{key}={value}' for key, value in asdict(config).items() if value != getattr(default, key)]


def read_state(config, fingerprint):
    """
    -> {'status': 'done' | 'diverged' | 'left', 'fraction': of the steps, 'val_loss': ...} of a run's directory.
    Raises UserError when it holds a run of other settings or other data.
    """
    run = read_json(os.path.join(config.out_dir, 'run.json'))
    if not run:
        return {'status': 'left', 'fraction': 0.0}
    wanted = {**asdict(config), 'data': fingerprint}
    saved = {**asdict(TrainConfig()), **run['config'], 'data': run['data']['fingerprint']}
    changed = [f"{key} was {saved.get(key)!r}, now {value!r}" for key, value in wanted.items()
               if key not in IGNORED and saved.get(key) != value]
    if changed:
        raise UserError(f"{config.out_dir} was trained with other settings: {', '.join(changed)}; "
                        "give this comparison a --name of its own")
    summary = read_json(os.path.join(config.out_dir, 'summary.json'))
    if summary.get('iter') == config.max_iters:
        return {'status': 'done', 'fraction': 1.0, 'val_loss': summary['val_loss']}
    last = last_record(os.path.join(config.out_dir, 'metrics.jsonl'))
    if last.get('diverged'):
        return {'status': 'diverged', 'fraction': 1.0, 'val_loss': math.inf}
    return {'status': 'left', 'fraction': last.get('iter', 0) / max(1, config.max_iters)}


def launch(config, slot, n_gpus, jobs):
    """ start train.py on slot's share of the machine; -> the process. It stops by itself, saved, should this process die. """
    command, processes = [sys.executable], max(1, n_gpus // jobs)
    if processes > 1:
        command += ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={processes}']
    env = dict(os.environ)
    if jobs > 1:
        env.setdefault('OMP_NUM_THREADS', str(max(1, cpu_count() // jobs)))
    if jobs > 1 and n_gpus:
        gpus = env.get('CUDA_VISIBLE_DEVICES', ','.join(map(str, range(n_gpus)))).split(',')
        env['CUDA_VISIBLE_DEVICES'] = ','.join(gpus[slot * processes:(slot + 1) * processes])
    die_with_us = None
    if sys.platform == 'linux':
        libc = ctypes.CDLL(None)
        die_with_us = lambda: libc.prctl(1, signal.SIGTERM)  # noqa: E731  PR_SET_PDEATHSIG
    with open(config.out_dir + '.log', 'a', encoding='utf-8') as file:
        return subprocess.Popen([*command, os.path.join(HERE, 'train.py'), *arguments(config)], env=env, stdin=subprocess.DEVNULL,
                                stdout=file, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=die_with_us)


def run_all(configs, fingerprint, n_gpus, jobs, title):
    """
    Train every config that is not finished, `jobs` at a time; -> [state of each]: 'done', 'diverged' or 'failed', with its val_loss.

    A run that fails or diverges does not stop the others. SIGINT and SIGTERM let the running ones save, then leave with 128 + the
    signal's number; a second one kills them.
    """
    states = [read_state(config, fingerprint) for config in configs]
    board = Board(title, configs, states)
    waiting = [i for i, state in enumerate(states) if state['status'] == 'left']
    running, signals = {}, []

    def on_signal(number, frame):
        signals.append(number)
        for _, process in running.values():  # only the leader: torchrun passes it on to its workers
            if len(signals) == 1:
                process.send_signal(signal.SIGTERM)
            else:
                os.killpg(process.pid, signal.SIGKILL)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while running or waiting and not signals:
            for slot in set(range(jobs)) - running.keys():
                for _ in range(len(waiting)):
                    i = waiting.pop(0)
                    try:
                        checkpoint.lock(configs[i].out_dir).close()
                    except checkpoint.InUse:  # by a run of an earlier start that is still saving: come back later
                        waiting.append(i)
                        continue
                    except UserError as e:
                        states[i] |= {'status': 'failed', 'message': str(e)}
                        continue
                    if not signals:
                        states[i]['status'] = 'running'
                        running[slot] = i, launch(configs[i], slot, n_gpus, jobs)
                        if signals:  # came while it was being launched
                            running[slot][1].terminate()
                    break
            time.sleep(0.5)
            for slot, (i, process) in list(running.items()):
                rc = process.poll()
                states[i] = read_state(configs[i], fingerprint)
                if rc is None:
                    states[i]['status'] = 'running'
                    continue
                del running[slot]
                if states[i]['status'] == 'left' and not signals:
                    states[i] |= {'status': 'failed', 'message': last_words(configs[i].out_dir + '.log', rc)}
            board.draw(states, bool(signals))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for _, process in running.values():  # after an error of our own
            process.terminate()
    for config, state in zip(configs, states, strict=True):
        if state['status'] == 'failed':
            print(f"failed: {os.path.basename(config.out_dir)}: {state['message']}", flush=True)
    if signals:
        print("stopped; finished runs are kept and the others saved: the same command continues", flush=True)
        sys.exit(128 + signals[0])
    return states


def last_words(log, rc):
    with open(log, encoding='utf-8', errors='replace') as file:
        lines = [line.strip() for line in file if line.strip()]
    errors = [line for line in lines if 'rror: ' in line]
    return f"{(errors or lines or ['no output'])[-1]} (exit status {rc}, see {log})"


class Board:
    """ The state of all runs: a table that is redrawn in place on a terminal, else a line for each change. """

    def __init__(self, title, configs, states):
        self.title, self.configs, self.height, self.said = title, configs, 0, {}
        self.start, self.start_work = time.monotonic(), self.work(states)
        self.rows = list(dict.fromkeys(self.row(config) for config in configs))
        self.columns = list(dict.fromkeys(config.seed for config in configs))

    def row(self, config):
        return os.path.basename(config.out_dir).rpartition('-s')[0]

    def work(self, states):
        """ steps done, of all runs """
        return sum(state['fraction'] * config.max_iters for state, config in zip(states, self.configs, strict=True))

    def counts(self, states, stopping):
        left = sum(config.max_iters * (1 - state['fraction']) for state, config in zip(states, self.configs, strict=True)
                   if state['status'] in ('left', 'running'))
        speed = (self.work(states) - self.start_work) / (time.monotonic() - self.start + 1e-9)
        eta = 'stopping' if stopping else f'eta {clock(left / speed)}' if speed > 0 else 'eta ?'
        number = {status: sum(state['status'] == status for state in states) for status in STATUSES}
        return ' · '.join([f'{n} {status}' for status, n in number.items() if n or status in STATUSES[:3]] + ([eta] if left else []))

    def cell(self, state):
        if state['status'] == 'done':
            return f"{state['val_loss']:.4f}"
        if state['status'] == 'running' or state['status'] == 'left' and state['fraction']:
            return f"{state['fraction']:.0%}" + ('' if state['status'] == 'running' else ' left')
        return '·' if state['status'] == 'left' else state['status']

    def draw(self, states, stopping):
        if not sys.stdout.isatty():
            for config, state in zip(self.configs, states, strict=True):
                if state['status'] in ('done', 'diverged', 'failed', 'running') and self.said.get(config.out_dir) != state['status']:
                    self.said[config.out_dir] = state['status']
                    result = f" val loss {state['val_loss']:.5f}" if state['status'] == 'done' else ''
                    print(f"{os.path.basename(config.out_dir)} {state['status']}{result} | {self.counts(states, stopping)}", flush=True)
            return
        cells = {(self.row(config), config.seed): self.cell(state) for config, state in zip(self.configs, states, strict=True)}
        (width, height), name = shutil.get_terminal_size(), max(map(len, self.rows))
        shown = self.columns[:max(1, (width - name - 1) // 10)]
        lines = [self.title, ' ' * name + ''.join(f"{f's{seed}':>10}" for seed in shown)]
        lines += [f'{row:<{name}}' + ''.join(f'{cells.get((row, seed), ""):>10}' for seed in shown) for row in self.rows]
        lines = [*lines, self.counts(states, stopping)][-max(1, height - 1):]  # what scrolled off could not be redrawn
        up = f'\x1b[{self.height}A' if self.height else ''
        print(up + ''.join(f'\x1b[2K{line[:width - 1]}\n' for line in lines), end='', flush=True)
        self.height = len(lines)


# -----------------------------------------------------------------------------
# what the FFNs may differ in besides, when asked: steps (match = 'time') and learning rate (tune_lr)


def step_times(variants, folder, train):
    """
    {ffn: seconds per step}, by train.py itself: each FFN in two short runs, forth and back (A B C C B A), so that a drift of the
    machine hits all alike; the median over all spans of 5 steps after 20 of warm-up.
    """
    configs = []
    for label, order in (('-forth', list(variants)), ('-back', list(variants)[::-1])):
        for ffn in order:
            timed = replace(variants[ffn], max_iters=50, warmup_iters=20, lr_decay_iters=0, log_interval=5, eval_interval=50,
                            eval_tokens=variants[ffn].block_size, wandb='disabled')
            configs.append(run_config(timed, os.path.join(folder, 'timing'), timed.seed, label))
    times = {ffn: [] for ffn in variants}
    for config, state in zip(configs, train(configs, "timing"), strict=True):
        if state['status'] != 'done':
            raise UserError(f"{config.out_dir} could not be timed: {state.get('message', state['status'])}")
        times[config.ffn] += [config.batch_size * config.block_size / record['tokens_per_sec']
                              for record in read_metrics(os.path.join(config.out_dir, 'metrics.jsonl'))
                              if 'tokens_per_sec' in record and record['iter'] > 20]
    return {ffn: statistics.median(values) for ffn, values in times.items()}


def stretch(config, max_iters):
    """ the same schedule over another number of steps """
    ratio = max_iters / config.max_iters
    return replace(config, max_iters=max_iters, warmup_iters=round(config.warmup_iters * ratio),
                   lr_decay_iters=round(config.lr_decay_iters * ratio), eval_interval=max(1, round(config.eval_interval * ratio)))


def scale_lr(config, multiple):
    return replace(config, learning_rate=config.learning_rate * multiple, min_lr=config.min_lr * multiple)


def tune(variants, config, folder, train):
    """ {ffn: {multiple of the learning rate: mean val loss over the tuning seeds}}; grids grow until the best is inside """
    grids = {ffn: dict.fromkeys(config.lr_multiples) for ffn in variants}
    for _ in range(1 + MAX_TUNING_STEPS):
        configs, keys = [], []
        for seed in range(config.seed + TUNING_SEED, config.seed + TUNING_SEED + config.tune_seeds):
            for ffn, grid in grids.items():
                for multiple in sorted(grid):
                    configs.append(run_config(scale_lr(variants[ffn], multiple), os.path.join(folder, 'tuning'), seed, f'-lr{multiple:g}'))
                    keys.append((ffn, multiple))
        losses = {key: [] for key in keys}
        for run, key, state in zip(configs, keys, train(configs, "learning rates"), strict=True):
            if state['status'] == 'failed':
                raise UserError(f"{run.out_dir} failed: {state['message']}")
            losses[key].append(state['val_loss'])
        for ffn, multiple in losses:
            grids[ffn][multiple] = statistics.fmean(losses[ffn, multiple])
        grown = False
        for grid in grids.values():
            ordered = sorted(grid)
            best = min(grid, key=grid.get)
            if best == ordered[0]:
                grid[ordered[0] ** 2 / ordered[1]] = None
            elif best == ordered[-1]:
                grid[ordered[-1] ** 2 / ordered[-2]] = None
            grown |= None in grid.values()
        if not grown:
            return grids
    raise UserError(f"the best learning rate is still at the edge of the grid after {MAX_TUNING_STEPS} extensions; "
                    f"choose another --learning_rate or --tune_lr ({folder}/tuning has the runs)")


# -----------------------------------------------------------------------------


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
    print("measuring where the time of a step goes ...", flush=True)
    batch_size = choose_micro_batch_size(config, config.batch_size // machine['world_size'])
    result = {'device_name': machine['device_name'], 'dtype': machine['dtype'], 'batch_size': batch_size, 'shapes': shapes,
              'threads': torch.get_num_threads() if device.type == 'cpu' else None, 'ffns': time_shares(configs, device, dtype, batch_size)}
    write_json(path, result)
    return result


def make_report(config, folder, dirs, plan, idle=True):
    """ report from the run directories that exist, with what plan says about them; times are measured only on an idle machine """
    missing = [] if config.runs else [path for path in dirs if not os.path.exists(os.path.join(path, 'run.json'))]
    runs = [read_run(path) for path in dirs if path not in missing]
    results = make_results(runs, config.baseline or plan.get('baseline'), config.margin, plan, missing)
    configs = {run['ffn']: TrainConfig(**run['config']) for run in runs if run['ffn'] in results['ffns']}
    add_profile(results, profile(configs, runs[0]['machine'], plan.get('jobs', 1), folder, idle))
    write_report(folder, results)
    print('\n' + '\n\n'.join([headline(results), match_line(results), summary_table(results, brief=True)]).replace('**', '') + '\n')
    log_to_wandb(folder, results, config)
    print(f"report   {os.path.join(folder, 'report.md')}", flush=True)


def main():
    config = configure(CompareConfig, doc=__doc__)
    name = config.name or ('runs' if config.runs else f'{os.path.basename(os.path.normpath(config.dataset))}-{config.match}')
    folder = os.path.normpath(config.out_dir or os.path.join('out', 'compare', name))
    command = 'python compare.py ' + shlex.join(sys.argv[1:])
    if config.report_only and not os.path.isdir(folder):
        raise UserError(f"report_only: there is no comparison in {folder}; name it with --name")
    try:
        held = checkpoint.lock(folder)  # until this process ends
    except checkpoint.InUse:
        if not config.report_only:
            raise
        held = None  # the comparison is running: look at what there is
    if config.runs:
        dirs = [path.strip() for path in config.runs.split(',')]
        return make_report(config, folder, dirs, {'match': 'given', 'command': command})
    plan_path = os.path.join(folder, 'plan.json')
    if config.report_only:
        dirs = sorted(os.path.join(folder, name) for name in os.listdir(folder) if re.search(r'-s\d+$', name))
        return make_report(config, folder, dirs, {'match': config.match, 'command': command, **read_json(plan_path)}, idle=held is not None)

    prepare_if_missing(config.dataset)
    data = Dataset(config.dataset, config.block_size)
    variants = make_variants(config, config.vocab_size or data.meta['vocab_size'])
    plan = {'command': command, 'match': config.match, 'baseline': config.base, 'jobs': config.jobs}

    def train(configs, title):
        return run_all(configs, data.fingerprint, config.n_gpus, config.jobs, f'{title} ({folder})')

    if config.match == 'time':
        plan['step_times'] = times = step_times(variants, folder, train)
        variants = {ffn: stretch(variant, round(config.max_iters * times[config.base] / times[ffn])) for ffn, variant in variants.items()}
    if config.tune_lr:
        plan['tuning'] = grids = tune(variants, config, folder, train)
        variants = {ffn: scale_lr(variant, min(grids[ffn], key=grids[ffn].get)) for ffn, variant in variants.items()}
    write_json(plan_path, finite(plan))
    # seeds outermost: whatever drifts hits all FFNs alike, and what is there when one looks early is paired
    configs = [run_config(variants[ffn], folder, seed) for seed in range(config.seed, config.seed + config.n_seeds) for ffn in variants]
    states = train(configs, "runs")
    make_report(config, folder, [config.out_dir for config in configs], read_json(plan_path))
    if failed := [state for state in states if state['status'] == 'failed']:
        die(f"{len(failed)} of {len(states)} runs failed, see above; the same command tries them again")


if __name__ == '__main__':
    try:
        main()
    except UserError as e:
        die(e)
