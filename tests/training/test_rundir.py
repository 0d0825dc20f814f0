import contextlib
import errno
import multiprocessing
import os
import resource
import shutil
from dataclasses import asdict, dataclass, replace

import pytest
import torch
from conftest import PATIENCE

import files
from configurator import UserError
from files import lock
from train import TrainConfig
from training import checkpoint, rundir
from training.checkpoint import paths, save
from training.optimizer import learning_rate
from training.rundir import MAY_CHANGE, changed_settings, is_straight, open_run

CONFIG = TrainConfig(vocab_size=256, max_iters=10, warmup_iters=0)


def state(it, config=CONFIG, **more):
    return {'model': {'w': torch.full((3, 4), float(it))}, 'iter': it, 'dtype': 'float32', 'config': {**asdict(config), 'data': 'd'}, **more}


def start(out_dir, init_from='auto', **settings):
    """ -> the step that a run continues from, what was said, and its schedule """
    said = []
    held, _, got, schedule = open_run(replace(CONFIG, out_dir=str(out_dir), init_from=init_from, **settings), {'data': 'd'}, 'float32', said.append)
    held.close()
    return got and got['iter'], said, schedule


@dataclass(frozen=True)
class Settings:
    n_embd: int = 4
    max_iters: int = 10
    lr_decay_iters: int = 0
    dtype: str = 'auto'
    device: str = 'cpu'
    learning_rate: float = 1e-3


def test_what_may_change():
    saved = {'n_embd': 4, 'max_iters': 10, 'lr_decay_iters': 0, 'dtype': 'auto', 'device': 'cpu', 'data': 'd'}
    assert changed_settings(saved, Settings(max_iters=20, device='cuda'), {'data': 'd'}) == {}
    assert changed_settings(saved, Settings(n_embd=8), {'data': 'd'}) == {'n_embd': (4, 8)}
    # a setting that the run is older than has its default; one that is no longer known was something
    assert changed_settings(saved, Settings(learning_rate=1.0), {'data': 'd'}) == {'learning_rate': (1e-3, 1.0)}
    assert changed_settings({**saved, 'gone': 1}, Settings(), {'data': 'e'}) == {'data': ('d', 'e'), 'gone': (1, None)}
    assert MAY_CHANGE <= set(TrainConfig.__dataclass_fields__)


@pytest.mark.parametrize('then, now, dtypes, changed', [
    ('auto', 'auto', ('float32', 'bfloat16'), False), ('auto', 'bfloat16', ('bfloat16', 'bfloat16'), False), ('auto', 'bfloat16', ('float32', 'bfloat16'), True),
    ('float32', 'auto', ('float32', 'float32'), False), ('float32', 'auto', ('float32', 'bfloat16'), True), ('auto', 'float32', (None, 'float32'), True),
    ('float32', 'bfloat16', ('float32', 'bfloat16'), True)])
def test_the_dtype_that_auto_chose_is_the_same_as_its_name(then, now, dtypes, changed):
    assert changed_settings({'dtype': then}, Settings(dtype=now), {}, dtypes=dtypes) == ({'dtype': (then, now)} if changed else {})


def test_the_end_of_a_schedule_is_the_same_as_its_name():
    saved = {'max_iters': 20, 'lr_decay_iters': 0}
    assert changed_settings(saved, Settings(max_iters=40, lr_decay_iters=20), {}) == {}
    assert changed_settings(saved, Settings(max_iters=40, lr_decay_iters=30), {}) == {'lr_decay_iters': (0, 30)}
    assert changed_settings({'max_iters': 10, 'lr_decay_iters': 20}, Settings(max_iters=20), {}) == {}


def test_open_run(tmp_path):
    out = tmp_path / 'out'
    assert start(out)[:2] == (None, [])
    save(out, state(5), keep=2)
    assert start(out)[:2] == (5, []) and start(out, 'resume')[:2] == (5, []) and start(out, device='cuda')[:2] == (5, [])
    with pytest.raises(UserError, match=r'n_embd was 96, now 48'):
        start(out, 'resume', n_embd=48)
    got, said, _ = start(out, n_embd=48)
    assert got is None and 'n_embd was 96, now 48' in said[0] and f'--out_dir={out}.1' in said[0]
    assert os.path.exists(f'{out}.1/ckpt_00000005.pt') and paths(out) == []
    with pytest.raises(UserError, match="init_from = 'resume': no usable checkpoint"):
        start(out, 'resume')
    save(out, state(6), keep=2)
    assert start(out, 'scratch')[0] is None
    assert os.path.exists(f'{out}.2/ckpt_00000006.pt')


