"""
The pictures of a report. FFNs are told apart by line style and marker as well as by colour (Okabe and Ito's palette, which
colour-blind people can read), components by hatching.
"""

import os
import statistics

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from comparison.stats import MIN_SEEDS, paired
from comparison.timeshare import GROUPS
from model import FFNS

COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#000000', '#E69F00', '#56B4E9')
STYLES = ('-', '--', '-.', ':', (0, (5, 1, 1, 1, 1, 1)))
MARKERS = 'os^Dv<>PX*hd'
GROUP_LOOK = {'attention': (COLOURS[0], ''), 'ffn': (COLOURS[1], '//'), 'norm': (COLOURS[2], 'xx'), 'lm_head': (COLOURS[3], '..'),
              'rest': ('0.8', '--')}
HEALTH = {'dead_frac': "dead units", 'zero_frac': "exact zeros", 'gate_closed': "gate closed (< 0.05)", 'gate_open': "gate open (> 0.95)"}
PLOTS = ('loss_vs_tokens.png', 'loss_vs_flops.png', 'loss_vs_seconds.png', 'shares.png', 'health.png')


def draw_all(results, folder):
    plot_loss_vs_tokens(results, os.path.join(folder, 'loss_vs_tokens.png'))
    plot_loss(results, 'flops', "training FLOPs", os.path.join(folder, 'loss_vs_flops.png'))
    plot_loss(results, 'seconds', "training time (s)", os.path.join(folder, 'loss_vs_seconds.png'))
    plot_shares(results, os.path.join(folder, 'shares.png'))
    plot_health(results, os.path.join(folder, 'health.png'))


def look(ffn):
    """ colour, line style and marker, the same in every plot """
    i = list(FFNS).index(ffn)
    return {'color': COLOURS[i % len(COLOURS)], 'linestyle': STYLES[i % len(STYLES)], 'marker': MARKERS[i % len(MARKERS)],
            'markersize': 5, 'linewidth': 1.6}


def new_figure(panels, width, height):
    figure = Figure(figsize=(width * panels, height), layout='constrained', dpi=130)
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for axis in axes:
        axis.grid(True, color='0.9', linewidth=0.7)
        axis.spines[['top', 'right']].set_visible(False)
    return figure, axes


def shown(curve):
    """ the evaluations that are drawn: not the first, where there are others, as the loss of chance is far above the rest """
    return slice(1 if len(curve['iter']) > 3 else 0, None)


def draw_loss(axis, results, key, label):
    for ffn, row in results['ffns'].items():
        curve = row['curves']
        if curve['losses']:
            x, columns = curve[key][shown(curve)], list(zip(*curve['losses'].values(), strict=True))[shown(curve)]
            axis.plot(x, [statistics.fmean(column) for column in columns], label=ffn, **look(ffn))
            axis.fill_between(x, [min(column) for column in columns], [max(column) for column in columns],
                              color=look(ffn)['color'], alpha=0.15, linewidth=0)
    axis.set(xlabel=label, ylabel="validation loss (nats per token)", title="mean over seeds; band: all seeds")
    if axis.lines:
        axis.legend(frameon=False)


def draw_difference(axis, results):
    """ variant - baseline, paired by seed, at each evaluation that both have """
    base = results['ffns'][results['baseline']]['curves']
    for ffn, row in results['ffns'].items():
        curve = row['curves']
        seeds = [seed for seed in curve['losses'] if seed in base['losses']]
        iters = [it for it in curve['iter'][shown(curve)] if it in base['iter']]
        if ffn == results['baseline'] or not seeds or not iters:
            continue
        i, j = [curve['iter'].index(it) for it in iters], [base['iter'].index(it) for it in iters]
        x = [curve['tokens'][k] for k in i]
        rows = [paired([curve['losses'][seed][a] for seed in seeds], [base['losses'][seed][b] for seed in seeds])
                for a, b in zip(i, j, strict=True)]
        axis.plot(x, [row['mean'] for row in rows], label=ffn, **look(ffn))
        if len(seeds) >= MIN_SEEDS:
            axis.fill_between(x, [row['low'] for row in rows], [row['high'] for row in rows],
                              color=look(ffn)['color'], alpha=0.12, linewidth=0)
    axis.axhspan(-results['margin'], results['margin'], color='0.85', zorder=0)
    axis.axhline(0, color='0.4', linewidth=1, zorder=1)
    axis.set(xlabel="training tokens", ylabel=f"loss - loss of {results['baseline']} (nats per token)",
             title="paired difference; band: 95 % interval; grey: a tie")
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False)


