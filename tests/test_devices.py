"""
A device that is not the CPU, without having one: torch's fake tensors compute shapes, types and devices and nothing else. Anything that
was left behind on the CPU raises as it would on a GPU. With a CUDA build of torch, what only goes forward (evaluation, health, sampling,
export) runs on 'cuda', with autocast as it is there; with other builds on 'meta', in float32. A training step and resuming run on 'meta', as
autograd wants a driver for 'cuda'. What needs one for other reasons (streams, graphs, memory) is in tests/gpu.
"""

import contextlib
from dataclasses import replace

import pytest
import torch
from small import SMALL, every_ffn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from data.tokens import Dataset
from export import choose_class, hf_weights
from model import GPT, RMSNorm
from sample import KVCache, fixed_step, sample
from train import TrainConfig, TrainStep
from training.evaluation import evaluate
from training.health import ffn_health
from training.machine import autocast, pack_for_sampling
from training.processes import Processes

META = torch.device('meta')
IS_CUDA = torch.backends.cuda.is_built()
CUDA = torch.device('cuda', 0) if IS_CUDA else META
DTYPE = torch.bfloat16 if IS_CUDA else torch.float32
DTYPES = [torch.float32, *(pytest.param(dtype, marks=pytest.mark.skipif(not IS_CUDA, reason="takes a CUDA build of torch")) for dtype in (torch.bfloat16, torch.float16))]
CONFIG = TrainConfig(vocab_size=256, n_layer=2, n_head=2, n_embd=48, block_size=32, batch_size=4, zero_init=False, dropout=0.1)


@pytest.fixture
def fake(monkeypatch):
    """ within it every tensor is fake, and autocast to 'cuda' does what it does where there is one """
    monkeypatch.setattr('torch.cuda.amp.common.amp_definitely_not_available', lambda: False)
    monkeypatch.setattr(torch.cuda, 'is_bf16_supported', lambda *args, **options: True)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


@contextlib.contextmanager
def up_to_a_number():
    """ fake tensors have no values: where one is asked for, all that comes before it went well """
    with pytest.raises(DataDependentOutputException):
        yield


def tensors_of(value, name=''):
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_of(item, f'{name}.{key if isinstance(key, str) else ""}')
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item, name)


def all_tensors(step):
    return [*tensors_of(vars(step), 'step'), *tensors_of([vars(optimizer) for optimizer in step.optimizers], 'optimizer'), *tensors_of(vars(step.guard), 'guard'),
            *step.model.named_parameters(), *step.model.named_buffers()]


def batches(it, rows):
    for sequences in rows:
        x = torch.zeros(len(sequences), 32, dtype=torch.long, device=META)
        yield x, x


