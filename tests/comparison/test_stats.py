import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from comparison import stats
from comparison.stats import detectable, equivalence, holm, judge, mismatch_loss, paired, seeds_needed, verdict, welch

RNG = np.random.default_rng(0)


def test_paired_by_hand():
    # differences 1, 2, 3: mean 2, sd 1, standard error 1/sqrt(3), t.975 with 2 degrees of freedom 4.3027
    row = paired([2, 4, 6], [1, 2, 3])
    assert row['n'] == 3 and row['mean'] == 2 and row['sd'] == 1 and row['rho'] == pytest.approx(1)
    assert (row['low'], row['high']) == pytest.approx((2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5), abs=1e-4)


# facts: t.975 at n - 1 degrees of freedom, from the printed tables
@pytest.mark.parametrize('n, t975', [(2, 12.7062), (3, 4.3027), (4, 3.1824), (5, 2.7764), (6, 2.5706), (8, 2.3646), (10, 2.2622)])
def test_quantiles(n, t975):
    d = RNG.normal(size=n)
    row = paired(d, np.zeros(n))
    assert (row['high'] - row['low']) / 2 == pytest.approx(t975 * d.std(ddof=1) / n**0.5, rel=5e-5)


@pytest.mark.parametrize('n', [2, 3, 5, 12])
def test_agrees_with_scipy(n):
    a, b = RNG.normal(0.3, 1, n), RNG.normal(0, 2, n)
    row, test = paired(a, b), scipy_stats.ttest_rel(a, b)
    interval = test.confidence_interval(0.95)
    assert (row['p'], row['low'], row['high']) == pytest.approx((test.pvalue, interval.low, interval.high))
    assert row['rho'] == pytest.approx(scipy_stats.pearsonr(a, b).statistic)
    low, high = (scipy_stats.ttest_1samp(a - b, bound, alternative=side).pvalue for bound, side in ((-0.5, 'greater'), (0.5, 'less')))
    assert equivalence(row['mean'], row['sd'], n, 0.5) == pytest.approx(max(low, high))
    assert welch(a, b) == pytest.approx(scipy_stats.ttest_ind(a, b, equal_var=False).pvalue)


def test_nothing_to_compute():
    assert paired([], [])['mean'] is None and paired([1.0], [2.0]) == {**dict.fromkeys(('sd', 'low', 'high', 'p', 'rho')), 'n': 1, 'mean': -1.0}
    assert paired([1.0, 2.0], [1.0, 2.0])['p'] == 1.0  # the same losses
    assert paired([2.0, 3.0], [1.0, 2.0])['p'] == 0.0  # no spread at all
    assert welch([1.0], [1.0, 2.0]) is None and welch([1.0, 1.0], [1.0, 1.0]) is None


def test_holm():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([0.02]) == [0.02] and holm([]) == []


# pairs for 80 % power at a two-sided 5 %: the table of shared/facts/ffn.md, with sd = sqrt(2 * 0.0018^2 * (1 - rho)) and so on
@pytest.mark.parametrize('sd, needed', [
    (0.0018 * 2**0.5, (53, 15, 8, 5, 3)), (0.0018, (28, 9, 5, 4, 3)), (0.0018 * 0.5**0.5, (15, 6, 4, 3, 3)),
    (0.005 * 2**0.5, (395, 101, 46, 18, 7)), (0.005, (199, 52, 24, 10, 5))])
def test_seeds_needed(sd, needed):
    assert tuple(seeds_needed(sd, difference, at_least=2) for difference in (0.001, 0.002, 0.003, 0.005, 0.01)) == needed


def test_detectable():
    assert detectable(0.01, 5) == pytest.approx((2.7764 + 0.9410) * 0.01 / 5**0.5, rel=1e-4)
    # the difference that it names is found in 80 % of studies
    found = [paired(RNG.normal(detectable(0.01, 6), 0.01, 6), np.zeros(6))['p'] < 0.05 for _ in range(3000)]
    assert np.mean(found) == pytest.approx(0.8, abs=0.03)
    assert detectable(0.01, 5, tests=4) > detectable(0.01, 5)
    assert seeds_needed(0.001, 0.005) == 5 and seeds_needed(10.0, 0.005) is None


@pytest.mark.parametrize('excess, loss', [(0.001, 0.00025), (0.0025, 0.00062), (0.005, 0.00124), (0.01, 0.0025), (0.03125, 0.0077)])
def test_mismatch_loss(excess, loss):
    assert mismatch_loss(3.28, excess) == pytest.approx(loss, rel=0.02)
    assert mismatch_loss(3.28, excess, 'flops') == pytest.approx(3.28 * (1 - (1 + excess) ** -0.05))
    assert mismatch_loss(3.28, 0) == 0 and mismatch_loss(3.28, -excess) < 0


@pytest.mark.parametrize('n', [3, 5, 8])
def test_coverage(n):
    covered = [row['low'] < 0.7 < row['high'] for row in (paired(RNG.normal(0.7, 2, n), np.zeros(n)) for _ in range(3000))]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.015)


