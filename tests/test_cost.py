import json

import pytest
from conftest import ROOT


def test_table_command(script, tmp_path):
    result = json.loads(script('cost.py', ROOT / 'config/published/gpt2.py', '--format=json').out)
    assert result['total'] == {'params': 124_439_808, 'flops': 284_812_800, 'train_flops': 854_438_400}
    assert set(result['components'][0]) == {'name', 'params', 'param_share', 'flops', 'train_flops', 'flop_share'}
    assert sum(row['param_share'] for row in result['components']) == pytest.approx(1)
    assert sum(row['flop_share'] for row in result['components']) == pytest.approx(1)
    assert result['ffn'] == {'name': 'gelu_tanh', 'width': 3072, 'mismatch': 0}
    out = script('cost.py', ROOT / 'config/swiglu.py', '--n_embd=128', '--n_head=4', '--tie_embeddings').out
    assert '+12.500% (+16,384 per layer)' in out and 'lm_head (tied)' in out and 'full (not causal) attention' in out
