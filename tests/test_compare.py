import json
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import PATIENCE, ROOT, TINY, environment, popen, run_script, wait_until
from scipy.stats import ttest_rel

from bench import step_times
from compare import CompareConfig, implied, make_variants, tune
from comparison.plots import PLOTS
from comparison.timeshare import GROUPS
from configurator import UserError, parse
from data.writer import write_dataset
from model import FFNS
from train import TrainConfig
from training.accounting import components, totals

FILES = ('report.md', 'results.json', *PLOTS)


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


def settings_of(*argv):
    return parse(CompareConfig, [arg if arg.startswith('-') else str(ROOT / 'config' / arg) for arg in argv], implied)


def test_files_that_name_ffns():
    """ config/geglu.py means the same here as in train.py """
    assert settings_of('geglu.py', 'relu2.py').ffn_names == ['geglu', 'relu2'] == settings_of('--ffn=geglu', '--ffn=relu2').ffn_names
    assert settings_of('geglu.py', '--ffn=relu', 'geglu.py').ffn_names == ['geglu', 'relu'] and settings_of().ffn_names == ['relu', 'gelu', 'swiglu']
    assert settings_of('gpt2_124m.py', '--ffns=gelu,swiglu').ffn_names == ['gelu', 'swiglu']  # a scale that names one
    for argv in (['geglu.py'], ['--ffn=gelu'], ['gpt2_124m.py']):
        with pytest.raises(UserError, match='alone is no comparison; name at least two FFNs, as in --ffns='):
            settings_of(*argv)


@pytest.mark.parametrize('argv, idle', [
    (['--runs=a,b', '--n_layer=2'], 'n_layer'), (['--report_only', '--n_seeds=5', '--jobs=2'], 'jobs, n_seeds'), (['--report_only', 'geglu.py'], 'ffn'), (['--runs=a', '--ffns=gelu,relu'], 'ffns')])
def test_settings_that_have_no_effect_on_a_report(argv, idle):
    with pytest.raises(UserError, match=f'^{idle}: no effect with --'):
        settings_of(*argv)


def test_other_settings_that_have_no_effect():
    for argv, key in ((['--tune_seeds=2'], 'tune_seeds'), (['--match=width4d', '--width_multiple=8'], 'width_multiple')):
        with pytest.raises(UserError, match=f'{key} = .: must be left out'):
            parse(CompareConfig, argv)


def test_a_loss_of_zero_is_a_loss(script, tmp_path):
    """ of a text that is all the same, which the runs learn to the last digit: they are not stopped, and not failed """
    text = b'y\n' * 20_000
    ids = np.frombuffer(text, np.uint8)
    write_dataset(tmp_path / 'yes', {'train': [(ids, len(ids))], 'val': [(ids[:5000], 5000)]}, {'name': 'byte'}, 256, {'text': 'yes'})
    out = script('compare.py', *TINY, '--dataset=./yes', '--name=c', '--ffns=gelu,swiglu', '--n_seeds=1', '--max_iters=60', '--learning_rate=0.1', '--jobs=2', '--schedule=constant').out
    results = json.loads((tmp_path / 'out/compare/c/results.json').read_text())
    assert min(min(losses) for row in results['ffns'].values() for losses in row['curves']['losses'].values()) < 1e-6, results['ffns']['gelu']['curves']
    assert results['unfinished'] == [] and 'failed' not in out and '2 done' in out


@pytest.mark.parametrize('ffn', FFNS)
def test_runs_differ_in_nothing_else(ffn):
    variants = make_variants(CompareConfig(ffns='all'), 256)
    differences = {key for key in TrainConfig.__dataclass_fields__ if getattr(variants[ffn], key) != getattr(variants['gelu'], key)}
    assert differences <= {'ffn', 'intermediate_size'}
    assert totals(components(variants[ffn]))['params'] - totals(components(variants['gelu']))['params'] == (4 if ffn == 'swish' else 0)


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
        process = popen(argv, cwd=tmp_path, env=env, stdout=out, stderr=out)
    wait_until(lambda: len(list(folder.glob('*/summary.json'))) >= 2, process)
    process.kill()
    process.wait()
    finished = {path: path.stat().st_mtime_ns for path in folder.glob('*/summary.json')}
    assert 2 <= len(finished) < 6
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=PATIENCE)
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
    assert json.loads((folder / 'results.json').read_text())['plan'] == new['plan']  # a refused command leaves no trace


def _script_in(folder):
    return lambda *args, **options: run_script(*args, tmp_path=folder, **options)


def check_wandb_has_the_report(compared):
    folder, _ = compared
    [run] = [path for path in folder.glob('wandb/offline-run-*/run-*.wandb')]

    def inspect(*flags):
        return subprocess.run([sys.executable, '-m', 'wandb', 'leet', 'inspect', '--json', *flags, str(run)], capture_output=True, text=True,
                              env=environment(folder.parents[2]), check=True, timeout=PATIENCE).stdout

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
    check_wandb_has_the_report(compared)
    check_again_and_report_only(compared, tiny_data, tmp_path)
    check_runs_by_hand(compared, trained, tmp_path, script)


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
    process = popen(argv, cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    log = tmp_path / 'out/compare/c/gelu-s1337.log'
    wait_until(lambda: log.exists() and 'iter 3/' in log.read_text(), process)
    # one comparison at a time in a folder
    second = subprocess.run(argv, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=PATIENCE)
    assert second.returncode == 2 and 'in use by another run' in second.stderr
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate()
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
    # again, with one more: the times by which runs were stretched stay as they are
    script('compare.py', *TINY, f'--dataset={tiny_data}', '--name=c', '--ffns=gelu,swiglu,relu', '--n_seeds=1', '--match=time', '--max_iters=40')
    again = json.loads((tmp_path / 'out/compare/c/results.json').read_text())['plan']['step_times']
    assert again.keys() == {'gelu', 'swiglu', 'relu'} and {ffn: again[ffn] for ffn in times} == times


@pytest.mark.slow
def test_steps_are_timed_on_several_processes():
    variants = {ffn: parse(TrainConfig, [*TINY, '--vocab_size=64', f'--ffn={ffn}']) for ffn in ('gelu', 'swiglu')}
    times = step_times(variants, n_processes=2)
    assert times.keys() == variants.keys() and all(0 < seconds < 1 for seconds in times.values())


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