# -----------------------------------------------------------------------------
# verdicts


def studies(n_studies, n_seeds, effects, sd=0.004, seed=0):
    """ losses of a baseline and of variants that differ from it by `effects`, with the luck of seeds partly shared """
    rng = np.random.default_rng(seed)
    for _ in range(n_studies):
        shared = rng.normal(3.28, sd, n_seeds)
        yield {name: dict(enumerate(shared + effect + rng.normal(0, sd, n_seeds))) for name, effect in {'base': 0.0, **effects}.items()}


@pytest.mark.parametrize('n_seeds', [5, 8])
def test_false_positives(n_seeds):
    """ 2,000 studies of four FFNs that do not differ: any 'better' or 'worse' in at most 5 % of them """
    said = [{row['verdict'] for row in judge(losses, 'base', 0.005).values()} for losses in studies(2000, n_seeds, dict.fromkeys('abcd', 0.0))]
    false = np.mean([bool(words & {'better', 'worse'}) for words in said])
    assert 0.01 < false <= 0.05, false


def test_false_ties():
    """ a true difference of exactly the margin passes for equivalent in 5 % of studies, and is called a tie in no more """
    rows = [judge(losses, 'base', 0.005)['a'] for losses in studies(3000, 5, {'a': 0.005}, sd=0.001)]
    assert np.mean([row['p_tie'] < 0.05 for row in rows]) == pytest.approx(0.05, abs=0.012)
    assert np.mean([row['verdict'] == 'tie' for row in rows]) <= 0.05


def test_true_differences_are_found():
    for effect, word in ((-0.02, 'better'), (0.02, 'worse')):
        said = [judge(losses, 'base', 0.005)['a']['verdict'] for losses in studies(100, 5, {'a': effect, 'b': 0.0})]
        assert np.mean([verdict == word for verdict in said]) > 0.9
    said = [judge(losses, 'base', 0.005)['a']['verdict'] for losses in studies(100, 5, {'a': 0.0}, sd=0.0005)]
    assert np.mean([verdict == 'tie' for verdict in said]) > 0.9


def test_few_seeds_are_never_firm():
    for n_seeds, words in ((1, {'no inference'}), (2, {'no inference'}),
                           (3, {'suggestive: better', 'not resolved'}), (4, {'suggestive: better', 'not resolved'})):
        said = {judge(losses, 'base', 0.005)['a']['verdict'] for losses in studies(200, n_seeds, {'a': -0.03})}
        assert sorted(words)[-1] in said and said <= words


ROW = {'n': 5, 'mean': -0.01}


def test_a_mismatch_explains_what_is_not_larger():
    assert verdict(ROW, 0.001, 1.0, 0.009) == 'better' == verdict(ROW, 0.001, 1.0, -0.009)
    assert verdict(ROW, 0.001, 1.0, 0.011) == 'not resolved' == verdict(ROW, 0.001, 1.0, -0.011)
    # and takes its part of the margin from a tie
    losses = {'base': {s: 3.0 + 0.001 * s for s in range(8)}, 'a': {s: 3.0 + 0.001 * s + 0.0002 * (-1) ** s for s in range(8)}}
    assert judge(losses, 'base', 0.005)['a']['verdict'] == 'tie'
    assert judge(losses, 'base', 0.005, {'a': 0.0049})['a']['verdict'] == 'not resolved' == judge(losses, 'base', 0.005, {'a': 0.1})['a']['verdict']


def test_diverged_runs_are_counted():
    losses = {'base': {s: 3.0 + 0.001 * s for s in range(6)}, 'a': {s: 2.9 + 0.0011 * s for s in range(6)}}
    assert judge(losses, 'base', 0.005)['a']['verdict'] == 'better'
    losses['a'][0] = math.inf
    row = judge(losses, 'base', 0.005)['a']
    assert row['verdict'] == 'not resolved' and row['n'] == 5 and row['diverged'] == 1
    losses['a'] = {s: 3.1 + 0.0011 * s for s in range(5)} | {5: math.inf}  # worse even so
    assert judge(losses, 'base', 0.005)['a']['verdict'] == 'worse'
    losses['base'][0] = math.inf
    assert judge(losses, 'base', 0.005)['a']['verdict'] == 'not resolved'
    losses['a'] = dict.fromkeys(range(6), math.inf)
    row = judge(losses, 'base', 0.005)['a']
    assert row['verdict'] == 'no inference' and row['diverged'] == 6 and row['mean'] is None


def test_only_shared_seeds_are_paired():
    rows = judge({'base': {1: 1.0, 2: 2.0, 3: 3.0}, 'a': {2: 2.5, 3: 3.5, 4: 9.0}}, 'base', 0.005)
    assert rows['a']['n'] == 2 and rows['a']['mean'] == 0.5 and stats.MIN_SEEDS == 3
