
import pytest
import torch

from comparison.timeshare import GROUPS, group_of, time_shares
from model import GPTConfig
from training.accounting import components


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
