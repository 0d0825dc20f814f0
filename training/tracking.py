"""
Where a run's numbers go: the terminal, metrics.jsonl (the truth), and wandb (a mirror that never stops training).
"""

import contextlib
import errno
import json
import os
import secrets
import sys

from tqdm import tqdm

from configurator import UserError, need, one_line, say
from files import read_json, replacing, write_json


def duration(seconds):
    minutes, seconds = divmod(int(seconds), 60)
    return f'{minutes // 60}:{minutes % 60:02}:{seconds:02}' if minutes >= 60 else f'{minutes}:{seconds:02}'


def default_out_dir(config):
    """ out/<ffn>; the trials of a wandb sweep differ in more than that, and one that was preempted comes again under its id """
    if sweep_trial():
        sweep, trial = sweep_trial()
        return os.path.join('out', f'sweep-{sweep}', f'{config.ffn}-s{config.seed}-{trial}')
    return os.path.join('out', config.ffn)


def read_metrics(path, up_to=None):
    """ the records of a metrics.jsonl, those with iter <= up_to; a torn last line is left out """
    records = [record for record in map(parse_record, read_lines(path)) if record]
    return [record for record in records if up_to is None or record['iter'] <= up_to]


def parse_record(line):
    """ {} for what is none """
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(line)
        if isinstance(record, dict) and isinstance(record.get('iter'), int):
            return record
    return {}


def read_lines(path, last=0):
    """ of a file, or of its last bytes; none when there is no such file, a UserError when it cannot be read """
    try:
        with open(path, 'rb') as file:
            if last:
                file.seek(max(0, os.fstat(file.fileno()).st_size - last))
            return file.read().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}; nothing was changed") from None


# variables of wandb's by which a run is a certain other one. Several runs may inherit them, so they count for the trials of a sweep alone
IDENTITY = ('WANDB_RUN_ID', 'WANDB_RESUME', 'WANDB_RESUME_FROM', 'WANDB_FORK_FROM', 'WANDB_SWEEP_ID', 'WANDB_SWEEP_PARAM_PATH')


def sweep_trial():
    """ (id of the sweep, id of the trial) that the agent of a wandb sweep has given to its process, else None """
    ids = os.environ.get('WANDB_SWEEP_ID'), os.environ.get('WANDB_RUN_ID')
    return ids if all(ids) else None


def claim_trial(out_dir):
    """ the id of the sweep's trial, for the first run directory of the trial that asks; None for the others, and outside a sweep """
    if not sweep_trial():
        return None
    sweep, trial = sweep_trial()
    path, here = os.path.join('out', f'sweep-{sweep}', f'.{trial}.json'), os.path.abspath(out_dir)
    owner = read_json(path).get('out_dir', here)
    if owner != here and os.path.isdir(owner):
        return None
    os.makedirs(os.path.dirname(path), exist_ok=True)
    write_json(path, {'out_dir': here})
    return trial


def unless(setting, *variables, default=None):
    """ the setting, if there is one; None, so that wandb takes the variable, if one is set; else our default """
    return setting or (None if any(os.environ.get(variable) for variable in variables) else default)


def wandb_dir(folder):
    """ where its files go: folder, unless a variable says otherwise; the agent of a sweep sets one to where it runs """
    if sweep_trial() and os.environ.get('WANDB_DIR') == os.getcwd():
        return folder
    return unless('', 'WANDB_DIR', 'WANDB_ROOT_DIR', default=folder)


def wandb_mode(config):
    """ what --wandb says, else the variables; 'auto' is online when a key is configured, else offline """
    if config.wandb != 'auto':
        return config.wandb
    if os.environ.get('WANDB_DISABLED', '').strip().lower() in ('true', '1', 'yes', 'on'):
        return 'disabled'
    mode = os.environ.get('WANDB_MODE', '').strip().lower()
    return {'': 'auto', 'dryrun': 'offline', 'run': 'online'}.get(mode, mode)