def test_another_dtype_is_said(tmp_path):
    save(tmp_path, state(5, dtype='bfloat16'), keep=2)
    got, said, _ = start(tmp_path)
    assert got == 5 and 'warning: trained in bfloat16 up to iter 5, and in float32 from here on' in said[0] and '--dtype=bfloat16' in said[0]
    assert start(tmp_path, dtype='float32')[0] is None  # asked for by name it is another run


def test_a_run_with_only_damaged_checkpoints_is_kept(tmp_path):
    out = tmp_path / 'out'
    out.mkdir()
    save(out, state(5), keep=2)
    os.truncate(paths(out)[0], 100)
    got, said, _ = start(out)
    assert got is None and 'skipping' in said[0] and f'{out}.1' in said[1]
    assert os.path.getsize(f'{out}.1/ckpt_00000005.pt') == 100


# -----------------------------------------------------------------------------
# moving a run aside: nothing that is not its own goes with it


def contents(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob('*') if path.is_file() and path.name != '.lock')


def with_a_run(out):
    out.mkdir(exist_ok=True)
    save(out, state(5), keep=2)
    for name in ('run.json', 'metrics.jsonl', 'summary.json', 'best.pt'):
        (out / name).write_text('{}')
    (out / 'wandb').mkdir()
    (out / 'wandb/log').write_text('x')


RUN = ['best.pt', 'ckpt_00000005.pt', 'metrics.jsonl', 'run.json', 'summary.json', 'wandb/log']
IN_EARLIER = [f'earlier.1/{name}' for name in RUN]


@pytest.mark.parametrize('foreign', ['long/ckpt_00000001.pt', 'notes.txt', '.git/config', 'wandb.txt', 'ckpt_1.pt', 'earlier.2/best.pt', 'x.1/.lock'])
def test_what_is_not_the_runs_own_stays(tmp_path, foreign):
    out = tmp_path / 'out'
    with_a_run(out)
    (out / foreign).parent.mkdir(exist_ok=True)
    (out / foreign).write_text('mine')
    before = (out / foreign).stat().st_ino
    got, said, _ = start(out, seed=2)
    assert got is None and f'is now in {out}/earlier.1: seed was 1337, now 2; to continue it use its settings and --out_dir={out}/earlier.1' in said[0]
    assert (out / foreign).read_text() == 'mine' and (out / foreign).stat().st_ino == before
    assert set(contents(out)) - {foreign} == set(IN_EARLIER) and os.listdir(tmp_path) == ['out']
    assert start(out / 'earlier.1')[0] == 5  # and is continued there


def test_the_run_alone_is_renamed(tmp_path):
    out = tmp_path / 'out'
    with_a_run(out)
    assert f'is now in {out}.1' in start(out, seed=2)[1][0] and contents(tmp_path / 'out.1') == RUN and contents(out) == []


def test_the_current_folder(tmp_path, monkeypatch):
    with_a_run(tmp_path / 'run')
    monkeypatch.chdir(tmp_path / 'run')
    assert 'is now in ./earlier.1' in start('.', seed=2)[1][0] and contents(tmp_path / 'run') == IN_EARLIER
    # also when it is named in full, and when it is a folder below
    save('.', state(6), keep=2)
    (tmp_path / 'run/wandb/below').mkdir(parents=True)
    monkeypatch.chdir(tmp_path / 'run/wandb/below')
    assert f"is now in {tmp_path / 'run'}/earlier.2" in start(tmp_path / 'run', seed=2)[1][0]


def test_a_link_stays_where_it_points(tmp_path):
    with_a_run(tmp_path / 'disk')
    (tmp_path / 'out').symlink_to('disk')
    assert f"is now in {tmp_path / 'out'}/earlier.1" in start(tmp_path / 'out', seed=2)[1][0]
    assert os.readlink(tmp_path / 'out') == 'disk' and contents(tmp_path / 'disk') == IN_EARLIER and sorted(os.listdir(tmp_path)) == ['disk', 'out']


