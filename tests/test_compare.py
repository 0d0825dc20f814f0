import copy
import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, TINY, environment
from scipy.stats import ttest_rel

from compare import Board, CompareConfig, ffn_cost, make_variants, matched_width, read_state, stretch, tune
from configurator import UserError, parse
from model import FFNS, GPTConfig, components, totals
from plots import PLOTS
from report import check_equal, headline, make_results, markdown, match_line, mismatch
from timeshare import GROUPS, group_of, time_shares
from train import TrainConfig

FILES = ('report.md', 'results.json', *PLOTS)


# -----------------------------------------------------------------------------
# widths


# facts: the nearest multiple of 64, and of 8 below 512; the mismatch of the FFN's parameters
@pytest.mark.parametrize('n_embd, multiple, width, excess', [
    (128, 64, 320, -0.0625), (512, 64, 1344, -0.015625), (2048, 64, 5440, -0.00390625), (640, 64, 1728, 0.0125), (1024, 64, 2752, 0.0078125),
    (4096, 256, 11008, 0.0078125), (96, 0, 256, 0), (192, 0, 512, 0), (384, 0, 1024, 0), (768, 0, 2048, 0), (1536, 0, 4096, 0),
    (128, 0, 344, 0.0078125), (64, 0, 168, -0.015625), (512, 0, 1344, -0.015625), (2048, 0, 5440, -0.00390625)])
def test_matched_widths(n_embd, multiple, width, excess):
    config = GPTConfig(n_embd=n_embd, n_head=1, ffn='swiglu')
    assert matched_width(config, 'params', multiple) == width == matched_width(config, 'flops', multiple) == matched_width(config, 'time', multiple)
    reference = ffn_cost(replace(config, ffn='gelu'), 4 * n_embd, 'params')
    assert ffn_cost(config, width, 'params') / reference - 1 == pytest.approx(excess, abs=1e-12)
    assert matched_width(config, 'width4d') == 4 * n_embd


@pytest.mark.parametrize('ffn', FFNS)
def test_no_other_width_is_nearer(ffn):
    for n_embd, bias, multiple in ((48, True, 8), (100, False, 8), (128, True, 0), (500, False, 0), (768, True, 0)):
        config = GPTConfig(n_embd=n_embd, n_head=1, ffn=ffn, bias=bias, position='learned', qk_norm=False)
        target = ffn_cost(replace(config, ffn='relu'), 4 * n_embd, 'params')
        width = matched_width(config, 'params', multiple)
        step = multiple or (8 if width < 512 else 64)
        distance = {n: abs(ffn_cost(config, n, 'params') - target) for n in range(step, 6 * n_embd, step)}
        assert distance[width] == min(distance.values())
        # with a given width, that of the ungated reference
        assert matched_width(replace(config, intermediate_size=1024, ffn='relu')) == 1024


def test_unmatched_at_equal_width():
    """ facts D2: GPT-2 124M with a gated FFN at 4d """
    shape = GPTConfig(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50257, norm='layernorm', position='learned',
                      tie_embeddings=True, qk_norm=False)
    rows = {}
    for ffn in ('gelu', 'swiglu'):
        config = replace(shape, ffn=ffn, intermediate_size=matched_width(replace(shape, ffn=ffn), 'width4d'))
        parts = components(config)
        rows[ffn] = {'ffn_params': sum(row['params'] for row in parts if row['name'].startswith('ffn.')), **totals(parts), 'seconds': 1.0, 'mean': 3.28,
                     'non_embedding': sum(row['params'] for row in parts if row['name'].startswith(('attention.', 'ffn.', 'norm')))}
    m = mismatch(rows['swiglu'], rows['gelu'], 'width4d')
    assert rows['swiglu']['flops'] == 341_435_904 and rows['gelu']['flops'] == 284_812_800
    assert (m['ffn'], m['non_embedding'], m['total'], m['flops']) == pytest.approx((0.5, 0.333, 0.228, 0.199), abs=0.0005)
    assert m['excess'] == m['non_embedding'] and m['loss'] == pytest.approx(3.28 * (1 - (1 + m['non_embedding']) ** -0.076))
    # biases: 12,288 parameters more with SwiGLU at 2,048, 1,024 a layer
    biased = [totals(components(replace(shape, bias=True, ffn=ffn, intermediate_size=width)))['params'] for ffn, width in (('swiglu', 2048), ('gelu', 3072))]
    assert biased == [124_452_096, 124_439_808]