def start_wandb(config, say, /, id=None, **options):
    """
    A wandb run, or None when that fails. Never asks, never hangs. options: of wandb.init; where neither they nor a setting say
    anything, the variables that wandb reads do, but for those that say which run it is: without an id it is a new one.
    """
    mode = wandb_mode(config)
    if not id or id != os.environ.get('WANDB_RUN_ID'):
        for variable in IDENTITY:
            os.environ.pop(variable, None)
    if mode == 'disabled':
        return None
    try:
        wandb = need('wandb', "logging")
    except UserError as e:
        say(f"warning: {e}, or --wandb=disabled; numbers stay in the folder")
        return None
    try:
        options |= {'id': id or secrets.token_hex(4), 'project': unless(config.wandb_project, 'WANDB_PROJECT', default='nanoffn'),
                    'entity': config.wandb_entity or None, 'notes': config.wandb_notes or None,
                    'tags': [tag.strip() for tag in config.wandb_tags.split(',') if tag.strip()] or None,
                    # of git it would say where it was started; the commit of this repository is in run.json and in its config
                    'settings': wandb.Settings(console='off', silent=True, init_timeout=60, finish_timeout=120, x_graphql_retry_max=3,
                                               x_transaction_log_flush_interval=2.0, disable_git=True)}
        try:
            if mode in ('auto', 'online') and not wandb.login(prompt=False, verify=False):  # init would ask for a key
                if mode == 'online':
                    say("warning: wandb has no key (wandb login); logging offline")
                mode = 'offline'
            run = wandb.init(mode='online' if mode == 'auto' else mode, **options)
        except Exception as e:
            if mode not in ('auto', 'online'):
                raise
            say(f"warning: wandb online failed ({one_line(e)}); logging offline")
            stop_wandb()
            mode = 'offline'
            run = wandb.init(mode=mode, **options)
        folder = os.path.relpath(os.path.dirname(run.dir))
        say(f"wandb    {f'offline; upload with: wandb sync {folder}' if mode == 'offline' else run.url}")
        return run
    except Exception as e:
        say(f"warning: wandb could not start ({one_line(e)}); numbers stay in the folder")
        stop_wandb()
        return None


def stop_wandb():
    """ end wandb's service, dead or alive: a dead one that is left to wandb's own exit prints a traceback there """
    with contextlib.suppress(Exception, SystemExit):
        import wandb
        wandb.teardown(exit_code=1)


def last_record(path):
    """ the last whole record of a metrics.jsonl, {} when there is none """
    return next(filter(None, map(parse_record, reversed(read_lines(path, last=2**18)))), {})  # more bytes than a record has


def same_machine(a, b):
    """ as far as speed and the last digits go """
    keys = ('device_name', 'world_size', 'dtype', 'compile', 'threads', 'versions', 'git')
    return all(a[key] == b[key] for key in keys if key in a and key in b)


