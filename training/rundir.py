"""
The run directory: one writer at a time, and the rule for what a run starts from.
"""

import contextlib
import math
import os
import re
import shutil
from dataclasses import asdict, dataclass, replace

from configurator import UserError, say, with_defaults
from files import link_or_copy, lock, read_json
from model import GPTConfig
from training import checkpoint
from training.evaluation import describe_val
from training.machine import dtype_name
from training.optimizer import learning_rate
from training.pretrained import RUNS, gpt2_tokenizer

# Settings that may differ when a run is continued: they do not change what is computed, only how far, how often or where.
# (max_iters stretches the schedule unless lr_decay_iters is given. The dataset is compared by content, not by name; of init_from the
# weights that it names are.)
MAY_CHANGE = {'out_dir', 'init_from', 'dataset', 'max_iters', 'eval_interval', 'eval_tokens', 'eval_only', 'target_loss',
              'log_interval', 'checkpoint_interval', 'keep_checkpoints', 'micro_batch_size', 'loss_chunks', 'device', 'compile',
              'cuda_graph', 'deterministic', 'wandb', 'wandb_project', 'wandb_entity', 'wandb_name', 'wandb_group', 'wandb_tags',
              'wandb_notes'}
OWN = r'ckpt_\d{8}\.pt|best\.pt|(run|summary)\.json|metrics\.jsonl|wandb|\.lock'  # what a run makes in its directory
MOVING = 'earlier.tmp'
LEFTOVER = r'(ckpt_\d{8}\.pt|best\.pt|(run|summary)\.json|metrics\.jsonl)(\.\d+)?\.tmp'  # of a run that was killed while it wrote


def changed_settings(saved, config, more, may_change=MAY_CHANGE, dtypes=(None, None)):
    """
    {key: (saved value, value now)} of what differs and may not. saved: the settings that a file holds; config: those of now, a
    dataclass; more: what else decides, {'data': fingerprint, ...}, and is in saved too; dtypes: which dtype 'auto' chose then and now.
    """
    saved, now = with_defaults(type(config), saved), {**asdict(config), **more}
    then, here = what_is_meant(saved, dtypes[0]), what_is_meant(now, dtypes[1])
    keys = sorted((saved.keys() | now.keys()) - may_change)
    return {key: (saved.get(key), now.get(key)) for key in keys if saved.get(key) != now.get(key) and then.get(key) != here.get(key)}


def what_is_meant(settings, dtype):
    """ the settings, with what stands for another value replaced by it """
    dtype = dtype or 'auto' if settings.get('dtype') == 'auto' else settings.get('dtype')
    return {**settings, 'dtype': dtype, 'lr_decay_iters': settings.get('lr_decay_iters') or settings.get('max_iters')}


def move_aside(out_dir):
    """
    Rename the run directory to out_dir.1, .2, ...; -> the new place. Where it is not this run's alone (other runs are in it, or
    somebody's files), or cannot be renamed (a link, the current folder, a mount point), its files go to earlier.1, .2, ... within it.
    """
    names = os.listdir(out_dir)
    if all(re.fullmatch(OWN, name) for name in names) and not os.path.islink(out_dir) and not is_above(out_dir, os.getcwd()):
        new = next_free(f'{out_dir}.')
        try:
            os.rename(out_dir, new)
            return new
        except OSError:  # a mount point, a parent that cannot be written, a layer of a container
            pass
    moving, new = os.path.join(out_dir, MOVING), next_free(os.path.join(out_dir, 'earlier.'))
    try:
        os.makedirs(moving, exist_ok=True)
        for name in names:
            if name != '.lock' and re.fullmatch(OWN, name):
                os.rename(os.path.join(out_dir, name), os.path.join(moving, name))
        os.rename(moving, new)
    except OSError as e:
        raise UserError(f"the earlier run in {out_dir} cannot be moved aside ({e.strerror}); choose another --out_dir") from None
    return new


def is_above(folder, path):
    """ whether path is folder, or below it """
    folder, path = os.path.realpath(folder), os.path.realpath(path)
    return os.path.commonpath([folder, path]) == folder


def next_free(prefix):
    n = 1
    while os.path.lexists(f'{prefix}{n}'):
        n += 1
    return f'{prefix}{n}'


def is_straight(steps, config, schedule):
    """ whether the first steps were taken with the learning rates that config gives them; schedule: as of continue_schedule """
    for (start, end), (stop, _) in zip(schedule, [*schedule[1:], [steps, None]], strict=True):
        then = replace(config, lr_decay_iters=end)
        if any(learning_rate(it, then) != learning_rate(it, config) for it in range(start, min(stop, steps))):
            return False
    return True


