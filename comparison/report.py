"""
From the directories of finished runs to the report: results.json (all of it), report.md, plots, and a run in wandb.
"""

import collections
import math
import os
import shutil
import statistics

from comparison.plots import HEALTH, PLOTS, draw_all
from comparison.stats import FIRM_SEEDS, MIN_SEEDS, judge, mismatch_loss, welch
from comparison.timeshare import GROUPS, group_of
from configurator import UserError, one_line, say
from files import read_json, replacing, write_json
from model import FFNS, config_from
from training.rundir import MAY_CHANGE
from training.tracking import duration, read_metrics, start_wandb, stop_wandb, wandb_dir

MATCHED, NOTABLE = 0.01, 0.0025  # mismatch above which nothing is called matched, and above which it is pointed out
# settings that may change when a run is continued, but not between the runs of a comparison
UNCOMPARABLE = {'max_iters', 'eval_tokens', 'target_loss'}
IGNORED = MAY_CHANGE - UNCOMPARABLE


# -----------------------------------------------------------------------------
# reading


def read_run(out_dir):
    """ what a run directory says about its run; UserError when it is none """
    run = read_json(os.path.join(out_dir, 'run.json'))
    if not run:
        raise UserError(f"{out_dir} is not a run directory: it has no run.json")
    records, summary = read_metrics(os.path.join(out_dir, 'metrics.jsonl')), read_json(os.path.join(out_dir, 'summary.json'))
    diverged = bool(records and records[-1].get('diverged'))
    speeds = [record['tokens_per_sec'] for record in records if 'tokens_per_sec' in record]
    return {**run, 'dir': out_dir, 'ffn': run['config']['ffn'], 'seed': run['config']['seed'], 'summary': summary,
            'status': 'done' if summary else 'diverged' if diverged else 'unfinished',
            'evals': [record for record in records if 'val/loss' in record],
            'tokens_per_sec': statistics.median(speeds) if speeds else None}


def machines_of(run):
    """ all that it was trained on, in turn """
    return [*run.get('earlier_machines', []), run['machine']]


def check_equal(runs, may_differ):
    """ raise UserError, naming two runs and the setting, unless all differ in nothing but may_differ and what cannot change a loss """
    def settings(run, but):
        schedule = run.get('schedule', [])
        out = {**run['config'], 'stretched schedule': schedule if len(schedule) > 1 else None,
               'data fingerprint': run['data']['fingerprint'], 'dtype': ', then '.join(dict.fromkeys(m['dtype'] for m in machines_of(run)))}
        return {key: value for key, value in out.items() if key not in IGNORED | but}

    def same(a, b, but, why):
        a_settings, b_settings = settings(a, but), settings(b, but)
        different = [f"{key} is {a_settings.get(key)!r} and {b_settings.get(key)!r}" for key in sorted(a_settings | b_settings)
                     if a_settings.get(key) != b_settings.get(key)]
        if different:
            raise UserError(f"{a['dir']} and {b['dir']} cannot be compared{why}: {', '.join(different)}")

    first = {}
    for run in runs:
        same(runs[0], run, may_differ | {'ffn', 'intermediate_size', 'multiple_of', 'seed'}, "")
        twin = first.setdefault(run['ffn'], run)
        same(twin, run, {'seed'}, f", though both are {run['ffn']}")
        if (other := first.setdefault((run['ffn'], run['seed']), run)) is not run:
            raise UserError(f"{other['dir']} and {run['dir']} are both {run['ffn']} with seed {run['seed']}")


# -----------------------------------------------------------------------------
# numbers


def mean(values):
    values = [value for value in values if value is not None]
    return statistics.fmean(values) if values else None


def grouped(rows, key):
    """ {group: share} of the rows of model.components() """
    out = dict.fromkeys(GROUPS, 0.0)
    for row in rows:
        out[group_of(row['name'])] += row[key]
    return out


