import os
import pickle
import random

import pytest
import torch

from configurator import UserError
from training.checkpoint import load, load_latest, paths, save


def state(it, **config):
    return {'model': {'w': torch.full((3, 4), float(it))}, 'iter': it, 'config': {'n_embd': 4, 'max_iters': 10, **config}}


def test_keeps_the_newest_and_the_best(tmp_path):
    for it, is_best in ((1, True), (2, True), (3, False), (4, False)):
        save(tmp_path, state(it), keep=2, is_best=is_best)
    assert [os.path.basename(path) for path in paths(tmp_path)] == ['ckpt_00000003.pt', 'ckpt_00000004.pt']
    assert load(tmp_path / 'best.pt')['iter'] == 2
    assert load_latest(tmp_path)[1]['iter'] == 4
    assert sorted(os.listdir(tmp_path)) == ['best.pt', 'ckpt_00000003.pt', 'ckpt_00000004.pt']


def test_every_flipped_or_missing_byte_is_noticed(tmp_path):
    save(tmp_path, state(1), keep=2)
    save(tmp_path, state(2), keep=2)
    path, rng = paths(tmp_path)[-1], random.Random(0)
    with open(path, 'rb') as file:
        whole = file.read()
    good, noticed = load(path), 0
    for i in range(len(whole)):
        for damaged in (whole[:i] + bytes([whole[i] ^ 1 << rng.randrange(8)]) + whole[i + 1:], whole[:i]):
            with open(path, 'wb') as file:
                file.write(damaged)
            said = []
            _, got = load_latest(tmp_path, said.append)
            if got['iter'] == 1:
                noticed += 1
                assert len(said) == 1 and 'ckpt_00000002.pt' in said[0]
            else:  # a byte that carries nothing
                assert torch.equal(got['model']['w'], good['model']['w']) and got['config'] == good['config']
    assert noticed > len(whole)


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f'touch {self.path}',)


@pytest.mark.parametrize('as_zip', [False, True])
def test_a_pickle_is_refused_and_not_run(tmp_path, monkeypatch, as_zip):
    monkeypatch.setenv('TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD', '1')
    payload, path = Evil(tmp_path / 'pwned'), tmp_path / 'ckpt_00000001.pt'
    if as_zip:
        torch.save({'model': payload, 'config': {}, 'iter': 1}, path)
    else:
        path.write_bytes(pickle.dumps(payload))
    with pytest.raises(UserError, match='ckpt_00000001'):
        load(path)
    assert load_latest(tmp_path, lambda text: None) == (None, None)
    assert not (tmp_path / 'pwned').exists()


def test_foreign_files(tmp_path):
    torch.save({'weights': 1}, tmp_path / 'a.pt')
    with pytest.raises(UserError, match='not a checkpoint of ours'):
        load(tmp_path / 'a.pt')
    with pytest.raises(UserError, match='no checkpoint'):
        load(tmp_path / 'b.pt')


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, state(1), keep=2)
    monkeypatch.setattr(torch, 'save', lambda value, file: file.write(b'half') and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save(tmp_path, state(2), keep=2)
    assert os.listdir(tmp_path) == ['ckpt_00000001.pt']


def test_no_hard_links(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError("not on this file system")
    monkeypatch.setattr(os, 'link', refuse)
    save(tmp_path, state(1), keep=1, is_best=True)
    save(tmp_path, state(2), keep=1)
    assert load(tmp_path / 'best.pt')['iter'] == 1
