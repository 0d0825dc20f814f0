import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT, environment, popen

from bench import NANOGPT, PRESETS, BenchConfig, busy_cores, cpu_ticks, judged, noise, our_config, ratio, run_for, take_turns
from configurator import UserError, parse
from model import GPT
from training.accounting import components, totals

# the interface of nanoGPT's model.py, around a model of ours
STAND_IN = f'''
import sys
sys.path.insert(0, {str(ROOT)!r})
from dataclasses import dataclass
import torch
import model as ours
from bench import NANOGPT

@dataclass
class GPTConfig:
    block_size: int; vocab_size: int; n_layer: int; n_head: int; n_embd: int; dropout: float; bias: bool

class GPT(ours.GPT):
    def __init__(self, c):
        keys = {{key: value for key, value in NANOGPT.items() if key in ours.GPTConfig.__dataclass_fields__}}
        super().__init__(ours.GPTConfig(**vars(c) | keys))
        print("number of parameters: 0.80M")
    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=learning_rate, betas=betas, weight_decay=weight_decay)
    @torch.no_grad()
    def generate(self, idx, n):
        for _ in range(n):
            idx = torch.cat((idx, torch.multinomial(self(idx)[0][:, -1].softmax(-1), 1)), 1)
'''


@pytest.fixture
def ref(tmp_path):
    (tmp_path / 'nanoGPT').mkdir()
    (tmp_path / 'nanoGPT' / 'model.py').write_text(STAND_IN)
    return f"--ref={tmp_path / 'nanoGPT'}"


def test_ratios_are_taken_round_by_round():
    a, b = {'times': [1.0, 4.0, 2.0]}, {'times': [0.5, 2.0, 4.0]}  # the machine was slower in the second round
    assert ratio(a, b) == 2.0 and ratio(b, a) == 0.5 and noise(a, a) == 0
    assert noise({'times': [1.0, 1.1, 1.2]}, {'times': [1.0, 1.0, 1.0]}) == pytest.approx(0.1)
    assert judged(1.19, 0.1) == '1.19x (within noise)' and judged(1.21, 0.1) == '1.21x' and judged(0.8, 0.11) == '0.80x (within noise)'


def test_sides_take_turns_forth_and_back():
    calls = []

    class Side:
        def __init__(self, name):
            self.name = name

        def send(self, n):
            calls.append('begin')

        def receive(self):
            return 1.0

        def __call__(self, n):
            calls.append(self.name)
            return 1.0

    results = take_turns({name: Side(name) for name in 'abc'}, 4, 1e-9)
    assert calls[:4] == ['begin'] * 3 + ['a']  # the first calls, which compile, begin together
    turns = calls[-12:]
    assert turns == ['a', 'b', 'c', 'c', 'b', 'a'] * 2
    assert all(len(row['times']) == 4 for row in results.values())


@pytest.mark.parametrize('preset', sorted(PRESETS.keys() - {'tiny'}))
def test_both_sides_have_the_same_model(preset):
    """ as many parameters as nanoGPT's, whose own count leaves positions out, and its FLOPs: 6N + 12LHQT """
    config = our_config(BenchConfig(preset=preset))
    total = totals(components(config))
    expected = config.vocab_size * config.n_embd + config.block_size * config.n_embd + config.n_layer * (12 * config.n_embd**2 + 2 * config.n_embd) + config.n_embd
    assert total['params'] == expected
    if preset == 'cpu_char':
        assert total['params'] == sum(p.numel() for p in GPT(config).parameters())
    n = expected - config.block_size * config.n_embd
    assert total['train_flops'] == pytest.approx(6 * n + 12 * config.n_layer * config.n_embd * config.block_size, rel=0.002)


def test_train(script, ref):
    out = script('bench.py', ref, '--rounds=2', '--seconds=0.01', '--dtype=float32').out
    result = json.loads(out.splitlines()[-1])
    sides = result['sides']
    assert {'ours', 'nanoGPT', 'ours, own recipe', 'again'} == set(sides)
    assert result['ratio'] == pytest.approx(ratio(sides['nanoGPT'], sides['ours'])) and result['ratio'] > 0
    row = sides['ours']
    assert row['tokens_per_sec'] == pytest.approx(768 / sorted(row['times'])[0], rel=3) and row['of_datasheet'] is None and row['of_peak'] == pytest.approx(row['flops_per_sec'] / result['peak']['float32'])
    assert row['flops_per_sec'] == pytest.approx(row['tokens_per_sec'] * totals(components(our_config(BenchConfig())))['train_flops'])
    assert row['memory'] > 2**27 and 'against nanoGPT' in out and NANOGPT['ffn'] == 'gelu'