def test_settings():
    for argv, error in (
            (['--ffns=gelu,swigl'], 'ffns'), (['--ffns=gelu'], 'two different'), (['--ffns=gelu,gelu'], 'two different'), (['--baseline=glu'], 'baseline'),
            (['--tune_lr=1'], 'at least two'), (['--tune_lr=a,b'], 'tune_lr'), (['--tune_lr=0,1'], 'above 0'), (['--n_seeds=0'], 'n_seeds'),
            (['--n_gpus=3', '--jobs=2'], 'n_gpus'), (['--match=time', '--jobs=2'], 'jobs'), (['--n_gpus=3', '--device=cpu'], 'batch_size'),
            (['--target_loss=1'], 'target_loss'), (['--eval_only'], 'eval_only'), (['--multiple_of=8'], 'width_multiple'), (['--init_from=scratch'], 'init_from')):
        with pytest.raises(UserError, match=error):
            parse(CompareConfig, argv)
    assert parse(CompareConfig, ['--ffns=all']).ffn_names == list(FFNS)
    config = parse(CompareConfig, ['--ffns=relu, glu', '--tune_lr=2,0.5,1', '--n_gpus=4', '--jobs=2'])
    assert (config.ffn_names, config.base, config.lr_multiples, config.processes) == (['relu', 'glu'], 'relu', [0.5, 1.0, 2.0], 2)


@pytest.mark.parametrize('ffn', FFNS)
def test_runs_differ_in_nothing_else(ffn):
    variants = make_variants(CompareConfig(ffns='all'), 256)
    differences = {key for key in TrainConfig.__dataclass_fields__ if getattr(variants[ffn], key) != getattr(variants['gelu'], key)}
    assert differences <= {'ffn', 'intermediate_size'}
    assert totals(components(variants[ffn]))['params'] - totals(components(variants['gelu']))['params'] == (4 if ffn == 'swish' else 0)


def test_stretch():
    config = stretch(TrainConfig(max_iters=1000, warmup_iters=50, lr_decay_iters=800, eval_interval=100), 900)
    assert (config.max_iters, config.warmup_iters, config.lr_decay_iters, config.eval_interval) == (900, 45, 720, 90)


def test_grid_grows_until_the_best_is_inside(tmp_path):
    best = {'gelu': 1.0, 'swiglu': 6.0, 'relu': 0.2}  # of a loss that is a parabola in the logarithm of the learning rate
    seen = []

    def train(configs, title):
        seen.extend(config.seed for config in configs)
        return [{'status': 'done', 'val_loss': 3 + (torch.tensor(config.learning_rate / 0.01 / best[config.ffn]).log() ** 2).item()} for config in configs]

    config = CompareConfig(ffns='gelu,swiglu,relu', tune_lr='0.5,1,2', tune_seeds=2)
    grids = tune(make_variants(config, 256), config, str(tmp_path), train)
    assert {ffn: min(grid, key=grid.get) for ffn, grid in grids.items()} == {'gelu': 1.0, 'swiglu': 8.0, 'relu': 0.25}
    assert sorted(grids['gelu']) == [0.5, 1, 2] and sorted(grids['swiglu']) == [0.5, 1, 2, 4, 8, 16] and sorted(grids['relu']) == [0.125, 0.25, 0.5, 1, 2]
    assert len(set(seen)) == 2 and not set(seen) & set(range(1337, 2337))
    best['gelu'] = 1e9
    with pytest.raises(UserError, match='still at the edge'):
        tune(make_variants(config, 256), config, str(tmp_path), train)