def plot_loss_vs_tokens(results, path):
    figure, (left, right) = new_figure(2, 5.2, 3.8)
    draw_loss(left, results, 'tokens', "training tokens")
    draw_difference(right, results)
    figure.savefig(path)


def plot_loss(results, key, label, path):
    figure, (axis,) = new_figure(1, 5.2, 3.8)
    draw_loss(axis, results, key, label)
    figure.savefig(path)


def plot_shares(results, path):
    """ bars for each FFN, stacked by component: shares of parameters, FLOPs and, where it was measured, time """
    kinds = list(next(iter(results['ffns'].values()))['shares'])
    figure, (axis,) = new_figure(1, 8, 0.9 + 0.27 * (len(kinds) + 0.6) * len(results['ffns']))
    ticks, y = {}, 0.0
    for ffn, row in results['ffns'].items():
        for kind in kinds:
            left = 0.0
            for group in GROUPS:
                share, (colour, hatch) = row['shares'][kind][group], GROUP_LOOK[group]
                axis.barh(y, share, left=left, height=0.9, color=colour, edgecolor='white', hatch=hatch, alpha=0.85,
                          label=None if ticks else group)
                if share >= 0.06:
                    axis.text(left + share / 2, y, f'{share:.0%}', ha='center', va='center', fontsize=8,
                              bbox={'boxstyle': 'round,pad=0.15', 'facecolor': 'white', 'edgecolor': 'none', 'alpha': 0.85})
                left += share
            ticks[y] = f'{ffn}: {kind}'
            y += 1
        y += 0.6
    axis.set_yticks(list(ticks), list(ticks.values()), fontsize=8)
    axis.invert_yaxis()
    axis.grid(False)
    axis.set(xlim=(0, 1), xlabel="share" + (" (time: eager forward + backward, without the optimizer)" if 'time' in kinds else ""))
    axis.xaxis.set_major_formatter(lambda value, _: f'{value:.0%}')
    axis.legend(frameon=False, ncols=len(GROUPS), loc='lower left', bbox_to_anchor=(0, 1))
    figure.savefig(path)


def plot_health(results, path):
    """ per layer, at the end of training: dead units, exact zeros, gates closed and open """
    figure, axes = new_figure(len(HEALTH), 3.3, 3.2)
    for axis, (name, title) in zip(axes, HEALTH.items(), strict=True):
        for ffn, row in results['ffns'].items():
            if name in row['health']:
                axis.plot(range(1, len(row['health'][name]) + 1), row['health'][name], label=ffn, **look(ffn))
        axis.set(title=title, xlabel="layer")
        # a fraction; few units are dead, so these have a scale of their own
        top = max(0.05, axis.get_ylim()[1]) if name == 'dead_frac' and axis.lines else 1.02
        axis.set_ylim(-0.02 * top, top)
        axis.yaxis.set_major_formatter(lambda value, _: f'{value:.3g}')
        if axis.lines:
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.legend(frameon=False, fontsize=8)
        else:
            axis.set_xticks([])
            why = "no gated FFN" if name.startswith('gate') else "no finished run"
            axis.text(0.5, 0.5, why, ha='center', transform=axis.transAxes, color='0.4')
    axes[0].set_ylabel("fraction, mean over seeds")
    figure.savefig(path)