def describe_ffn(runs):
    """ what the runs of one FFN have in common, and their results seed by seed """
    rows, config, done = runs[0]['components'], runs[0]['config'], [run for run in runs if run['status'] == 'done']
    losses = {run['seed']: run['summary']['val_loss'] if run['status'] == 'done' else math.inf for run in runs}
    finite = [loss for loss in losses.values() if math.isfinite(loss)]

    at = {run['seed']: {record['iter']: record for record in run['evals']} for run in done}
    iters = sorted(set.intersection(*map(set, at.values()))) if at else []
    curves = {'iter': iters, 'losses': {seed: [records[it]['val/loss'] for it in iters] for seed, records in at.items()},
              **{key: [mean(records[it][key] for records in at.values()) for it in iters] for key in ('tokens', 'flops', 'seconds')}}
    last = [run['evals'][-1] for run in done]
    health = {name: [mean(record[f'ffn/{layer}/{name}'] for record in last) for layer in range(config['n_layer'])]
              for name in HEALTH if last and f'ffn/0/{name}' in last[0]}

    def params(prefixes):
        return sum(row['params'] for row in rows if row['name'].startswith(prefixes))

    return {
        'width': config_from(config).hidden_width, 'gated': FFNS[config['ffn']][1],
        'params': runs[0]['total']['params'], 'ffn_params': params('ffn.'), 'non_embedding': params(('attention.', 'ffn.', 'norm')),
        'flops': runs[0]['total']['flops'], 'train_flops': runs[0]['total']['train_flops'], 'components': rows,
        'steps': config['max_iters'], 'learning_rate': config['learning_rate'],
        'losses': losses, 'diverged': len(runs) - len(done),
        'mean': mean(finite), 'sd': statistics.stdev(finite) if len(finite) > 1 else None,
        'last_three': {run['seed']: mean(record['val/loss'] for record in run['evals'][-3:]) for run in done},
        'val_stderr': mean(run['summary']['val_stderr'] for run in done), 'val_bpb': mean(run['summary']['val_bpb'] for run in done),
        'tokens_per_sec': mean(run['tokens_per_sec'] for run in runs), 'seconds': mean(run['summary']['seconds'] for run in done),
        'peak_memory': mean(run['summary']['peak_memory'] for run in done),
        'initial_hidden_rms': mean(run['evals'][0]['ffn/hidden_rms'] if run['evals'] else None for run in runs),
        'curves': curves, 'health': health, 'profile': None,
        'shares': {'parameters': grouped(rows, 'param_share'), 'FLOPs': grouped(rows, 'flop_share')},
    }


def mismatch(row, base, match):
    """
    By what fraction an FFN's model is larger than the baseline's: in 'ffn', 'non_embedding' and 'total' parameters, 'flops' per token
    and training 'seconds'; 'excess' is the one that was to be equal, 'loss' what it is worth in nats.
    """
    out = {name: row[key] / base[key] - 1 if row[key] and base[key] else 0.0 for name, key in (
        ('ffn', 'ffn_params'), ('non_embedding', 'non_embedding'), ('total', 'params'), ('flops', 'flops'), ('seconds', 'seconds'))}
    kind = match if match in ('flops', 'time') else 'params'
    out['excess'] = out[{'params': 'non_embedding', 'flops': 'flops', 'time': 'seconds'}[kind]]
    out['loss'] = mismatch_loss(base['mean'] or 0.0, out['excess'], kind)
    return out