# -----------------------------------------------------------------------------
# the whole thing


def compare(script, tiny_data, *args, **options):
    return script('compare.py', *TINY, f'--dataset={tiny_data}', '--name=c', '--jobs=2', *args, **options)


@pytest.fixture(scope='session')
def compared(tiny_data, tmp_path_factory):
    """ the folder of a comparison that was killed with -9 in the middle and started again, and what it printed """
    tmp_path = tmp_path_factory.mktemp('compared')
    argv = [sys.executable, str(ROOT / 'compare.py'), *TINY, f'--dataset={tiny_data}', '--name=c', '--jobs=2', '--ffns=gelu,swiglu', '--n_seeds=3',
            '--wandb=offline']
    env, folder = environment(tmp_path, WANDB_MODE=None), tmp_path / 'out/compare/c'
    with open(tmp_path / 'first.txt', 'w') as out:
        process = subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=out, stderr=out)
    while len(list(folder.glob('*/summary.json'))) < 2:
        assert process.poll() is None, (tmp_path / 'first.txt').read_text()
        time.sleep(0.1)
    process.kill()
    process.wait()
    finished = {path: path.stat().st_mtime_ns for path in folder.glob('*/summary.json')}
    assert 2 <= len(finished) < 6
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(folder.glob('*/summary.json'))) == 6
    for path, written in finished.items():
        assert path.stat().st_mtime_ns == written, f"{path} was made again"
    return folder, done.stdout


def check_files(compared):
    folder, said = compared
    for name in FILES:
        assert (folder / name).stat().st_size > 1000, name
    assert '0 left' in said and 'report   out/compare/c/report.md' in said and not list(folder.glob('*.tmp'))
    text = (folder / 'report.md').read_text()
    for words in ('# c: ', 'Matched in parameters, exactly.', '## What was equal', 'fingerprint', '## Mismatch', '## Every run', 's1339', 'fixed recipe',
                  '2 runs at a time shared the machine', 'eager profile', '![', 'perplexity ratio'):
        assert words in text, words


def check_results_are_those_of_the_runs(compared):
    folder, _ = compared
    results = json.loads((folder / 'results.json').read_text())
    losses = {ffn: [json.loads((folder / f'{ffn}-s{seed}/summary.json').read_text())['val_loss'] for seed in (1337, 1338, 1339)] for ffn in ('gelu', 'swiglu')}
    for ffn in losses:
        row, run = results['ffns'][ffn], json.loads((folder / f'{ffn}-s1337/run.json').read_text())
        assert list(row['losses'].values()) == losses[ffn] and row['mean'] == pytest.approx(sum(losses[ffn]) / 3)
        assert row['params'] == run['total']['params'] and row['flops'] == run['total']['flops']
        assert row['width'] == (192 if ffn == 'gelu' else 128) and row['mismatch']['excess'] == 0
        assert row['curves']['iter'] == list(range(0, 21, 4)) and row['curves']['losses']['1337'][-1] == losses[ffn][0]
        assert row['shares']['FLOPs']['ffn'] == pytest.approx(sum(part['flop_share'] for part in run['components'] if part['name'].startswith('ffn.')))
        for shares in row['shares'].values():
            assert list(shares) == list(GROUPS) and sum(shares.values()) == pytest.approx(1)
    test = ttest_rel(losses['swiglu'], losses['gelu'])
    pair, interval = results['ffns']['swiglu']['paired'], test.confidence_interval(0.95)
    assert (pair['p'], pair['low'], pair['high']) == pytest.approx((test.pvalue, interval.low, interval.high))
    assert pair['verdict'].startswith('suggestive: ') or pair['verdict'] == 'not resolved'
    line = next(line for line in (folder / 'report.md').read_text().splitlines() if line.startswith('| swiglu'))
    assert f"{pair['mean']:+.4f} [{interval.low:+.4f}, {interval.high:+.4f}]" in line and f"{results['ffns']['swiglu']['mean']:.4f}" in line
    # the same as a run by hand
    assert json.loads((folder / 'swiglu-s1337/run.json').read_text())['config']['wandb_group'] == 'c'