@pytest.mark.parametrize('number', [errno.EBUSY, errno.EXDEV, errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_folder_that_cannot_be_renamed(tmp_path, monkeypatch, number):
    """ a mount point, a layer of a container, a parent that cannot be written """
    out, rename = tmp_path / 'out', os.rename
    with_a_run(out)

    def refuse(a, b):
        if str(a) == str(out):
            raise OSError(number, os.strerror(number))
        rename(a, b)

    monkeypatch.setattr(os, 'rename', refuse)
    assert f'is now in {out}/earlier.1' in start(out, seed=2)[1][0] and contents(out) == IN_EARLIER


def test_nothing_can_be_moved(tmp_path, monkeypatch):
    out = tmp_path / 'out'
    with_a_run(out)

    def refuse(a, b):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, 'rename', refuse)
    with pytest.raises(UserError, match=f'the earlier run in {out} cannot be moved aside .Read-only file system.; choose another --out_dir'):
        start(out, seed=2)
    assert contents(out) == RUN


@pytest.mark.parametrize('killed_after', range(7))
def test_a_move_that_was_killed_is_finished(tmp_path, monkeypatch, killed_after):
    """ whatever the next start asks for: it must not continue half a run """
    out, rename, moved = tmp_path / 'out', os.rename, []
    with_a_run(out)
    (out / 'notes.txt').write_text('mine')

    def kill(a, b):
        if len(moved) == killed_after:
            raise KeyboardInterrupt
        moved.append(a)
        rename(a, b)

    monkeypatch.setattr(os, 'rename', kill)
    with contextlib.suppress(KeyboardInterrupt):
        start(out, seed=2)
    monkeypatch.setattr(os, 'rename', rename)
    assert start(out)[0] is None
    assert contents(out) == [*IN_EARLIER, 'notes.txt']


# -----------------------------------------------------------------------------
# what cannot be read is not damaged


@pytest.mark.parametrize('number', [errno.EACCES, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.ETIMEDOUT, errno.ENODEV])
@pytest.mark.parametrize('when', ['open', 'read'])
def test_an_unreadable_checkpoint_stops_the_start(tmp_path, monkeypatch, number, when):
    out = tmp_path / 'out'
    with_a_run(out)
    save(out, state(4), keep=5)  # there would be another one
    before, real = contents(out), open

    class Failing:
        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            if name.startswith('read'):
                raise OSError(number, os.strerror(number))
            return getattr(self.file, name)

        def __enter__(self):
            return self

        def __exit__(self, *args):
            self.file.close()

    def failing_open(path, *args, **options):
        if str(path).endswith('00000005.pt'):
            if when == 'open':
                raise OSError(number, os.strerror(number), str(path))
            return Failing(real(path, *args, **options))
        return real(path, *args, **options)

    monkeypatch.setattr('builtins.open', failing_open)
    monkeypatch.setattr('io.open', failing_open)
    for init_from in ('auto', 'resume'):
        with pytest.raises(UserError, match=r'cannot read .*ckpt_00000005.pt: .*; nothing was changed'):
            start(out, init_from, seed=2)
    monkeypatch.undo()
    assert contents(out) == before and os.listdir(tmp_path) == ['out']


def test_other_ways_of_being_unreadable(tmp_path):
    """ a folder; a file whose bytes cannot be had, which zipfile takes for no zip file; too many open files """
    (tmp_path / 'a/ckpt_00000005.pt').mkdir(parents=True)
    (tmp_path / 'b').mkdir()
    (tmp_path / 'b/ckpt_00000005.pt').symlink_to('/proc/self/mem')  # EIO
    for name in 'ab':
        with pytest.raises(UserError, match='cannot read .*nothing was changed'):
            start(tmp_path / name)
        assert [path for path in os.listdir(tmp_path / name) if path != '.lock'] == ['ckpt_00000005.pt']
    save(tmp_path / 'c', state(5), keep=2)
    used, (soft, hard) = len(os.listdir('/proc/self/fd')), resource.getrlimit(resource.RLIMIT_NOFILE)
    full = [open('/dev/null') for _ in range(3)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(file.fileno() for file in full) + 1, hard))
    try:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                for _ in range(used):
                    stack.enter_context(open('/dev/null'))
            with pytest.raises(UserError, match='Too many open files'):
                checkpoint.load(tmp_path / 'c/ckpt_00000005.pt')
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize('name', ['run.json', 'summary.json', 'metrics.jsonl'])
def test_an_unreadable_file_of_a_run(script, tiny_data, trained, tmp_path, name):
    """ the whole start: one line, and nothing moved or begun """
    from conftest import TINY
    shutil.copytree(trained, tmp_path / 'out/swiglu')
    (tmp_path / 'out/swiglu' / name).unlink()
    (tmp_path / 'out/swiglu' / name).symlink_to('/proc/self/mem')
    before = {path.name: path.lstat().st_mtime_ns for path in (tmp_path / 'out/swiglu').iterdir() if path.name != '.lock'}
    result = script('train.py', *TINY, f'--dataset={tiny_data}', '--max_iters=22', '--lr_decay_iters=20', ok=False)
    assert result.rc == 2 and result.err == f'error: cannot read out/swiglu/{name}: Input/output error; nothing was changed\n'
    assert before == {path.name: path.lstat().st_mtime_ns for path in (tmp_path / 'out/swiglu').iterdir() if path.name != '.lock'}