def make_results(runs, baseline, margin, plan, missing=()):
    """
    Everything that the report says, as plain data. runs: of read_run(). plan: how they came about, with 'match', 'command' and, where
    it applies, 'jobs', 'step_times', 'tuning'. missing: directories without a run. Raises UserError when the runs are not equal.
    """
    finished = [run for run in runs if run['status'] != 'unfinished']
    if not finished:
        raise UserError("no run is finished yet: there is nothing to report")
    check_equal(finished, ({'max_iters', 'warmup_iters', 'lr_decay_iters'} if plan['match'] == 'time' else set())
                | ({'learning_rate', 'min_lr'} if plan.get('tuning') else set()))
    by_ffn = {}
    for run in finished:
        by_ffn.setdefault(run['ffn'], []).append(run)
    baseline = baseline or ('gelu' if 'gelu' in by_ffn else next(iter(by_ffn)))
    if baseline not in by_ffn:
        raise UserError(f"baseline = {baseline!r}: no finished run has it; there is {', '.join(by_ffn)}")
    ffns = {ffn: describe_ffn(by_ffn[ffn]) for ffn in by_ffn}
    for row in ffns.values():
        row['mismatch'] = mismatch(row, ffns[baseline], plan['match'])
    judged = judge({ffn: row['losses'] for ffn, row in ffns.items()}, baseline, margin,
                   {ffn: row['mismatch']['loss'] for ffn, row in ffns.items()})
    finite_losses = {ffn: [loss for loss in row['losses'].values() if math.isfinite(loss)] for ffn, row in ffns.items()}
    for ffn, row in ffns.items():
        row['paired'] = judged.get(ffn) and judged[ffn] | {'p_welch': welch(finite_losses[ffn], finite_losses[baseline])}
    machines = {describe_machine(machine): machine for run in finished for machine in machines_of(run)}
    return {
        'plan': plan, 'baseline': baseline, 'margin': margin, 'recipe': 'tuned' if plan.get('tuning') else 'fixed recipe',
        'matched': all(abs(row['mismatch']['excess']) <= MATCHED for row in ffns.values()),
        'ffns': dict(sorted(ffns.items(), key=lambda item: math.inf if item[1]['mean'] is None else item[1]['mean'])),
        'seeds': sorted({run['seed'] for run in finished}),
        'unfinished': [*(run['dir'] for run in runs if run['status'] == 'unfinished'), *missing],
        'config': finished[0]['config'], 'data': finished[0]['data'], 'machines': list(machines.values()),
        'given_up': dict(collections.Counter(what for run in finished if (what := run['summary'].get('given_up')))),
        'val_tokens': next((run['evals'][-1]['val/tokens'] for run in finished if run['evals']), 0), 'profiled': None,
    }


def add_profile(results, profile):
    """ the measured times of compare.profile() beside the other shares, where there are any """
    if profile:
        results['profiled'] = {key: profile[key] for key in ('device_name', 'dtype', 'batch_size', 'threads')}
        for ffn, row in results['ffns'].items():
            row['profile'] = profile['ffns'][ffn]
            row['shares']['time'] = {group: times['share'] for group, times in row['profile'].items()}


# -----------------------------------------------------------------------------
# words


def signed(value):
    return 'n/a' if value is None else f'{value:+.4f}'


def number(value, digits=4):
    return '' if value is None else f'{value:,.{digits}f}'


def p_value(p):
    return '<0.0001' if p is not None and p < 1e-4 else number(p)


def percent(value):
    return '0' if value == 0 else f'{100 * value:+.3g}%'


def change(pair):
    """ a paired difference with its interval """
    return signed(pair['mean']) + (f" [{signed(pair['low'])}, {signed(pair['high'])}]" if pair['low'] is not None else '')


def md_table(rows):
    """ rows of texts, the first the header -> a markdown table whose columns line up in a terminal too, numbers to the right """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [[cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))] for row in rows]
    lines.insert(1, ['-' * (w - 1) + (':' if i else '-') for i, w in enumerate(widths)])
    return '\n'.join(f"| {' | '.join(line)} |" for line in lines)


def headline(results):
    """ a sentence for each verdict: who won, by how much, and what is not known """
    base, said = results['baseline'], []
    pairs = {ffn: row['paired'] for ffn, row in results['ffns'].items() if row['paired']}
    firm = {'better': f"better than {base}", 'worse': f"worse than {base}", 'tie': f"a tie with {base} (within {results['margin']:g} nats)"}
    weak = {f'suggestive: {word}': f"{phrase}, but fewer than {FIRM_SEEDS} seeds are only suggestive" for word, phrase in firm.items()}
    weak |= {'not resolved': f"not resolved from {base}", 'no inference': f"no inference from fewer than {MIN_SEEDS} pairs of seeds"}
    for word, phrase in (firm | weak).items():
        if found := [f"{ffn} {change(pair)}" for ffn, pair in pairs.items() if pair['verdict'] == word]:
            sentence = f"{', '.join(found)}: {phrase}."
            said.append(f'**{sentence}**' if word in firm else sentence)
    if diverged := [f"{ffn} {row['diverged']} of {len(row['losses'])}" for ffn, row in results['ffns'].items() if row['diverged']]:
        said.append(f"Diverged: {', '.join(diverged)}.")
    return ' '.join(said) or f"Only {base} has finished runs: there is nothing to compare it with."