def check_again_and_report_only(compared, tiny_data, tmp_path):
    folder, _ = compared
    script = _script_in(folder.parents[2])
    before = {path: path.stat().st_mtime_ns for path in folder.glob('*-s*/*')}
    old = json.loads((folder / 'results.json').read_text())
    again = compare(script, tiny_data, '--ffns=gelu,swiglu', '--n_seeds=3')
    assert '-s1337 ' not in again.out  # nothing ran
    for name in FILES:
        (folder / name).unlink()
    only = script('compare.py', '--report_only', '--name=c', '--baseline=swiglu')
    assert before == {path: path.stat().st_mtime_ns for path in folder.glob('*-s*/*')}
    new = json.loads((folder / 'results.json').read_text())
    assert new['ffns']['gelu']['paired']['mean'] == -old['ffns']['swiglu']['paired']['mean'] and 'gelu' in only.out
    assert new['plan']['command'].endswith('--n_seeds=3') and all((folder / name).exists() for name in FILES)
    refused = compare(script, tiny_data, '--ffns=gelu,swiglu', '--n_seeds=3', '--learning_rate=2e-2', ok=False)
    assert refused.rc == 2 and 'learning_rate was 0.01, now 0.02' in refused.err and '--name' in refused.err and 'Traceback' not in refused.err
    longer = compare(script, tiny_data, '--ffns=gelu,swiglu', '--n_seeds=3', '--max_iters=40', ok=False)
    assert longer.rc == 2 and 'max_iters was 20, now 40' in longer.err
    script('compare.py', '--report_only', '--name=c')  # as it was


def _script_in(folder):
    from conftest import run_script
    return lambda *args, **options: run_script(*args, tmp_path=folder, **options)


def check_wandb_has_the_report(compared):
    folder, _ = compared
    [run] = [path for path in folder.glob('wandb/offline-run-*/run-*.wandb')]

    def inspect(*flags):
        return subprocess.run([sys.executable, '-m', 'wandb', 'leet', 'inspect', '--json', *flags, str(run)], capture_output=True, text=True,
                              env=environment(folder.parents[2]), check=True).stdout

    assert '"run_group":"c"' in inspect() and all(len(list(run.parent.glob(f'files/media/images/report/{name[:-4]}_*.png'))) == 1 for name in PLOTS)
    results = json.loads((folder / 'results.json').read_text())

    def table(name):
        [path] = run.parent.glob(f'files/media/table/report/{name}_*.json')
        table = json.loads(path.read_text())
        return [dict(zip(table['columns'], row, strict=True)) for row in table['data']]

    assert {row['ffn']: (row['mean'], row['delta_verdict']) for row in table('table')} == {
        ffn: (row['mean'], row['paired'] and row['paired']['verdict']) for ffn, row in results['ffns'].items()}
    assert {(row['ffn'], str(row['seed'])): row['val_loss'] for row in table('losses')} == {
        (ffn, seed): loss for ffn, row in results['ffns'].items() for seed, loss in row['losses'].items()}
    shares = {ffn: row['shares'] for ffn, row in results['ffns'].items()}
    assert all(row['share'] == shares[row['ffn']][row['of']][row['component']] for row in table('components')) and len(table('components')) == 6 * len(GROUPS)
    summary = json.loads(inspect('--summary'))['summary']
    assert summary['report/verdict/swiglu'] == results['ffns']['swiglu']['paired']['verdict'] and 'swiglu' in summary['report/headline']
    assert summary['report/match'] == 'Matched in parameters, exactly.'
    assert all((run.parent / 'files' / name).read_bytes() == (folder / name).read_bytes() for name in ('report.md', 'results.json'))