@pytest.mark.slow
def test_ffns(script):
    out = script('bench.py', '--ffns=gelu,swiglu', '--rounds=2', '--seconds=0.01', '--dtype=float32').out
    result = json.loads(out.splitlines()[-1])
    assert {'gelu', 'swiglu', 'again'} == set(result['sides']) and result['ratio'] is None and 'against gelu' in out


@pytest.mark.parametrize('mode', [pytest.param('decode', marks=pytest.mark.slow), 'data', pytest.param('peak', marks=pytest.mark.slow)])
def test_modes(mode, script, ref):
    out = script('bench.py', f'--mode={mode}', ref, '--rounds=2', '--seconds=0.01').out
    result = json.loads(out.splitlines()[-1])
    if mode == 'decode':
        assert set(result['decode']) == {'1', '8'} and result['ratio'] == result['decode']['1']['ratio'] > 0
    if mode == 'data':
        assert 0 < result['data']['ours']['p50'] <= result['data']['ours']['p95']
    if mode == 'peak':
        assert result['peak']['float32'] > 1e9 and result['peak']['copy'] > 1e8


@pytest.mark.slow
def test_a_dry_run_of_the_gpu_check(script, ref, tmp_path):
    """ all of it, with tiny shapes on a CPU: the one chance on a GPU is not lost to a typo. Neither wandb nor datasets is there, nor a network """
    (tmp_path / 'hidden').mkdir()
    for package in ('wandb', 'datasets', 'transformers', 'safetensors', 'huggingface_hub'):
        (tmp_path / 'hidden' / f'{package}.py').write_text('raise ImportError("not on that machine")')
    argv = [sys.executable, str(ROOT / 'bench.py'), '--mode=gpu_check', '--dry', '--device=cpu', ref, '--out=kept']
    process = popen(argv, patience=240, cwd=tmp_path, env=environment(tmp_path, PYTHONPATH=str(tmp_path / 'hidden')), stdout=subprocess.PIPE)
    out = process.communicate()[0]
    kept = json.loads((tmp_path / 'kept/gpu_check.json').read_text())
    assert list(kept) == ['train-124m', 'decode-124m', 'train-char', 'ffns-124m', 'tests'] and {check['rc'] for check in kept.values()} == {0}, out
    assert set(kept['train-char']['result']['sides']) >= {'ours', 'nanoGPT', 'ours, own recipe'} and set(kept['ffns-124m']['result']['sides']) == {'gelu', 'swiglu', 'relu2', 'again'}
    assert kept['decode-124m']['result']['ratio'] > 0 and 'against nanoGPT' in (tmp_path / 'kept/train-124m.log').read_text() and 'test_gpu.py' in (tmp_path / 'kept/tests.log').read_text()


def test_a_check_is_ended_at_its_limit(tmp_path, capsys):
    """ and what it had said by then is there """
    result = run_for([sys.executable, '-u', '-c', "print('so far'); print('{\"config\": 1}'); import time; time.sleep(60)"], 3, str(tmp_path / 'log'))
    assert result['rc'] == -9 and result['result'] == {'config': 1} and (tmp_path / 'log').read_text() == 'so far\n{"config": 1}\n' and capsys.readouterr().out == 'so far\n'


def test_errors(script, tmp_path):
    for flags, words in ((['--ref=nowhere'], 'git clone'), (['--mode=gpu_check', '--device=cpu'], 'no CUDA device')):
        result = script('bench.py', *flags, ok=False)
        assert result.rc == 2 and result.err.count('\n') == 1 and result.err.startswith('error: ') and words in result.err
    for flag in ('--seconds=0', '--rounds=1', '--preset=large', '--ffns=gelu,x', '--ffns=gelu --ref=.', '--ffns=gelu --mode=decode'):
        with pytest.raises(UserError, match=flag[2:].split('=')[0]):
            parse(BenchConfig, flag.split())


def test_busy_cores():
    """ idle time is the fourth and fifth of the numbers of /proc/stat """
    assert busy_cores((100, 1000), (150, 1200)) == os.cpu_count() * 0.25 and busy_cores(None, (1, 2)) is None and busy_cores((1, 2), (1, 2)) is None
    busy, total = cpu_ticks()
    assert 0 < busy < total