@pytest.mark.parametrize('text', ['', '{', '[1]', 'null', '{"a": 1', '[' * 100_000])
def test_damaged_json_is_not_missing(tmp_path, text):
    (tmp_path / 'run.json').write_text(text)
    with pytest.raises(UserError, match='run.json is damaged .*; restore it or move it away'):
        files.read_json(tmp_path / 'run.json')
    assert files.read_json(tmp_path / 'none.json') == files.read_json(tmp_path / 'run.json/none.json') == {}


# -----------------------------------------------------------------------------
# weights that are not finite


def test_a_checkpoint_that_had_diverged(tmp_path):
    bad = state(6)
    bad['model']['w'][1, 2] = float('nan')
    save(tmp_path, state(5), keep=2)
    save(tmp_path, bad, keep=2)
    got, said, _ = start(tmp_path)
    assert got == 5 and said == [f'skipping a checkpoint: {tmp_path}/ckpt_00000006.pt: model.w is not finite, so the file is damaged or its run had diverged']
    bad = state(7, optimizers=[{'state': {0: {'exp_avg': torch.tensor([0.0, float('-inf')]), 'step': torch.tensor(1)}}}])
    for it in (5, 6):
        os.unlink(tmp_path / f'ckpt_0000000{it}.pt')
    save(tmp_path, bad, keep=2)
    with pytest.raises(UserError, match='ckpt_00000007.pt: optimizers.0.state.0.exp_avg is not finite'):
        start(tmp_path)
    assert [name for name in os.listdir(tmp_path) if name != '.lock'] == ['ckpt_00000007.pt']


# -----------------------------------------------------------------------------
# more steps


def test_a_run_that_is_stretched_goes_back_to_where_the_rate_was_the_same(tmp_path):
    for it in (4, 5, 8, 10):  # wsd falls from step 5 on
        save(tmp_path, state(it), keep=9)
    save(tmp_path, state(10), keep=9, is_best=True)
    for name in ('run.json', 'metrics.jsonl', 'summary.json'):
        (tmp_path / name).write_text(name)
    got, said, schedule = start(tmp_path, max_iters=20)
    assert got == 5 and schedule == [[0, 20]] and f'from iter 5, the last checkpoint before the learning rate began to fall; what came after it is in {tmp_path}/earlier.1' in said[0]
    assert contents(tmp_path / 'earlier.1') == ['best.pt', 'ckpt_00000008.pt', 'ckpt_00000010.pt', 'metrics.jsonl', 'run.json', 'summary.json']
    assert [checkpoint.step_of(path) for path in paths(tmp_path)] == [4, 5] and not (tmp_path / 'summary.json').exists() and not (tmp_path / 'best.pt').exists()
    assert start(tmp_path / 'earlier.1')[0] == 10  # whole, with its own schedule
    assert start(tmp_path, max_iters=20)[0] == 5  # and again
    straight = [learning_rate(it, replace(CONFIG, max_iters=20)) for it in range(5)]
    assert straight == [learning_rate(it, CONFIG) for it in range(5)]


def test_a_best_checkpoint_of_before_stays(tmp_path):
    save(tmp_path, state(5), keep=9, is_best=True)
    save(tmp_path, state(10), keep=9)
    assert start(tmp_path, max_iters=20)[0] == 5 and checkpoint.load(tmp_path / 'best.pt')['iter'] == 5