def match_line(results):
    """ what was made equal, and how nearly; the word 'matched' only where it holds """
    base, match, ffns = results['baseline'], results['plan']['match'], results['ffns']
    what = {'flops': "FLOPs per token", 'time': "training seconds"}.get(match, "parameters")
    worst = max(ffns, key=lambda ffn: abs(ffns[ffn]['mismatch']['excess']))
    m = ffns[worst]['mismatch']
    worth = f"by Kaplan's scaling law that alone is worth {abs(m['loss']):.4f} nats"
    if not results['matched']:
        return (f"**NOT matched.** {worst} against {base}: {percent(m['ffn'])} FFN parameters, {percent(m['non_embedding'])} "
                f"non-embedding parameters, {percent(m['total'])} parameters in all, {percent(m['flops'])} FLOPs per token, "
                f"{percent(m['seconds'])} training seconds. In {what} {worth}, and no difference up to that counts as better or worse.")
    if m['excess'] == 0:
        return f"Matched in {what}, exactly."
    of = " of the non-embedding ones" if what == 'parameters' else ""
    return (f"Matched in {what}, up to {percent(m['excess'])}{of} ({worst}); {worth}."
            + (f" That is above {NOTABLE:.2%}, so keep it in mind." if abs(m['excess']) > NOTABLE else ""))


def summary_table(results, brief=False):
    base, rows = results['baseline'], []
    for ffn, row in results['ffns'].items():
        pair, ratio = row['paired'], '1'
        loss = number(row['mean']) + (f" ± {row['sd']:.4f}" if row['sd'] is not None else '')
        if pair:
            ratio = 'n/a' if pair['mean'] is None else f"{math.exp(pair['mean']):.4f}"
        cells = {'FFN': ffn, 'width': f"{row['width']:,}", 'parameters': f"{row['params']:,}", 'FLOPs/token': f"{row['flops']:,}",
                 'val loss': loss + (f" ({row['diverged']} diverged)" if row['diverged'] else ''),
                 f'Δ to {base} [95 %]': change(pair) if pair else 'baseline', 'perplexity ratio': ratio,
                 'tokens/s': number(row['tokens_per_sec'], 0), 'training s': number(row['seconds'], 0),
                 'verdict': pair['verdict'] if pair else ''}
        if brief:
            cells = {key: cells[key] for key in ('FFN', 'val loss', f'Δ to {base} [95 %]', 'verdict')}
        rows.append(cells)
    return md_table([list(rows[0]), *(list(cells.values()) for cells in rows)])


def describe_equal(results):
    config, data, ffns = results['config'], results['data'], results['ffns']
    rates = ', '.join(sorted({f"{row['learning_rate']:g}" for row in ffns.values()}))
    steps = f"Steps: {config['max_iters']:,}"
    if results['plan']['match'] == 'time':
        steps = "Training seconds, in steps: " + ', '.join(f"{ffn} {row['steps']:,}" for ffn, row in ffns.items())
    drop_in = " for every FFN: how well each does as a drop-in, not at its best (for that, --tune_lr=0.5,1,2)"
    lines = [
        f"- Data: {data['dataset']}, fingerprint {data['fingerprint']}; with the same seed the same batches in the same order.",
        f"- Initial values of all tensors that FFNs share, to the last bit (init = {config['init']}, zero_init = {config['zero_init']}).",
        f"- {steps}, of {config['batch_size'] * config['block_size']:,} tokens each.",
        f"- {config['optimizer']}, {config['schedule']} schedule, weight decay {config['weight_decay']:g}, dropout {config['dropout']:g}.",
        f"- Learning rate: {results['recipe']}, {rates}{drop_in if results['recipe'] == 'fixed recipe' else ''}.",
        f"- Shape: {config['n_layer']} layers, width {config['n_embd']}, {config['n_head']} heads, context {config['block_size']}, "
        f"vocabulary {config['vocab_size']:,}.",
    ]
    if config['schedule'] == 'constant' or config['lr_decay_iters'] > config['max_iters']:
        lines.append("- The learning rate had not come to its end at the last step: losses read in mid-schedule can rank otherwise.")
    if data['dataset'] == 'stdlib':
        lines.append("- The text is the Python standard library of this machine: compare losses only where the fingerprint is the same.")
    return ['\n'.join(lines)]


