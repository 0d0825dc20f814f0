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

import math
import os
import re
import shlex
import statistics
import sys
from dataclasses import dataclass, replace
from typing import Literal

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # which python -P leaves out

from bench import step_times
from comparison.matching import matched_width, scale_lr, stretch
from comparison.report import add_profile, finite, headline, log_to_wandb, make_results, match_line, read_run, summary_table, write_report
from comparison.runs import read_state, run_all, run_config, train_config
from comparison.timeshare import profile
from configurator import UserError, configure, die, require, run_main, say
from data.tokens import Dataset, prepare_if_missing
from files import InUse, lock, read_json, write_json
from model import FFNS
from train import TrainConfig

TUNING_SEED = 10**6  # above `seed`: the runs that choose a learning rate are never those of the report
MAX_TUNING_STEPS = 6  # extensions of the grid of learning rates
# settings that count where no run is trained: which report of what, and where it goes
FOR_A_REPORT = {'runs', 'report_only', 'name', 'out_dir', 'dataset', 'match', 'baseline', 'margin', 'device', 'wandb', 'wandb_project',
                'wandb_entity', 'wandb_tags', 'wandb_notes'}


@dataclass(frozen=True)
class CompareConfig(TrainConfig):
    # the comparison
    name: str = ''  # of the comparison, whose folder is out/compare/<name> ('' = <dataset>-<match>)
    ffns: str = 'relu,gelu,swiglu'  # comma-separated names of model.FFNS, or all; or name them one by one, as config/geglu.py does
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
        require(self, self.tune_lr or self.tune_seeds == 1, 'tune_seeds', "left out without tune_lr")
        require(self, self.match != 'width4d' or not self.width_multiple, 'width_multiple', "left out when match = 'width4d'")
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


def implied(given):
    """ config files and flags that name FFNs one by one name those to compare; a UserError for what has no effect on a report """
    named, settings = list(dict.fromkeys(value for key, value in given if key == 'ffn')), dict(given)
    for key in ('runs', 'report_only'):
        if settings.get(key) and (idle := settings.keys() - FOR_A_REPORT):
            raise UserError(f"{', '.join(sorted(idle))}: no effect with --{key}, which trains nothing; leave out what has none")
    if named and 'ffns' not in settings:
        if len(named) == 1:
            other = 'gelu' if named[0] != 'gelu' else 'swiglu'
            raise UserError(f"ffn = {named[0]!r} alone is no comparison; name at least two FFNs, as in --ffns={other},{named[0]}")
        return {'ffns': ','.join(named)}
    return {}


def make_variants(config, vocab_size):
    """ {ffn: TrainConfig}: equal in everything but the FFN and its width """
    # curves need points: eight evaluations, unless these would read more tokens than training does
    interval = max(1, config.max_iters // 8, config.eval_tokens // (config.batch_size * config.block_size))
    base = train_config(config, vocab_size=vocab_size, eval_interval=min(config.eval_interval, interval))
    return {ffn: replace(base, ffn=ffn, intermediate_size=matched_width(replace(base, ffn=ffn), config.match, config.width_multiple))
            for ffn in config.ffn_names}


# -----------------------------------------------------------------------------
# what the FFNs may differ in besides, when asked: steps (match = 'time') and learning rate (tune_lr)


def time_steps(variants, config, known):
    """ {ffn: seconds of a step}. known: of earlier runs of this comparison, which stay; the others are measured beside the baseline """
    times = {ffn: known[ffn] for ffn in variants if ffn in known}
    if missing := variants.keys() - times.keys():
        say(f"timing a step of {', '.join(ffn for ffn in variants if ffn in missing)} ...")
        measured = step_times({ffn: variant for ffn, variant in variants.items() if ffn in {config.base, *missing}}, config.processes)
        scale = times.get(config.base, measured[config.base]) / measured[config.base]
        times |= {ffn: scale * measured[ffn] for ffn in missing}
    return times


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


def make_report(config, folder, dirs, plan, idle=True):
    """ report from the run directories that exist, with what plan says about them; times are measured only on an idle machine """
    missing = [] if config.runs else [path for path in dirs if not read_json(os.path.join(path, 'run.json'))]
    runs = [read_run(path) for path in dirs if path not in missing]
    results = make_results(runs, config.baseline or plan.get('baseline'), config.margin, plan, missing)
    configs = {run['ffn']: TrainConfig(**run['config']) for run in runs if run['ffn'] in results['ffns']}
    add_profile(results, profile(configs, runs[0]['machine'], plan.get('jobs', 1), folder, idle))
    write_report(folder, results)
    say('\n' + '\n\n'.join([headline(results), match_line(results), summary_table(results, brief=True)]).replace('**', '') + '\n')
    log_to_wandb(folder, results, config)
    say(f"report   {os.path.join(folder, 'report.md')}")


def main():
    config = configure(CompareConfig, doc=__doc__, implied=implied)
    name = config.name or ('runs' if config.runs else f'{os.path.basename(os.path.normpath(config.dataset))}-{config.match}')
    folder = os.path.normpath(config.out_dir or os.path.join('out', 'compare', name))
    command = 'python compare.py ' + shlex.join(sys.argv[1:])
    if config.report_only and not os.path.isdir(folder):
        raise UserError(f"report_only: there is no comparison in {folder}; name it with --name")
    try:
        held = lock(folder)  # until this process ends
    except InUse:
        if not config.report_only:
            raise
        held = None  # the comparison is running: look at what there is
    if config.runs:
        dirs = [os.path.expanduser(path.strip()) for path in config.runs.split(',')]
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
        known = read_json(plan_path)
        plan['step_times'] = times = time_steps(variants, config, known.get('step_times', {}))
        write_json(plan_path, {**known, 'step_times': times})
        variants = {ffn: stretch(variant, round(config.max_iters * times[config.base] / times[ffn])) for ffn, variant in variants.items()}
    if config.tune_lr:
        plan['tuning'] = grids = tune(variants, config, folder, train)
        variants = {ffn: scale_lr(variant, min(grids[ffn], key=grids[ffn].get)) for ffn, variant in variants.items()}
    # seeds outermost: whatever drifts hits all FFNs alike, and what is there when one looks early is paired
    configs = [run_config(variants[ffn], folder, seed) for seed in range(config.seed, config.seed + config.n_seeds) for ffn in variants]
    for run in configs:
        read_state(run, data.fingerprint)  # other settings are refused before the plan of those runs is replaced
    write_json(plan_path, finite(plan))
    states = train(configs, "runs")
    make_report(config, folder, [config.out_dir for config in configs], read_json(plan_path))
    if failed := [state for state in states if state['status'] == 'failed']:
        die(f"{len(failed)} of {len(states)} runs failed, see above; the same command tries them again")


if __name__ == '__main__':
    run_main(main)