def check_runs_by_hand(compared, trained, tmp_path, script):
    """ runs of train.py compare when they are equal, and are refused, both named, when they are not """
    folder, _ = compared
    pair = f'--runs={folder}/gelu-s1337,{folder}/swiglu-s1337'
    out = script('compare.py', pair, '--wandb=disabled').out
    assert 'no inference' in out and (tmp_path / 'out/compare/runs/report.md').exists()
    assert script('compare.py', f'--runs={folder}/gelu-s1337,{tmp_path}/none', ok=False).err == f"error: {tmp_path}/none is not a run directory: it has no run.json\n"
    twice = script('compare.py', f'--runs={folder}/gelu-s1337,{folder}/gelu-s1337', ok=False)
    assert twice.rc == 2 and 'are both gelu with seed 1337' in twice.err


def test_a_comparison(compared, tiny_data, trained, tmp_path, script):
    """ one test, for it takes half a minute to make and two processes would make it twice """
    check_files(compared)
    check_results_are_those_of_the_runs(compared)
    check_again_and_report_only(compared, tiny_data, tmp_path)
    check_wandb_has_the_report(compared)
    check_runs_by_hand(compared, trained, tmp_path, script)


@pytest.mark.parametrize('key, value, words', [
    ('data', 'f' * 16, 'data fingerprint is'), ('block_size', 16, 'block_size is 32 and 16'), ('max_iters', 40, 'max_iters is 20 and 40'),
    ('learning_rate', 1.0, 'learning_rate is'), ('eval_tokens', 512, 'eval_tokens is'), ('n_layer', 3, 'n_layer is'), ('init', 'gpt2', 'init is')])
def test_unequal_runs_are_refused(key, value, words):
    a, b = fake_run('gelu', 1), fake_run('swiglu', 1)
    check_equal([a, b], set())
    if key == 'data':
        b['data']['fingerprint'] = value
    else:
        b['config'][key] = value
    with pytest.raises(UserError, match=words) as error:
        check_equal([a, b], set())
    assert 'runs/gelu-1' in str(error.value) and 'runs/swiglu-1' in str(error.value)
    if key in ('learning_rate', 'max_iters'):
        check_equal([a, b], {key})  # as tuning and equal time have them
        c = copy.deepcopy(b) | {'seed': 2, 'dir': 'runs/swiglu-2'}
        c['config'][key] *= 2
        with pytest.raises(UserError, match='though both are swiglu'):
            check_equal([a, b, c], {key})


def test_failures_and_divergence_do_not_stop_the_others(script, tiny_data, tmp_path):
    (tmp_path / 'out/compare/c').mkdir(parents=True)
    (tmp_path / 'out/compare/c/relu-s1337').write_text('in the way')
    result = compare(script, tiny_data, '--ffns=relu,gelu,swiglu', '--n_seeds=1', '--max_iters=4', ok=False)
    assert result.rc == 2 and 'failed: relu-s1337: cannot write to' in result.out and '1 of 3 runs failed' in result.err
    text = (tmp_path / 'out/compare/c/report.md').read_text()
    assert '**Incomplete.**' in text and 'relu-s1337' in text and '| gelu' in text and '| swiglu' in text
    wild = compare(script, tiny_data, '--ffns=gelu,relu2', '--n_seeds=1', '--max_iters=8', '--name=wild', '--optimizer=adamw', '--learning_rate=1e6')
    assert 'diverged' in wild.out and 'Diverged: ' in (tmp_path / 'out/compare/wild/report.md').read_text()
    assert 'running' in wild.out
    again = compare(script, tiny_data, '--ffns=gelu,relu2', '--n_seeds=1', '--max_iters=8', '--name=wild', '--optimizer=adamw', '--learning_rate=1e6')
    assert 'running |' not in again.out  # a run that diverged is finished