def describe_mismatch(results):
    keys = {'FFN parameters': 'ffn', 'non-embedding': 'non_embedding', 'all parameters': 'total', 'FLOPs/token': 'flops',
            'training s': 'seconds'}
    rows = [[ffn, f"{row['width']:,}", *(percent(row['mismatch'][key]) for key in keys.values()), f"{row['mismatch']['loss']:.5f}"]
            for ffn, row in results['ffns'].items()]
    return [md_table([['FFN', 'width', *keys, 'worth, nats'], *rows]),
            f"Against {results['baseline']}. Worth: what a mismatch in what was to be equal gains by itself, by Kaplan's exponents "
            "(0.076 for non-embedding parameters, 0.050 for compute). In dense FFNs without biases equal parameters are equal FLOPs."]


def describe_open(results):
    lines = []
    for ffn, row in results['ffns'].items():
        pair = row['paired']
        if pair and pair['verdict'] not in ('better', 'worse', 'tie'):
            line = f"- {ffn}: {pair['verdict']}."
            if pair['sd'] is not None:
                seeds = f"{pair['seeds_needed']} seeds" if pair['seeds_needed'] else "more than 1,000 seeds"
                line += (f" {pair['n']} pairs with an sd of {pair['sd']:.4f} find a true difference of {pair['detectable']:.4f} nats in "
                         f"80 % of studies; one of {results['margin']:g} takes {seeds}.")
            lines.append(line)
    return ['\n'.join(lines) or "Nothing: every FFN is better, worse or a tie."]


def describe_runs(results):
    rows = []
    for ffn, row in results['ffns'].items():
        losses = ['' if seed not in row['losses'] else number(row['losses'][seed]) if math.isfinite(row['losses'][seed]) else 'diverged'
                  for seed in results['seeds']]
        pair = row['paired'] or {}
        rows.append([ffn, *losses, number(row['sd']), number(pair.get('sd')), number(pair.get('rho'), 2),
                     *(p_value(pair.get(key)) for key in ('p', 'p_welch', 'p_holm', 'p_tie'))])
    stderr = mean(row['val_stderr'] for row in results['ffns'].values())
    return [md_table([['FFN', *(f's{seed}' for seed in results['seeds']), 'sd', 'sd of Δ', 'ρ', 'p', 'p Welch', 'p Holm', 'p tie'], *rows]),
            f"ρ: correlation with {results['baseline']} over the seeds. p: of no difference, paired, and by Welch's unpaired test; p tie: "
            f"of a difference of {results['margin']:g} or more (Holm-corrected)."
            + (f" The standard error of a loss over the validation windows is {stderr:.4f}; the windows are the same for all, so most of "
               "it is not in Δ." if stderr else "")]