class Tracker:
    """
    One run's log, on rank 0; with active=False it does nothing (the other ranks).

    run: what run.json holds (config, components, data, machine). start_iter: the iteration of the checkpoint that is continued;
    metrics.jsonl is cut back to it, so that every step stands once.
    """

    def __init__(self, active, config, start_iter, run):
        self.active, self.out_dir, self.max_iters, self.bar, self.wandb = active, config.out_dir, config.max_iters, None, None
        if not active:
            return
        path = os.path.join(self.out_dir, 'metrics.jsonl')
        kept = read_metrics(path, up_to=start_iter) if start_iter else []
        before = read_json(os.path.join(self.out_dir, 'run.json'))  # all is read before anything is changed
        with replacing(path) as file:
            file.write(''.join(json.dumps(record) + '\n' for record in kept).encode())
        self.file, self.unwritten, self.warned = open(path, 'ab', buffering=0), b'', False
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.out_dir, 'summary.json'))  # of the shorter run that is being continued
        run['wandb_id'] = before.get('wandb_id')
        run['earlier_machines'] = before.get('earlier_machines', []) if start_iter else []
        if start_iter and before and not same_machine(before['machine'], run['machine']):
            run['earlier_machines'].append({**before['machine'], 'until_iter': start_iter})
        self.start_wandb(config, run)
        write_json(os.path.join(self.out_dir, 'run.json'), run)
        if sys.stderr.isatty() and run['machine']['world_size'] == 1:
            self.bar = tqdm(total=config.max_iters, initial=start_iter, dynamic_ncols=True, leave=False,
                            bar_format='{n_fmt}/{total_fmt} {bar:12}{postfix}')

    def say(self, text):
        """ a line for the person at the terminal """
        if self.active:
            if self.bar:
                self.bar.clear()
            say(text)

    def progress(self, it, text):
        """ where training stands after `it` steps: in the bar on a terminal, else a line """
        if self.bar:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(it - self.bar.n)
        else:
            self.say(f'iter {it}/{self.max_iters} | {text}')

    def log(self, record):
        """ one record, {'iter': ..., 'tokens': ..., metric: value, ...}, to metrics.jsonl and wandb """
        if self.active:
            self.append(json.dumps(record).encode() + b'\n')
            self.mirror(lambda: self.wandb.log({key: value for key, value in record.items() if value is not None}, step=record['iter']))

    def sync(self):
        """ what is in metrics.jsonl survives a power cut; before each checkpoint, which it must not be behind """
        if self.active:
            with contextlib.suppress(OSError):
                os.fsync(self.file.fileno())
            self.mirror(lambda: self.wandb.log({}, commit=True))  # wandb holds the row of a step back until the next step

    def append(self, line):
        """ to metrics.jsonl, together with what could not be written before; where that fails, nothing of it stays in the file """
        self.unwritten += line
        size = None
        try:
            size = os.fstat(self.file.fileno()).st_size
            if self.file.write(self.unwritten) < len(self.unwritten):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.unwritten, self.warned = b'', False
        except OSError as e:
            with contextlib.suppress(OSError, TypeError):  # a disk that fails, and does not even say the size
                os.ftruncate(self.file.fileno(), size)
            if not self.warned:
                self.say(f"warning: cannot write metrics.jsonl ({e.strerror}); what it should hold is kept in memory and tried again")
            self.warned = True

    def finish(self, summary=None, exit_code=0, preempted=False):
        """ close everything; summary.json is written last, and says that the run is complete. preempted: a sweep is to run it again. """
        if not self.active:
            return
        if self.bar:
            self.bar.close()
            self.bar = None
        if self.unwritten:
            self.append(b'')
        self.file.close()
        if summary:
            self.mirror(lambda: self.wandb.summary.update({f'final/{key}': value for key, value in summary.items()}))
        if preempted:
            self.mirror(lambda: self.wandb.mark_preempting())
        self.mirror(lambda: self.wandb.finish(exit_code=exit_code))
        if summary:
            write_json(os.path.join(self.out_dir, 'summary.json'), summary)

    def mirror(self, call):
        """ do something with wandb; whatever goes wrong there costs one warning, and wandb """
        if self.wandb:
            try:
                call()
            except Exception as e:
                self.wandb = None
                self.say(f"warning: wandb failed ({one_line(e)}); training goes on, metrics.jsonl has everything")
                stop_wandb()

    def start_wandb(self, config, run):
        """ run['wandb_id'], of a run that is continued, is asked for; then it is what wandb made of it: in a sweep the sweep decides """
        self.wandb = start_wandb(
            config, self.say, name=unless(config.wandb_name, 'WANDB_NAME', 'WANDB_RUN_NAME', default=f'{config.ffn}-s{config.seed}'),
            group=config.wandb_group or None, job_type=unless('', 'WANDB_JOB_TYPE', 'WANDB_RUN_JOB_TYPE', default='train'),
            dir=wandb_dir(self.out_dir), id=claim_trial(self.out_dir) or run['wandb_id'], resume='allow',
            config={**run['config'], 'data': run['data'], 'machine': run['machine'], 'total': run['total']})
        self.mirror(lambda: self.describe_to_wandb(run))

    def describe_to_wandb(self, run):
        import wandb
        continued, run['wandb_id'] = run['wandb_id'] == self.wandb.id, self.wandb.id
        for axis in ('iter', 'tokens'):
            self.wandb.define_metric(axis)
        self.wandb.define_metric('*', step_metric='tokens')
        self.wandb.define_metric('val/loss', step_metric='tokens', summary='min,last')
        rows = run['components']
        for row in rows:
            for key in ('params', 'param_share', 'flops', 'flop_share'):
                self.wandb.summary[f"{key}/{row['name']}"] = row[key]
        if continued:
            return
        columns = ['name', 'params', 'param_share', 'flops', 'train_flops', 'flop_share']
        charts = {'components/table': wandb.Table(columns=columns, data=[[row[key] for key in columns] for row in rows])}
        for key, title in (('param_share', "share of parameters"), ('flop_share', "share of FLOPs")):
            bars = wandb.Table(columns=['component', key], data=[[row['name'], row[key]] for row in rows])
            charts[f'components/{key}'] = wandb.plot.bar(bars, 'component', key, title=title)
        self.wandb.log({'iter': 0, 'tokens': 0, **charts}, step=0)