def build(config, device, dtype=torch.float32):
    """ GPT(config) there, with no values """
    with torch.device('meta'):
        model, moved = GPT(config), {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = moved.setdefault(id(p), torch.nn.Parameter(torch.empty(p.shape, device=device, dtype=dtype)))
        for name, buffer in module._buffers.items():
            module._buffers[name] = torch.empty(buffer.shape, device=device, dtype=dtype)
    return model


def make_step(**changes):
    config = replace(CONFIG, skip_spikes=True, **changes)
    step = TrainStep(build(config, META), config, META, torch.float32, 2, Processes())
    step.optimizers[0].fused, step.optimizers[0].options = True, {'fused': True, 'capturable': True}  # as on CUDA
    return step


def test_the_fake_device_notices(fake):
    """ or the tests below could not fail """
    with pytest.raises(Exception, match='(?i)device'):
        torch.zeros(3, device=CUDA) + torch.zeros(3)
    step = make_step()
    step.optimizers[1].state[step.model.h[0].ffn.down_proj.weight]['momentum_buffer'] = torch.zeros(48, 128)
    with pytest.raises(Exception, match='(?i)device'):
        step(0, batches)


@every_ffn
def test_training_steps(fake, ffn):
    """ two micro-batches, both optimizers, a spike judged """
    step = make_step(ffn=ffn)
    for it in range(2):
        loss = step(it, batches)
    assert loss.device == META and {tensor.device for _, tensor in all_tensors(step)} == {META}, [name for name, tensor in all_tensors(step) if tensor.device != META]
    assert {p.dtype for p in step.model.parameters()} == {torch.float32} and not [p for p in step.model.parameters() if p.grad is not None]
    with up_to_a_number():
        step.check_finite(None)


@pytest.mark.parametrize('changes', [dict(optimizer='adamw'), dict(norm='layernorm', position='learned', tie_embeddings=True, bias=True, qk_norm=False), dict(n_kv_head=1), dict(loss_chunks=3),
                                     dict(grad_clip=0.0)], ids=lambda changes: ' '.join(changes))
def test_other_architectures(fake, changes):
    step = make_step(**changes)
    step(0, batches)
    step(1, batches)


def test_resuming(fake):
    """ a checkpoint is read on the CPU """
    step = make_step()
    step(0, batches)
    saved = {key: value for key, value in step.state_dict().items()}
    saved['optimizers'] = [{'state': {i: {key: value.cpu() for key, value in state.items()} for i, state in optimizer['state'].items()}} for optimizer in saved['optimizers']]
    saved['guard'], model = saved['guard'].cpu(), {name: tensor.cpu() for name, tensor in saved['model'].items()}
    again = make_step()
    again.model.load_state_dict(model)
    again.load_state_dict(saved)
    assert {tensor.device for _, tensor in all_tensors(again)} == {META}
    again(1, batches)


@every_ffn
def test_evaluation_and_health(fake, tiny_data, ffn):
    data, model = Dataset(tiny_data, 32), build(replace(CONFIG, ffn=ffn), CUDA)
    with up_to_a_number():
        evaluate(model, data, replace(CONFIG, eval_tokens=1000), Processes(), CUDA, DTYPE)
    with up_to_a_number(), autocast(CUDA, DTYPE):
        ffn_health(model, torch.zeros(2, 32, dtype=torch.long, device=CUDA))


@pytest.mark.parametrize('packed', [False, True])
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('changes', [{}, dict(n_kv_head=1), dict(norm='layernorm', position='learned', qk_norm=False)], ids=lambda changes: ' '.join(changes) or 'default')
def test_sampling_with_fixed_shapes(fake, changes, dtype, packed):
    """ what a CUDA graph captures: on some versions autocast makes the norms float32, and the cache is not """
    model, idx = build(replace(SMALL, **changes), CUDA).eval(), torch.zeros(2, 5, dtype=torch.long, device=CUDA)
    model.to = lambda dtype: vars(model).update(vars(build(model.config, CUDA, dtype).eval()))  # fake parameters cannot be cast where they are
    with torch.no_grad(), autocast(CUDA, pack_for_sampling(model, CUDA, dtype) if packed else dtype):
        cache = KVCache(model.config, 2, 8, CUDA, dtype)
        model.features(idx, cache)
        cache.pos = torch.full((1,), 5, device=CUDA)
        step = fixed_step(model, cache, lambda x: sample(model.lm_head(x).float(), 0.8, 5, 0.9, None), idx[:, -1:], None, as_graph=False)
        for _ in range(3):
            assert step(idx[:, :1]).device == CUDA
    assert all(tensor.dtype == dtype and tensor.device == CUDA for tensor in (*cache.k, *cache.v, cache.mask))
    assert not packed or dtype != torch.bfloat16 or {tensor.dtype for tensor in (*model.parameters(), *model.buffers())} == {dtype}


def test_norms_are_of_the_type_that_they_got(fake):
    with torch.device('meta'):
        norm = RMSNorm(8)
    norm.weight = torch.nn.Parameter(torch.ones(8, device=CUDA))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with torch.no_grad(), autocast(CUDA, DTYPE):
            assert norm(torch.zeros(2, 8, device=CUDA, dtype=dtype)).dtype == dtype


@every_ffn
def test_exporting(fake, ffn):
    config = replace(SMALL, ffn=ffn)
    tensors = hf_weights(build(config, CUDA).state_dict(), config, choose_class(config), 40) if ffn != 'swish' else {}
    assert {tensor.device for tensor in tensors.values()} <= {CUDA}