def describe_shares(results):
    rows, profiled = [], results['profiled']
    for row in results['ffns'].values():
        times = row['profile'] and [row['profile']['ffn']['forward'], row['profile']['ffn']['backward'],
                                    sum(times['forward'] + times['backward'] for times in row['profile'].values())]
        rows.append([*(f"{row['shares'][kind]['ffn']:.1%}" if kind in row['shares'] else 'n/a' for kind in ('parameters', 'FLOPs', 'time')),
                     *(f'{1000 * seconds:.2f}' for seconds in times or ()),
                     f"{row['peak_memory'] / 2**30:.2f}" if row['peak_memory'] else 'n/a'])
    header = ['FFN', 'of parameters', 'of FLOPs', 'of time', *(['FFN forward ms', 'FFN backward ms', 'whole step ms'] if profiled else []),
              'peak memory of a run, GiB']
    where = "Time was not measured: the comparison was still running, or its runs were made on another machine."
    if profiled:
        threads = f", {profiled['threads']} thread{'s' if profiled['threads'] > 1 else ''}" if profiled['threads'] else ""
        tokens = f"{profiled['batch_size']} x {results['config']['block_size']} tokens"
        where = ("Time: an eager profile of the model's forward and backward pass, off the timed runs "
                 f"({profiled['device_name']}{threads}, {profiled['dtype']}, {tokens}). The optimizer, the data and torch.compile are "
                 "not in it. Rest: embedding, residual additions, loss.")
    return ["The FFN's share:", md_table([header, *([ffn, *row] for ffn, row in zip(results['ffns'], rows, strict=True))]), where,
            "![shares of parameters, FLOPs and time](shares.png)"]


def describe_hidden(results):
    rms = {ffn: row['initial_hidden_rms'] for ffn, row in results['ffns'].items() if row['initial_hidden_rms'] is not None}
    lines = []
    if rms:
        lines.append("RMS of the hidden layer before training: " + ', '.join(f'{ffn} {value:.3f}' for ffn, value in rms.items()) + '.')
        ratio = max(rms.values()) / min(rms.values()) if min(rms.values()) else math.inf
        if ratio > 2:
            init = results['config']['init']
            lines.append(f"**These differ by a factor of {ratio:.1f}: part of the result may be the initial scale (init = {init}), not the "
                         "FFN.**" + (" Compare with --init=fan_in." if init == 'gpt2' else ""))
    return [*lines, "![dead units, zeros, gates](health.png)"]


def describe_machine(m):
    threads = f"{m['threads']} thread{'s' if m['threads'] > 1 else ''}, " if m.get('device') == 'cpu' and m.get('threads') else ""
    return (f"{m['device_name']}, {m['world_size']} process{'es' if m['world_size'] > 1 else ''} per run, {threads}{m['dtype']}, "
            f"{'compiled' if m['compile'] else 'eager'}, torch {m['versions']['torch']}, commit {(m['git'] or 'unknown')[:12]}.")


def describe_making(results):
    plan = results['plan']
    lines = [f"    {plan['command']}"]
    lines += map(describe_machine, results['machines'])
    for what, n in results['given_up'].items():
        lines.append(f"In {n} of the runs training went on without {what}: do not compare their speed with the others'.")
    if len({m['device_name'] for m in results['machines']}) > 1:
        lines.append("The runs are not all of one kind of machine: do not compare their tokens/s and seconds.")
    if plan.get('jobs', 1) > 1:
        lines.append(f"{plan['jobs']} runs at a time shared the machine: tokens/s and seconds are those of a share of it.")
    if plan.get('step_times'):
        times = ', '.join(f'{ffn} {1000 * seconds:.1f} ms' for ffn, seconds in plan['step_times'].items())
        lines.append(f"Time per step, measured in turn (A B B A): {times}. Steps and schedule were set so that each trains for the seconds "
                     "that the baseline takes.")
    if plan.get('tuning'):
        multiples = sorted({float(multiple) for grid in plan['tuning'].values() for multiple in grid})
        rows = [[ffn, *tuning_cells(grid, multiples)] for ffn, grid in plan['tuning'].items()]
        lines += ["Multiples of the given learning rate, with the mean loss over seeds that are not in the report; the best (*) is inside:",
                  md_table([['FFN', *(f'{m:g}x' for m in multiples)], *rows])]
    seconds = sum((row['seconds'] or 0) * (len(row['losses']) - row['diverged']) for row in results['ffns'].values())
    return [*lines, f"The runs trained for {duration(seconds)} in all. Everything above is in results.json."]


def tuning_cells(grid, multiples):
    """ grid: {multiple as text: loss, None where it diverged} -> a cell for each of the multiples, the best one marked """
    losses = {float(key): math.inf if loss is None else loss for key, loss in grid.items()}
    best = min(losses, key=losses.get)
    return ['' if m not in losses else 'diverged' if math.isinf(losses[m]) else f"{losses[m]:.4f}{'*' if m == best else ''}"
            for m in multiples]


