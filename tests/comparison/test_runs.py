import json
import os
import shutil
import sys
from dataclasses import replace

import pytest

from comparison import runs
from comparison.runs import Board, read_state, run_all
from configurator import UserError
from files import lock
from train import TrainConfig


def test_a_run_older_than_a_setting_is_kept(trained, tmp_path):
    shutil.copytree(trained, tmp_path / 'old')
    run = json.loads((tmp_path / 'old/run.json').read_text())
    config = TrainConfig(**{**run['config'], 'out_dir': str(tmp_path / 'old')})
    del run['config']['skip_spikes']
    (tmp_path / 'old/run.json').write_text(json.dumps(run))
    assert read_state(config, run['data']['fingerprint'])['status'] == 'done'
    with pytest.raises(UserError, match='skip_spikes was False, now True'):
        read_state(replace(config, skip_spikes=True), run['data']['fingerprint'])


def test_a_directory_that_stays_locked(trained, tmp_path, monkeypatch, capsys):
    """ it is said who holds it, and after a while the run is given up; the others are not """
    monkeypatch.setattr(runs, 'LOCK_PATIENCE', 1)
    run = json.loads((trained / 'run.json').read_text())
    shutil.copytree(trained, tmp_path / 'done-s1')
    configs = [TrainConfig(**{**run['config'], 'out_dir': str(tmp_path / name)}) for name in ('held-s1', 'done-s1')]
    held = lock(configs[0].out_dir)
    states = run_all(configs, run['data']['fingerprint'], 0, 1, 'runs')
    held.close()
    out = capsys.readouterr().out
    assert [state['status'] for state in states] == ['failed', 'done']
    assert out.count('waiting: ') == 1 and f'in use by another run (pid {os.getpid()} on' in out and 'failed: held-s1: ' in out


@pytest.mark.parametrize('name', ['run.json', 'summary.json', 'metrics.jsonl'])
def test_a_file_that_cannot_be_read_is_not_a_run_that_failed(script, trained, tmp_path, name):
    run = json.loads((trained / 'run.json').read_text())
    shutil.copytree(trained, tmp_path / 'a')
    (tmp_path / 'a' / name).unlink()
    (tmp_path / 'a' / name).symlink_to('/proc/self/mem')
    config = TrainConfig(**{**run['config'], 'out_dir': str(tmp_path / 'a')})
    if name != 'metrics.jsonl':  # whose summary says enough
        with pytest.raises(UserError, match=f'cannot read .*a/{name}: Input/output error; nothing was changed'):
            read_state(config, run['data']['fingerprint'])
    error = script('compare.py', f'--runs={tmp_path}/a', ok=False).err
    assert error == f'error: cannot read {tmp_path}/a/{name}: Input/output error; nothing was changed\n'


def test_board(capsys, monkeypatch):
    """ the live table on a terminal, and one line per change elsewhere """
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: True, raising=False)
    configs = [replace(TrainConfig(), ffn=ffn, seed=seed, out_dir=f'out/c/{ffn}-s{seed}') for seed in (1, 2) for ffn in ('gelu', 'swiglu')]
    states = [{'status': 'left', 'fraction': 0.0} for _ in configs]
    board = Board('runs', configs, states)
    states[0] = {'status': 'done', 'fraction': 1.0, 'val_loss': 3.25}
    states[1] = {'status': 'running', 'fraction': 0.42}
    states[2] = {'status': 'failed', 'fraction': 0.0}
    board.draw(states, False)
    screen = capsys.readouterr().out
    lines = [line.removeprefix('\x1b[2K').split() for line in screen.splitlines()]
    assert lines[1] == ['s1', 's2'] and lines[2] == ['gelu', '3.2500', 'failed'] and lines[3] == ['swiglu', '42%', '·']
    assert '1 done · 1 running · 1 left · 1 failed · eta' in screen
    board.draw(states, False)
    assert capsys.readouterr().out.startswith('\x1b[5A')  # in place