def test_interrupted(tiny_data, tmp_path):
    argv = [sys.executable, str(ROOT / 'compare.py'), *TINY, f'--dataset={tiny_data}', '--name=c', '--ffns=gelu,swiglu', '--n_seeds=1', '--max_iters=100000']
    process = subprocess.Popen(argv, cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log = tmp_path / 'out/compare/c/gelu-s1337.log'
    while not (log.exists() and 'iter 3/' in log.read_text()):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)
    # one comparison at a time in a folder
    second = subprocess.run(argv, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True)
    assert second.returncode == 2 and 'in use by another run' in second.stderr
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and 'the same command continues' in out and 'Traceback' not in out
    assert 'stopped by SIGTERM' in log.read_text() and list((tmp_path / 'out/compare/c/gelu-s1337').glob('ckpt_*.pt'))


@pytest.mark.slow
def test_equal_time(script, tiny_data, tmp_path):
    out = script('compare.py', *TINY, f'--dataset={tiny_data}', '--name=c', '--ffns=gelu,swiglu', '--n_seeds=1', '--match=time', '--max_iters=40').out
    results = json.loads((tmp_path / 'out/compare/c/results.json').read_text())
    times = results['plan']['step_times']
    assert results['ffns']['gelu']['steps'] == 40
    assert results['ffns']['swiglu']['steps'] == round(40 * times['gelu'] / times['swiglu'])
    assert results['matched'] == (abs(results['ffns']['swiglu']['seconds'] / results['ffns']['gelu']['seconds'] - 1) <= 0.01)
    assert 'training seconds' in out and ('matched' in out.lower()) and 'A B B A' in (tmp_path / 'out/compare/c/report.md').read_text()
    timed = sorted(path.name for path in (tmp_path / 'out/compare/c/timing').glob('*/'))
    assert [name for name in timed if not name.endswith('.log')] == ['gelu-back-s1337', 'gelu-forth-s1337', 'swiglu-back-s1337', 'swiglu-forth-s1337']


@pytest.mark.slow
def test_tuned(script, tiny_data, tmp_path):
    compare(script, tiny_data, '--ffns=gelu,swiglu', '--n_seeds=1', '--tune_lr=0.1,1,10', '--learning_rate=0.02', '--max_iters=6')
    results = json.loads((tmp_path / 'out/compare/c/results.json').read_text())
    assert results['recipe'] == 'tuned'
    for ffn, grid in results['plan']['tuning'].items():
        losses = {float(multiple): loss for multiple, loss in grid.items()}
        best, ordered = min(losses, key=losses.get), sorted(losses)
        assert ordered[0] < best < ordered[-1] and results['ffns'][ffn]['learning_rate'] == pytest.approx(0.02 * best)
        run = tmp_path / f'out/compare/c/tuning/{ffn}-lr{best:g}-s1001337/summary.json'
        assert json.loads(run.read_text())['val_loss'] == losses[best]
    assert 'tuned' in (tmp_path / 'out/compare/c/report.md').read_text()


@pytest.mark.slow
def test_several_processes_per_run(script, tiny_data, tmp_path):
    """ a run over two processes gives the losses of one """
    script('compare.py', *TINY, f'--dataset={tiny_data}', '--name=c', '--ffns=gelu,swiglu', '--n_seeds=1', '--max_iters=4', '--n_gpus=2')
    run = json.loads((tmp_path / 'out/compare/c/gelu-s1337/run.json').read_text())
    assert run['machine']['world_size'] == 2 and '2 processes per run' in (tmp_path / 'out/compare/c/report.md').read_text()


# -----------------------------------------------------------------------------
# the report, on made-up losses


