""" What only a GPU can show: python -m pytest -o addopts= tests/gpu """

import pytest
import torch
from conftest import TINY, metrics

from model import GPT, GPTConfig
from sample import generate
from training import checkpoint
from training.machine import peak_flops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture
def args(tiny_data):
    return [*TINY, f'--dataset={tiny_data}', '--device=cuda', '--dtype=auto', '--n_embd=96', '--batch_size=16', '--max_iters=30']


def test_compiled_bfloat16_is_the_cpus_float32(script, args, tmp_path):
    out = script('train.py', *args, '--out_dir=gpu').out
    assert 'bfloat16, compiled' in out or 'float16, compiled' in out
    script('train.py', *args, '--out_dir=eager', '--compile=False', '--dtype=float32')
    script('train.py', *args, '--out_dir=cpu', '--device=cpu', '--dtype=float32')
    for key in ('train/loss', 'val/loss'):
        gpu, eager, cpu = (metrics(tmp_path / name, key) for name in ('gpu', 'eager', 'cpu'))
        assert all(eager[it] == pytest.approx(cpu[it], abs=0.01) and gpu[it] == pytest.approx(cpu[it], abs=0.05) for it in cpu)
    known = peak_flops(torch.cuda.get_device_name(), torch.bfloat16)
    assert all((mfu is None) == (known is None) for mfu in metrics(tmp_path / 'gpu', 'mfu').values())


def test_float16_resumes_with_its_loss_scale(script, args, tmp_path):
    script('train.py', *args, '--dtype=float16', '--compile=False', '--lr_decay_iters=30', '--out_dir=straight')
    script('train.py', *args, '--dtype=float16', '--compile=False', '--lr_decay_iters=30', '--out_dir=halves', '--max_iters=15')
    script('train.py', *args, '--dtype=float16', '--compile=False', '--lr_decay_iters=30', '--out_dir=halves', '--init_from=resume')
    a, b = (checkpoint.load(checkpoint.paths(tmp_path / name)[-1]) for name in ('straight', 'halves'))
    assert a['scaler'] == b['scaler'] and a['scaler']['scale'] > 1
    assert metrics(tmp_path / 'straight', 'val/loss')[30] == pytest.approx(metrics(tmp_path / 'halves', 'val/loss')[30], abs=0.01)


def test_checkpoints_and_samples_move_between_devices(script, args, tmp_path):
    script('train.py', *args)
    greedy = ['--temperature=0', '--max_new_tokens=20', '--dtype=float32', '--start=def ']
    assert script('sample.py', *greedy, '--device=cuda').out == script('sample.py', *greedy, '--device=cpu').out
    assert script('sample.py', '--max_new_tokens=50').out
    assert 'continued from iter 30' in script('train.py', *args, '--max_iters=32', '--device=cpu').out


def test_deterministic_runs_have_the_same_bits(script, args, tmp_path):
    for name in 'ab':
        script('train.py', *args, '--deterministic=True', f'--out_dir={name}')
    a, b = (checkpoint.load(checkpoint.paths(tmp_path / name)[-1])['model'] for name in 'ab')
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_cuda_graph_is_the_plain_step(script, args, tmp_path):
    for graph in (True, False):
        script('train.py', *args, '--skip_spikes', f'--cuda_graph={graph}', f'--out_dir={graph}')
    a, b = (metrics(tmp_path / name, 'train/loss') for name in ('True', 'False'))
    assert all(a[it] == pytest.approx(b[it], abs=0.01) for it in b)
    # and what it saves goes on without one, on the CPU too
    assert 'continued from iter 30' in script('train.py', *args, '--skip_spikes', '--max_iters=32', '--device=cpu', '--out_dir=True').out


def test_decoding_graph_is_recomputation():
    model = GPT(GPTConfig(zero_init=False)).cuda().eval()
    idx = torch.randint(256, (2, 5), device='cuda', generator=torch.Generator('cuda').manual_seed(0))
    fast, slow = torch.cat([idx, *generate(model, idx, 60, temperature=0)], 1), idx
    with torch.no_grad():
        for _ in range(60):
            slow = torch.cat((slow, model(slow)[0][:, -1].argmax(-1, keepdim=True)), 1)
    assert torch.equal(fast, slow)


def test_micro_batch_is_found(script, args):
    out = script('train.py', *args, '--batch_size=65536', '--block_size=128', '--max_iters=1', '--compile=False').out
    assert 'do not fit into memory' in out or 'micro-batches 1 x sequences 65536' in out


def test_out_of_memory_is_one_line(script, args):
    result = script('train.py', *args, '--batch_size=1048576', '--micro_batch_size=1048576', '--compile=False', ok=False)
    assert result.rc == 2 and 'error: out of memory in a step of 1048576 sequences at a time; --micro_batch_size=524288' in result.err