@pytest.mark.parametrize('settings, saved', [(dict(), [10]), (dict(schedule='cosine'), [5, 10]), (dict(init_from='resume'), [5, 10])])
def test_a_rate_that_jumps_is_said(tmp_path, settings, saved):
    config = replace(CONFIG, **{key: value for key, value in settings.items() if key == 'schedule'})
    for it in saved:
        save(tmp_path, state(it, config), keep=9)
    got, said, schedule = start(tmp_path, max_iters=20, **settings)
    assert got == 10 and schedule == [[0, 10], [10, 20]]
    old, new = learning_rate(9, config), learning_rate(10, replace(config, max_iters=20))
    assert said == [f"warning: the learning rate's schedule ended at iter 10 and ends at 20 now, so that the rate goes from {old:.2e} to {new:.2e} at once; --lr_decay_iters=10 keeps it"]
    # what keeps it is accepted, and nothing is said
    assert start(tmp_path, max_iters=20, lr_decay_iters=10, **settings) == (10, [], [[0, 10]])
    # a third length is told apart from the second
    save(tmp_path, state(20, replace(config, max_iters=20), schedule=schedule), keep=1)
    assert start(tmp_path, **{**settings, 'max_iters': 30})[2] == [[0, 10], [10, 20], [20, 30]]
    assert start(tmp_path, **{**settings, 'max_iters': 20})[1:] == ([], schedule)


def test_a_longer_run_whose_rate_has_not_begun_to_fall_is_straight(tmp_path):
    save(tmp_path, state(4), keep=9)
    assert start(tmp_path, max_iters=20) == (4, [], [[0, 20]])
    save(tmp_path, state(5), keep=1)
    assert start(tmp_path, max_iters=6)[2] == [[0, 10], [5, 6]]  # shorter: it should have been falling already
    assert is_straight(5, replace(CONFIG, max_iters=20), [[0, 10]]) and not is_straight(7, replace(CONFIG, max_iters=20), [[0, 10]])
    assert is_straight(7, replace(CONFIG, max_iters=20), [[0, 40], [3, 20]]) and not is_straight(9, replace(CONFIG, max_iters=20), [[0, 20], [3, 10]])


@pytest.mark.parametrize('killed_after', range(5))
def test_setting_aside_survives_a_kill(tmp_path, monkeypatch, killed_after):
    """ at any moment every checkpoint has a name somewhere """
    for it in (5, 8, 10):
        save(tmp_path, state(it), keep=9)
    calls, unlink = [], os.unlink

    def kill(path):
        calls.append(path)
        if len(calls) > killed_after:
            raise KeyboardInterrupt
        unlink(path)

    monkeypatch.setattr(rundir.os, 'unlink', kill)
    with contextlib.suppress(KeyboardInterrupt):
        start(tmp_path, max_iters=20)
    monkeypatch.setattr(rundir.os, 'unlink', unlink)
    assert start(tmp_path, max_iters=20)[0] == 5
    there = {checkpoint.load(path)['iter'] for path in tmp_path.rglob('*.pt')}
    assert there == {5, 8, 10}


# -----------------------------------------------------------------------------
# one writer


def hold(out_dir, ready, done):
    held = lock(out_dir)
    ready.set()
    done.wait(PATIENCE)
    held.close()


def test_one_writer(tmp_path):
    context = multiprocessing.get_context('spawn')
    ready, done = context.Event(), context.Event()
    process = context.Process(target=hold, args=(str(tmp_path / 'out'), ready, done))
    process.start()
    assert ready.wait(PATIENCE)
    with pytest.raises(UserError, match=f'in use by another run .pid {process.pid} on'):
        lock(str(tmp_path / 'out'))
    process.kill()
    process.join(PATIENCE)
    lock(str(tmp_path / 'out')).close()


@pytest.mark.parametrize('number', [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.EIO, errno.EBADF])
def test_a_disk_without_locks(tmp_path, monkeypatch, number, capsys):
    import fcntl

    def refuse(file, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, 'flock', refuse)
    lock(str(tmp_path / 'out')).close()
    assert capsys.readouterr().out == f'warning: the disk of {tmp_path}/out has no locks ({os.strerror(number)}): see to it that only one run at a time writes there\n'


@pytest.mark.parametrize('number', [errno.EWOULDBLOCK, errno.EACCES])
def test_contention(tmp_path, monkeypatch, number):
    import fcntl

    def refuse(file, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, 'flock', refuse)
    with pytest.raises(files.InUse, match='in use by another run .starting.'):
        lock(str(tmp_path / 'out'))


def test_a_lock_that_cannot_be_made(tmp_path):
    """ a link that leads nowhere is not a folder that was moved aside """
    (tmp_path / '.lock').symlink_to(tmp_path / 'none/lock')
    with pytest.raises(UserError, match='cannot write to'):
        lock(str(tmp_path))


def test_unwritable(tmp_path):
    (tmp_path / 'file').write_text('')
    for out_dir in (tmp_path / 'file', tmp_path / 'file' / 'out', '/proc/nowhere'):
        with pytest.raises(UserError, match='cannot write to'):
            lock(str(out_dir))