def continue_schedule(config, path, state, say):
    """
    -> path, state, schedule: where a run goes on whose schedule may have got another end, as a larger max_iters gives it, and what its
    learning rate is then: [[first step, step at which the schedule ends], ...], a single row if it was not changed on the way.

    Once wsd has begun to fall, the last checkpoint before that is the better start; what came after it goes to earlier.1, .2, ...
    """
    end, it, saved = config.lr_decay_iters or config.max_iters, state['iter'], state['config']
    before = state.get('schedule') or [[0, saved['lr_decay_iters'] or saved['max_iters']]]
    if before[-1][1] == end:
        return path, state, before
    if is_straight(it, config, before):
        return path, state, [[0, end]]
    stable = [older for older in checkpoint.paths(config.out_dir)
              if config.warmup_iters < checkpoint.step_of(older) < it and is_straight(checkpoint.step_of(older), config, before)]
    if stable and config.schedule == 'wsd' and config.init_from != 'resume':
        state = checkpoint.load(stable[-1])
        kept = set_aside_after(config.out_dir, state['iter'])
        say(f"max_iters was {saved['max_iters']:,}, now {config.max_iters:,}: this continues from iter {state['iter']:,}, the last "
            f"checkpoint before the learning rate began to fall; what came after it is in {kept} (--init_from=resume goes on from its end)")
        return stable[-1], state, [[0, end]]
    was = learning_rate(max(0, it - 1), replace(config, lr_decay_iters=before[-1][1]))
    say(f"warning: the learning rate's schedule ended at iter {before[-1][1]:,} and ends at {end:,} now, so that the rate goes from "
        f"{was:.2e} to {learning_rate(it, config):.2e} at once; --lr_decay_iters={before[-1][1]} keeps it")
    return path, state, [*before, [it, end]]


def set_aside_after(out_dir, it):
    """ what a run has that is younger than step `it` goes to earlier.1, .2, ... within out_dir, which is returned """
    best = os.path.join(out_dir, 'best.pt')
    younger = [path for path in checkpoint.paths(out_dir) if checkpoint.step_of(path) > it] + [os.path.join(out_dir, 'summary.json')]
    if os.path.exists(best) and checkpoint.load(best)['iter'] > it:
        younger.append(best)
    new, temporary = next_free(os.path.join(out_dir, 'earlier.')), os.path.join(out_dir, 'earlier.links.tmp')
    shutil.rmtree(temporary, ignore_errors=True)  # of a start that was killed here
    os.makedirs(temporary)
    for path in (*younger, *(os.path.join(out_dir, name) for name in ('run.json', 'metrics.jsonl'))):
        with contextlib.suppress(FileNotFoundError):
            link_or_copy(path, os.path.join(temporary, os.path.basename(path)))
    os.rename(temporary, new)
    for path in younger:  # each has a name in the new folder
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    return new


def open_run(config, more, dtype=None, say=say):
    """
    Lock config.out_dir and decide what to start from. more: as in changed_settings. dtype: in which this run is trained.

    -> (lock, path, state, schedule): path and state of the checkpoint to continue, or None, None for a fresh start; schedule: of
    continue_schedule. init_from='auto' continues a run of the same settings, and so do weights to start from; an earlier run of other
    settings is moved aside, whole. 'scratch' moves it aside always. 'resume' insists and raises UserError where it cannot.
    """
    out_dir, init_from = os.path.normpath(config.out_dir), config.init_from
    held = lock(out_dir)
    for name in os.listdir(out_dir):
        if re.fullmatch(LEFTOVER, name):
            os.unlink(os.path.join(out_dir, name))
    if os.path.isdir(os.path.join(out_dir, MOVING)):  # a start that was killed in the middle of it
        say(f"an earlier run that was in {out_dir} is now in {move_aside(out_dir)}")
    path, state = checkpoint.load_latest(out_dir, say) if init_from != 'scratch' else (None, None)
    was = state and (state.get('dtype') or read_json(os.path.join(out_dir, 'run.json')).get('machine', {}).get('dtype'))
    changed = changed_settings(state['config'], config, more, dtypes=(was, dtype)) if state else {}
    differences = ', '.join(f'{key} was {old!r}, now {new!r}' for key, (old, new) in changed.items())
    if init_from == 'resume':
        if not state:
            raise UserError(f"init_from = 'resume': no usable checkpoint in {out_dir}; leave init_from out to start afresh")
        if changed.keys() - {'weights'}:  # where the run came from; it is not loaded again
            raise UserError(f"cannot resume {path}: {differences}")
    if state and (not changed or init_from == 'resume'):
        if was and was != dtype:
            say(f"warning: trained in {was} up to iter {state['iter']:,}, and in {dtype} from here on: 'auto' chooses otherwise on this "
                f"machine; --dtype={was} keeps it")
        return held, *continue_schedule(config, path, state, say)
    if any(os.path.exists(os.path.join(out_dir, name)) for name in ('run.json', 'metrics.jsonl')) or checkpoint.paths(out_dir):
        if os.name == 'nt':
            held.close()  # Windows renames no folder with an open file in it
        old = move_aside(out_dir)
        why = f": {differences}; to continue it use its settings and --out_dir={old}" if changed else ""
        say(f"the run that was in {out_dir} is now in {old}{why}")
        if not os.path.exists(os.path.join(out_dir, '.lock')):
            held = lock(out_dir)
    return held, None, None, None


