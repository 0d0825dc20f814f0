import multiprocessing
import os
from dataclasses import dataclass

import pytest
import torch
from conftest import PATIENCE

from configurator import UserError
from train import TrainConfig
from training.checkpoint import paths, save
from training.rundir import MAY_CHANGE, changed_settings, lock, open_run


@dataclass(frozen=True)
class Settings:
    out_dir: str = ''
    init_from: str = 'auto'
    n_embd: int = 4
    max_iters: int = 10
    device: str = 'cpu'
    learning_rate: float = 1e-3


def state(it):
    return {'model': {'w': torch.full((3, 4), float(it))}, 'iter': it, 'config': {'n_embd': 4, 'max_iters': 10, 'data': 'd'}}


def test_what_may_change():
    saved = {'n_embd': 4, 'max_iters': 10, 'device': 'cpu', 'data': 'd'}
    assert changed_settings(saved, Settings(max_iters=20, device='cuda'), {'data': 'd'}) == {}
    assert changed_settings(saved, Settings(n_embd=8), {'data': 'd'}) == {'n_embd': (4, 8)}
    # a setting that the run is older than has its default; one that is no longer known was something
    assert changed_settings(saved, Settings(learning_rate=1.0), {'data': 'd'}) == {'learning_rate': (1e-3, 1.0)}
    assert changed_settings({**saved, 'gone': 1}, Settings(), {'data': 'e'}) == {'data': ('d', 'e'), 'gone': (1, None)}
    assert MAY_CHANGE <= set(TrainConfig.__dataclass_fields__)


def start(out_dir, init_from='auto', **config):
    said = []
    held, _, got = open_run(Settings(str(out_dir), init_from, **config), {'data': 'd'}, said.append)
    held.close()
    return got and got['iter'], said


def test_open_run(tmp_path):
    out = tmp_path / 'out'
    assert start(out) == (None, [])
    save(out, state(5), keep=2)
    assert start(out) == (5, []) and start(out, max_iters=20) == (5, []) and start(out, 'resume') == (5, [])
    with pytest.raises(UserError, match=r'n_embd was 4, now 8'):
        start(out, 'resume', n_embd=8)
    got, said = start(out, n_embd=8)
    assert got is None and 'n_embd was 4, now 8' in said[0] and f'--out_dir={out}.1' in said[0]
    assert os.path.exists(f'{out}.1/ckpt_00000005.pt') and paths(out) == []
    with pytest.raises(UserError, match="init_from = 'resume': no usable checkpoint"):
        start(out, 'resume')
    save(out, state(6), keep=2)
    assert start(out, 'scratch')[0] is None
    assert os.path.exists(f'{out}.2/ckpt_00000006.pt')


def test_a_run_with_only_damaged_checkpoints_is_kept(tmp_path):
    out = tmp_path / 'out'
    out.mkdir()
    save(out, state(5), keep=2)
    os.truncate(paths(out)[0], 100)
    got, said = start(out)
    assert got is None and 'skipping' in said[0] and f'{out}.1' in said[1]
    assert os.path.getsize(f'{out}.1/ckpt_00000005.pt') == 100


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


def test_unwritable(tmp_path):
    (tmp_path / 'file').write_text('')
    for out_dir in (tmp_path / 'file' / 'out', '/proc/nowhere'):
        with pytest.raises(UserError, match='cannot write to'):
            lock(str(out_dir))