def markdown(results, title):
    others = len(results['ffns']) - 1
    parts = [f"# {title}: {', '.join(results['ffns'])}", headline(results), match_line(results), summary_table(results),
             f"Validation loss in nats per token over {results['val_tokens']:,} tokens, the same for all, after the last step: mean ± "
             "sd over the seeds. Δ: paired by seed, negative is better; a 95 % t-interval, each for itself. Perplexity ratio: exp(Δ). "
             f"Verdict: Holm-corrected over {others} comparison{'s' if others != 1 else ''}; a tie is surely within {results['margin']:g} "
             "nats. FLOPs/token: forward, matrix products, full attention.",
             "![loss against tokens](loss_vs_tokens.png)"]
    if results['unfinished']:
        parts.insert(1, f"**Incomplete.** Not finished, and left out: {', '.join(results['unfinished'])}.")
    sections = {"What was equal": describe_equal, "Mismatch": describe_mismatch, "What could not be resolved": describe_open,
                "Every run": describe_runs, "Where parameters, FLOPs and time go": describe_shares, "The hidden layer": describe_hidden,
                "How it was made": describe_making}
    for heading, describe in sections.items():
        parts += [f'## {heading}', *describe(results)]
    return '\n\n'.join(parts) + '\n'


# -----------------------------------------------------------------------------
# writing


def write_report(folder, results):
    """ the plots, results.json and report.md, the last one last """
    draw_all(results, folder)
    write_json(os.path.join(folder, 'results.json'), finite(results))
    with replacing(os.path.join(folder, 'report.md')) as file:
        file.write(markdown(results, os.path.basename(folder)).encode(errors='backslashreplace'))


def finite(value):
    """ the same with None for what JSON has no number for: the loss of a run that diverged """
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def log_to_wandb(folder, results, config):
    """ one more run in the group of the runs: tables, plots, verdicts, the report itself. Whatever fails there costs a warning. """
    run = start_wandb(config, say, name='report', group=os.path.basename(folder), job_type='report',
                      dir=wandb_dir(folder),
                      config={**results['config'], 'match': results['plan']['match'], 'baseline': results['baseline']})
    if not run:
        return
    try:
        import wandb
        columns = ('width', 'params', 'flops', 'mean', 'sd', 'tokens_per_sec', 'seconds')
        pairs = ('mean', 'low', 'high', 'p_holm', 'verdict')
        ffns = finite(results['ffns'])
        data = [[ffn, *(row[key] for key in columns), *((row['paired'] or {}).get(key) for key in pairs)] for ffn, row in ffns.items()]
        losses = [[ffn, seed, loss] for ffn, row in ffns.items() for seed, loss in row['losses'].items()]
        shares = [[ffn, of, group, share] for ffn, row in ffns.items() for of, groups in row['shares'].items()
                  for group, share in groups.items()]
        run.log({'report/table': wandb.Table(columns=['ffn', *columns, *(f'delta_{key}' for key in pairs)], data=data),
                 'report/losses': wandb.Table(columns=['ffn', 'seed', 'val_loss'], data=losses),
                 'report/components': wandb.Table(columns=['ffn', 'of', 'component', 'share'], data=shares),
                 **{f"report/{name.removesuffix('.png')}": wandb.Image(os.path.join(folder, name)) for name in PLOTS}})
        run.summary.update({'report/headline': headline(results).replace('**', ''), 'report/match': match_line(results).replace('**', ''),
                            **{f'report/verdict/{ffn}': row['paired']['verdict'] for ffn, row in ffns.items() if row['paired']}})
        for name in ('report.md', 'results.json'):
            run.save(shutil.copy(os.path.join(folder, name), run.dir), base_path=run.dir, policy='now')  # it warns of what is elsewhere
        run.finish()
    except Exception as e:
        say(f"warning: wandb failed ({one_line(e)}); {folder} has everything")
        stop_wandb()
