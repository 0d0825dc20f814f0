"""
What paired runs allow one to say: intervals, corrected tests, and the verdict, which is never bolder than its rules.

Losses are in nats per token. A difference is variant - baseline at the same seed: same data order, same initial values of all
that the two share, so most of the seeds' luck cancels. The t distribution is used throughout; with 3 to 10 pairs the percentile
bootstrap covers 73 to 91 % where it says 95.
"""

import math

import numpy as np
from scipy.special import stdtr, stdtrit  # Student's t: the probability below t, and its inverse
from scipy.stats import ttest_ind

ALPHA = 0.05  # of all claims of a report together
POWER = 0.8
MIN_SEEDS, FIRM_SEEDS = 3, 5  # pairs below which nothing is said, and below which nothing is more than suggestive
# Kaplan et al. 2020 (arXiv 2001.08361), equations 1.1 and 1.3: loss ~ parameters^-0.076 and ~ compute^-0.050
KAPLAN = {'params': 0.076, 'flops': 0.050, 'time': 0.050}


def paired(variant, baseline):
    """
    variant, baseline: losses of the same seeds, in the same order -> {n, mean, sd, low, high, p, rho} of the differences:
    95 % t-interval, two-sided p of no difference, correlation of the pairs. What cannot be computed is None (n < 2, sd of 0).
    """
    variant, baseline = np.asarray(variant, float), np.asarray(baseline, float)
    d, n = variant - baseline, len(variant)
    out = dict.fromkeys(('mean', 'sd', 'low', 'high', 'p', 'rho')) | {'n': n}
    if n:
        out['mean'] = float(d.mean())
    if n >= 2:
        sd = float(d.std(ddof=1))
        half = float(stdtrit(n - 1, 1 - ALPHA / 2)) * sd / math.sqrt(n)
        out |= {'sd': sd, 'low': out['mean'] - half, 'high': out['mean'] + half, 'p': t_test(out['mean'], sd, n)}
        if variant.std() > 0 and baseline.std() > 0:
            out['rho'] = float(np.corrcoef(variant, baseline)[0, 1])
    return out


def welch(variant, baseline):
    """ two-sided p of equal means without pairing and with unequal variances; None below 2 losses each or without any spread """
    if min(len(variant), len(baseline)) < 2 or len(set(variant)) == len(set(baseline)) == 1:
        return None
    return float(ttest_ind(variant, baseline, equal_var=False).pvalue)


def t_test(mean, sd, n, alternative='two-sided'):
    """ p of the hypothesis that the true mean is 0, against 'two-sided', 'less' or 'greater' """
    t = mean / (sd / math.sqrt(n)) if sd > 0 else math.copysign(math.inf, mean) if mean else 0.0
    if alternative == 'two-sided':
        return float(2 * stdtr(n - 1, -abs(t)))
    return float(stdtr(n - 1, t if alternative == 'less' else -t))


def equivalence(mean, sd, n, margin):
    """ p of the hypothesis that the true mean is outside (-margin, margin): two one-sided tests (Schuirmann 1987) """
    if margin <= 0:
        return 1.0
    return max(t_test(mean - margin, sd, n, 'less'), t_test(mean + margin, sd, n, 'greater'))


def holm(ps):
    """ p-values corrected for there being several (Holm 1979): the smallest times m, the next times m - 1, ..., never decreasing """
    out, largest = [1.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        largest = max(largest, ps[i] * (len(ps) - rank))
        out[i] = min(1.0, largest)
    return out


def detectable(sd, n, tests=1):
    """
    The true difference that n pairs find with a probability of 0.8: (t_.975 + t_.8) * sd / sqrt(n), the level of the first
    divided by the number of tests, as in the first step of Holm's correction.
    """
    level = stdtrit(n - 1, 1 - ALPHA / tests / 2) + stdtrit(n - 1, POWER)
    return float(level * sd / math.sqrt(n))


def seeds_needed(sd, difference, tests=1, at_least=FIRM_SEEDS, at_most=1000):
    """ the number of pairs that find a true difference with a probability of 0.8, for the sd of the pairs seen; None above at_most """
    return next((n for n in range(max(2, at_least), at_most + 1) if detectable(sd, n, tests) <= difference), None)


def mismatch_loss(loss, excess, kind='params'):
    """ nats that a model with a fraction `excess` more parameters (or FLOPs, or time) is ahead by for that alone; below 0: behind """
    return loss * (1 - (1 + excess) ** -KAPLAN[kind])


def verdict(row, p, p_tie, mismatch, diverged=0, baseline_diverged=0):
    """
    One of 'better', 'worse', 'tie', 'not resolved', 'no inference', or 'suggestive: ...' of the first three.

    row: of paired(). p, p_tie: of no difference and of no equivalence, both corrected. mismatch: nats that the two models' unequal
    sizes explain; a difference that is not larger proves nothing. A diverged run, whose loss no mean contains, rules out every
    word that it speaks against.
    """
    if row['n'] < MIN_SEEDS:
        return 'no inference'
    if p < ALPHA and abs(row['mean']) > abs(mismatch):
        word = 'better' if row['mean'] < 0 else 'worse'
    else:
        word = 'tie' if p_tie < ALPHA else 'not resolved'
    if diverged and word in ('better', 'tie') or baseline_diverged and word in ('worse', 'tie'):
        word = 'not resolved'
    return f'suggestive: {word}' if row['n'] < FIRM_SEEDS and word != 'not resolved' else word


def judge(losses, baseline, margin, mismatch=None):
    """
    losses: {ffn: {seed: final loss, inf where the run diverged}}; mismatch: {ffn: nats explained by unequal size}.
    -> {ffn: row} for all but the baseline: paired() with p_holm, p_tie, detectable, seeds_needed (for a difference of margin) and verdict.
    """
    mismatch, rows = mismatch or {}, {}
    for ffn in losses:
        if ffn != baseline:
            seeds = [s for s, loss in losses[ffn].items() if math.isfinite(loss) and math.isfinite(losses[baseline].get(s, math.inf))]
            rows[ffn] = paired([losses[ffn][s] for s in seeds], [losses[baseline][s] for s in seeds])
    able = [ffn for ffn in rows if rows[ffn]['n'] >= 2]
    ps = holm([rows[ffn]['p'] for ffn in able])
    ties = holm([equivalence(rows[ffn]['mean'], rows[ffn]['sd'], rows[ffn]['n'], margin - abs(mismatch.get(ffn, 0.0))) for ffn in able])
    corrected = dict(zip(able, zip(ps, ties, strict=True), strict=True))
    for ffn, row in rows.items():
        row['p_holm'], row['p_tie'] = corrected.get(ffn, (None, None))
        row['detectable'] = detectable(row['sd'], row['n'], len(able)) if ffn in able else None
        row['seeds_needed'] = seeds_needed(row['sd'], margin, len(able)) if ffn in able and margin > 0 else None
        row['diverged'], base_diverged = (sum(not math.isfinite(loss) for loss in losses[name].values()) for name in (ffn, baseline))
        row['verdict'] = verdict(row, row['p_holm'], row['p_tie'], mismatch.get(ffn, 0.0), row['diverged'], base_diverged)
    return rows