@dataclass
class Start:
    """ what a run starts from """
    identity: dict  # what decides, besides the settings, whether a checkpoint is continued: the data's fingerprint, and weights
    weights: str | None = None  # GPT-2's, by name or folder
    path: str | None = None  # a checkpoint
    state: dict | None = None  # what is in it
    finished: bool = False
    schedule: list | None = None  # [[first step, step at which the learning rate's schedule ends], ...]: more than one if it was stretched
    lock: object = None  # rank 0 holds the run directory until its process ends
    # where it stands
    iter: int = 0
    seconds: float = 0.0
    best_val: float = math.inf
    val: dict | None = None


def choose_start(config, data, processes, dtype):
    """ -> Start: a checkpoint of this very run, weights, or nothing """
    weights = None if config.init_from in RUNS else config.init_from
    if weights and data.meta['tokenizer'] != (tokenizer := gpt2_tokenizer(weights)):
        raise UserError(f"init_from = {weights!r} reads {tokenizer['name']} tokens, and dataset {config.dataset} is of "
                        f"{data.meta['tokenizer']['name']} tokens; choose another --dataset")
    start = Start({'data': data.fingerprint, 'weights': weights and os.path.normpath(weights)}, weights)
    if config.eval_only and weights:
        start.path = weights
    elif config.eval_only:
        start.path, start.state = find_model(config.out_dir, config, start.identity)
    elif processes.rank == 0:
        start.lock, start.path, start.state, start.schedule = open_run(config, start.identity, dtype_name(dtype))
        start.finished = is_finished(config, start.state)
    if not config.eval_only:
        start.finished, start.path, start.schedule = processes.share([start.finished, start.path, start.schedule])
        if start.path and not start.state:
            start.state = checkpoint.load(start.path)
    start.schedule = start.schedule or [[0, config.lr_decay_iters or config.max_iters]]
    if state := start.state:
        start.identity['weights'] = state['config'].get('weights')
        start.iter, start.seconds, start.best_val, start.val = (state.get(key) for key in ('iter', 'seconds', 'best_val', 'val'))
    return start


def is_finished(config, state):
    """ whether the run in out_dir has nothing left to do, which is then said with its result """
    summary = read_json(os.path.join(config.out_dir, 'summary.json'))
    if not state or summary.get('iter') != state['iter']:
        return False
    if state['iter'] < config.max_iters and summary['val_loss'] >= config.target_loss:
        return False
    say(f"{config.out_dir} is finished at iter {state['iter']}: {describe_val(state['val'])}\n"
          "continue it with a larger --max_iters, or start afresh with "
          + ("--init_from=scratch" if config.init_from in RUNS else "another --out_dir"))
    return True


def find_model(out_dir, config, more):
    """ -> (path, state) of the newest checkpoint in out_dir, for eval_only; a UserError when it is of another model or other data """
    path, state = checkpoint.load_latest(out_dir)
    if not state:
        raise UserError(f"eval_only: no checkpoint in {out_dir}; name the run with --out_dir")
    keys = {*GPTConfig.__dataclass_fields__, 'data'} - {'dropout'}
    changed = changed_settings(state['config'], config, more)
    differences = [f"{key} is {old!r}, not {new!r}" for key, (old, new) in changed.items() if key in keys]
    if differences:
        raise UserError(f"eval_only: {path} differs from the settings: {', '.join(differences)}")
    return path, state
