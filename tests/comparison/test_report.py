import copy

import pytest
from conftest import TINY

from comparison.report import check_equal, headline, make_results, markdown, match_line
from configurator import UserError, parse
from train import TrainConfig
from training.accounting import components, totals


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


def test_how_it_was_made_names_every_machine():
    runs = [fake_run('gelu', 1), fake_run('glu', 1)]
    for run in runs:
        run['machine'] = {**run['machine'], 'device': 'cpu', 'threads': 2}
    runs[1]['earlier_machines'] = [{**runs[1]['machine'], 'threads': 1, 'device_name': 'old'}]
    text = markdown(make_results(runs, None, 0.005, {'match': 'params', 'command': ''}), 't')
    assert 'x, 1 process per run, 2 threads, float32, eager' in text and 'old, 1 process per run, 1 thread, float32' in text and 'not all of one kind of machine' in text
    runs[1]['earlier_machines'][0]['dtype'] = 'bfloat16'
    with pytest.raises(UserError, match="dtype is 'float32' and 'bfloat16, then float32'"):
        check_equal(runs, set())


def test_a_stretched_run_is_not_a_straight_one():
    runs = [fake_run('gelu', 1), fake_run('glu', 1)]
    runs[1]['schedule'] = [[0, 20]]
    check_equal(runs, set())
    runs[1]['schedule'] = [[0, 10], [10, 20]]
    with pytest.raises(UserError, match='stretched schedule is None and'):
        check_equal(runs, set())


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