def fake_run(ffn, seed, loss=3.0, **changes):
    """ what read_run() returns, for a run of these settings that ended at `loss` """
    config = parse(TrainConfig, [*TINY, f'--ffn={ffn}', f'--seed={seed}', '--vocab_size=256', *(f'--{key}={value}' for key, value in changes.items())])
    rows = components(config)
    evals = [{'iter': it, 'tokens': it * 256, 'flops': it * 256.0, 'seconds': it / 10, 'val/loss': 5.5 + (loss - 5.5) * it / 20, 'val/tokens': 1024, 'ffn/hidden_rms': 0.6,
              **{f'ffn/{layer}/{name}': 0.1 for layer in range(2) for name in ('dead_frac', 'zero_frac')}} for it in (0, 5, 10, 15, 20)]
    summary = {'val_loss': loss, 'val_stderr': 0.01, 'val_bpb': 1.0, 'seconds': 2.0, 'peak_memory': 2**30, 'iter': 20}
    diverged = loss == float('inf')
    machine = {'device_name': 'x', 'world_size': 1, 'dtype': 'float32', 'compile': False, 'versions': {'torch': '2'}, 'git': None}
    return {'config': config.__dict__.copy(), 'components': rows, 'total': totals(rows), 'data': {'dataset': 'tiny', 'fingerprint': 'a'}, 'machine': machine,
            'dir': f'runs/{ffn}-{seed}', 'ffn': ffn, 'seed': seed, 'summary': {} if diverged else summary, 'status': 'diverged' if diverged else 'done',
            'evals': evals[:1] if diverged else evals, 'tokens_per_sec': 1000.0}


def report(losses, match='params', plan=None, **changes):
    runs = [fake_run(ffn, seed, loss, **changes) for ffn, row in losses.items() for seed, loss in enumerate(row)]
    results = make_results(runs, None, 0.005, {'match': match, 'command': 'python compare.py', **(plan or {})})
    return results, markdown(results, 't')


NOISE = (0.0, 0.011, -0.007, 0.004, -0.009, 0.013)


def test_headline():
    losses = {'gelu': [3.0 + e for e in NOISE], 'swiglu': [2.95 + 1.1 * e for e in NOISE], 'relu': [3.1 + 1.1 * e for e in NOISE],
              'silu': [3.0 + e + 0.0002 * (-1) ** s for s, e in enumerate(NOISE)], 'relu2': [3.0 - e for e in NOISE]}
    results, text = report(losses)
    assert {ffn: row['paired'] and row['paired']['verdict'] for ffn, row in results['ffns'].items()} == {
        'swiglu': 'better', 'gelu': None, 'silu': 'tie', 'relu2': 'not resolved', 'relu': 'worse'}
    line = headline(results)
    assert line.startswith('**swiglu -0.0') and ': better than gelu.**' in line and ': worse than gelu.**' in line and 'a tie with gelu' in line
    assert 'relu2' in line and 'not resolved from gelu.' in line and 'relu2: not resolved. 6 pairs' in text
    assert list(results['ffns'])[0] == 'swiglu'  # the best first
    assert 'only suggestive' in headline(report({ffn: row[:4] for ffn, row in losses.items()})[0])
    assert 'no inference' in headline(report({ffn: row[:2] for ffn, row in losses.items()})[0])


def test_diverged_runs_are_shown():
    results, text = report({'gelu': [3.0, 3.1, 3.2], 'relu2': [2.0, 2.1, float('inf')], 'glu': [float('inf')] * 3})
    assert results['ffns']['relu2']['diverged'] == 1 and results['ffns']['relu2']['paired']['verdict'] == 'no inference'
    assert 'Diverged: relu2 1 of 3, glu 3 of 3.' in text and '2.0500 ± 0.0707 (1 diverged)' in text


