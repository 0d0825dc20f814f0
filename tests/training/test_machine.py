import copy
from dataclasses import replace

import pytest
import torch
from small import SMALL, tokens

from configurator import UserError
from model import GPT
from train import TrainConfig
from training import machine
from training.machine import (
    autocast,
    choose_compile,
    choose_device,
    cpu_has_bf16,
    divisors,
    largest_that_fits,
    pack_for_sampling,
    peak_flops,
)


def test_choose_device():
    assert choose_device('cpu') == (torch.device('cpu'), torch.bfloat16 if cpu_has_bf16() else torch.float32)
    assert choose_device('cpu', 'bfloat16')[1] == torch.bfloat16
    for name in ('gpu', 'cuda:99', 'meta', 'cpu:x'):
        with pytest.raises(UserError, match='device'):
            choose_device(name)


@pytest.mark.skipif(not cpu_has_bf16(), reason="no bfloat16 in hardware")
@pytest.mark.parametrize('bias', [False, True])
def test_packed_matrices_give_the_same_products(bias):
    """ as near to float32 as autocast is """
    config = replace(SMALL, bias=bias)
    model, idx, cpu = GPT(config).eval(), tokens(config, B=2), torch.device('cpu')
    for name, p in model.named_parameters():
        if name.endswith('bias'):
            p.data.normal_()
    packed = copy.deepcopy(model)
    assert pack_for_sampling(packed, cpu, torch.float32) == torch.float32 and torch.equal(packed(idx)[0], model(idx)[0])
    assert pack_for_sampling(packed, cpu, torch.bfloat16) == torch.float32
    with torch.no_grad():
        exact = model(idx)[0]
        with autocast(cpu, torch.bfloat16):
            rough = model(idx)[0].float()
        error, usual = (packed(idx)[0] - exact).abs().max(), (rough - exact).abs().max()
    assert 0 < error < 1.5 * usual < 0.2
    assert not [module for module in packed.modules() if isinstance(module, torch.nn.Linear)]


def test_largest_micro_batch_that_fits():
    said, tried = [], []

    def attempt(n):
        tried.append(n)
        if n > 12:
            raise torch.OutOfMemoryError

    assert largest_that_fits(divisors(48), attempt, said.append) == 12 and tried == [48, 24, 16, 12]
    assert said == [f"micro-batches of {n} sequences do not fit into memory" for n in (48, 24, 16)]
    assert largest_that_fits([1, 7], attempt, said.append) == 7
    with pytest.raises(UserError, match='not even one sequence fits; a larger --loss_chunks'):
        largest_that_fits([1, 2], lambda n: attempt(13), said.append)


def test_what_is_compiled(monkeypatch):
    """ on a CPU only what is worth it: long runs in bfloat16, where there is a compiler """
    def chosen(device='cpu', dtype=torch.bfloat16, **changes):
        return choose_compile(TrainConfig(vocab_size=256, **changes), torch.device(device), dtype)

    for name in ('cpu_has_bf16', 'cpu_compiles'):
        monkeypatch.setattr(machine, name, lambda: True)
    assert 720 * 16 * 128 * 3391488 == pytest.approx(5.0e12, rel=0.001)  # the default run
    assert not chosen() and not chosen(max_iters=1400) and chosen(max_iters=1500) and chosen(batch_size=64)
    assert not chosen(max_iters=1500, dtype=torch.float32) and not chosen(max_iters=1500, compile=False)
    assert chosen(compile=True) and not chosen('mps', max_iters=10**9)
    assert not chosen('cuda') and not chosen('cuda', max_iters=10**6) and chosen('cuda', max_iters=2 * 10**6)  # a second of work is not worth a minute
    monkeypatch.setattr(machine, 'cpu_compiles', lambda: False)
    assert not chosen(max_iters=1500)


def test_peak_flops():
    assert peak_flops('NVIDIA A100-SXM4-80GB', torch.bfloat16) == 312e12 and peak_flops('NVIDIA H100 80GB HBM3', torch.bfloat16) == 989e12
    assert peak_flops('NVIDIA H200', torch.float16) == 989e12 and peak_flops('NVIDIA H100 PCIe', torch.bfloat16) == 756e12
    assert peak_flops('NVIDIA GeForce RTX 4090', torch.bfloat16) == 165e12 and peak_flops('NVIDIA L4', torch.bfloat16) == 121e12
    assert peak_flops('NVIDIA L40S', torch.bfloat16) == 362e12 and peak_flops('Tesla T4', torch.float16) == 65e12
    for name, half, single in (('NVIDIA H200 NVL', 835e12, 417e12), ('NVIDIA GH200 480GB', 989e12, 494e12), ('NVIDIA B200', 2250e12, 1125e12), ('NVIDIA B300 SXM6 AC', 2250e12, 1125e12),
                               ('NVIDIA GB200', 2500e12, 1250e12), ('NVIDIA GeForce RTX 5090', 209.5e12, 104.8e12), ('NVIDIA GeForce RTX 5070 Ti', 87.9e12, 43.9e12), ('NVIDIA A10', 125e12, 62.5e12),
                               ('NVIDIA RTX A6000', 155e12, 77.4e12), ('NVIDIA RTX 6000 Ada Generation', 364e12, 182e12), ('AMD Instinct MI300X', 1307e12, 654e12), ('NVIDIA H100 NVL', 835e12, 417e12)):
        assert peak_flops(name, torch.bfloat16) == peak_flops(name, torch.float16) == half and peak_flops(name, torch.float32) == single, name
    assert peak_flops('Tesla V100-SXM2-16GB', torch.float16) == 125e12 and peak_flops('Tesla V100-SXM2-16GB', torch.bfloat16) is None
    for name in ('NVIDIA A10G', 'NVIDIA B2000', 'Foo', 'NVIDIA GeForce RTX 4090 Laptop GPU', 'NVIDIA L400', ''):
        assert peak_flops(name, torch.bfloat16) is None
    assert peak_flops('Tesla T4', torch.bfloat16) is None