def test_matched_is_refused_above_one_percent():
    exact, text = report({'gelu': [3.0] * 3, 'swiglu': [3.0] * 3})
    assert exact['matched'] and 'Matched in parameters, exactly.' in text
    # at width 48 a SwiGLU of 128 is exact; 136 is +6.25 % of the FFN
    near = make_results([fake_run('gelu', 1), fake_run('swiglu', 1, intermediate_size=136)], None, 0.005, {'match': 'params', 'command': ''})
    assert not near['matched'] and match_line(near).startswith('**NOT matched.**') and 'Matched' not in match_line(near)
    ffn = 2 * 3 * 48 * 8 / (2 * 8 * 48**2)
    assert near['ffns']['swiglu']['mismatch']['ffn'] == pytest.approx(ffn) and f'{ffn:+.2%}'[:5] in match_line(near)
    wide, text = report({'gelu': [3.0] * 6, 'swiglu': [2.99] * 6}, match='width4d', intermediate_size=192)
    assert not wide['matched'] and '**NOT matched.** swiglu against gelu: +50% FFN parameters' in text
    assert wide['ffns']['swiglu']['paired']['verdict'] == 'not resolved'  # 0.01 is less than what the size explains


def test_runs_older_than_a_setting():
    runs = [fake_run('gelu', 1), fake_run('swiglu', 1)]
    for run in runs:
        del run['config']['loss_chunks']
    assert make_results(runs, None, 0.005, {'match': 'params', 'command': ''})['ffns']['swiglu']['width'] == 128


def test_a_run_older_than_a_setting_is_kept(trained, tmp_path):
    shutil.copytree(trained, tmp_path / 'old')
    run = json.loads((tmp_path / 'old/run.json').read_text())
    config = TrainConfig(**{**run['config'], 'out_dir': str(tmp_path / 'old')})
    del run['config']['skip_spikes']
    (tmp_path / 'old/run.json').write_text(json.dumps(run))
    assert read_state(config, run['data']['fingerprint'])['status'] == 'done'
    with pytest.raises(UserError, match='skip_spikes was False, now True'):
        read_state(replace(config, skip_spikes=True), run['data']['fingerprint'])


def test_notes():
    assert 'mid-schedule' in report({'gelu': [3.0], 'glu': [3.0]}, schedule='constant')[1]
    runs = [fake_run('gelu', 1), fake_run('glu', 1)]
    runs[1]['evals'][0]['ffn/hidden_rms'] = 0.1
    results = make_results(runs, None, 0.005, {'match': 'params', 'command': ''})
    assert 'differ by a factor of 6.0' in markdown(results, 't')
    runs[1]['machine'] = {**runs[1]['machine'], 'device_name': 'y'}
    assert 'not all of one kind of machine' in markdown(make_results(runs, None, 0.005, {'match': 'params', 'command': ''}), 't')
    tuned = report({'gelu': [3.0], 'glu': [3.0]}, plan={'tuning': {'gelu': {'0.5': 3.2, '1': 3.0, '2': None}, 'glu': {'0.5': 3.0, '1': 2.9, '2': 3.1}}})[1]
    assert '| gelu | 3.2000 | 3.0000* | diverged |' in tuned and 'tuned' in tuned
    with pytest.raises(UserError, match='nothing to report'):
        make_results([fake_run('gelu', 1) | {'status': 'unfinished'}], None, 0.005, {'match': 'params', 'command': ''})


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


# -----------------------------------------------------------------------------
# time


def test_groups_are_those_of_the_components():
    rows = components(GPTConfig())
    assert {group_of(row['name']) for row in rows} == set(GROUPS)
    assert group_of('attention.scores') == 'attention' and group_of('ffn.gate') == 'ffn' and group_of('embedding') == 'rest'


def test_time_shares():
    """ parts add up to the whole, and a wider FFN takes a larger share """
    narrow, wide = (GPTConfig(n_layer=2, n_embd=96, ffn='gelu', intermediate_size=width) for width in (64, 4096))
    shares = time_shares({'narrow': narrow, 'wide': wide}, torch.device('cpu'), torch.float32, 4)
    for row in shares.values():
        assert sum(times['share'] for times in row.values()) == pytest.approx(1)
        assert all(times[phase] > 0 for times in row.values() for phase in ('forward', 'backward'))
    assert shares['wide']['ffn']['share'] > 0.6 > shares['narrow']['ffn']['share']
