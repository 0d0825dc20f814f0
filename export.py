"""
A run -> a folder that transformers (5 or later) loads, and what else reads such folders.

    python export.py --to=hf/swiglu                                # the newest run in out/, its best checkpoint
    python export.py --out_dir=out/gelu --to=hf/gelu
    python -c "from transformers import AutoModelForCausalLM as M; print(M.from_pretrained('hf/swiglu'))"

The folder computes what the run computes. It holds config.json, generation_config.json, model.safetensors (float32) and the tokenizer.
"""

import contextlib
import os
import shutil
import sys
from dataclasses import dataclass

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # which python -P leaves out

import torch

from configurator import FilePath, UserError, configure, need, run_main, say
from data import tokenizers
from files import read_json, write_json
from model import FFNS, config_from, split_parts
from training import checkpoint, rundir
from training.pretrained import gpt2_name, is_transposed


@dataclass(frozen=True)
class ExportConfig:
    out_dir: FilePath = ''  # run directory ('' = the newest in out/)
    to: FilePath = ''  # the folder to write: a new one, an empty one, or an earlier export


# -----------------------------------------------------------------------------
# which class of transformers computes what the model computes


# class: (its model_type, what it demands of a model). All have their norms in front, eps 1e-5, and plain causal attention
CLASSES = {
    'GPT2LMHeadModel':       ('gpt2', {'position': 'learned', 'norm': 'layernorm', 'gated': False, 'qk_norm': False, 'n_kv_head': False,
                                       'head_dim': False}),
    'LlamaForCausalLM':      ('llama', {'position': 'rope', 'norm': 'rmsnorm', 'gated': True, 'qk_norm': False}),
    'ArceeForCausalLM':      ('arcee', {'position': 'rope', 'norm': 'rmsnorm', 'gated': False, 'qk_norm': False}),
    'Qwen3ForCausalLM':      ('qwen3', {'position': 'rope', 'norm': 'rmsnorm', 'gated': True, 'qk_norm': True, 'bias': False}),
    'ApertusForCausalLM':    ('apertus', {'position': 'rope', 'norm': 'rmsnorm', 'gated': False, 'qk_norm': True, 'bias': False}),
    'Starcoder2ForCausalLM': ('starcoder2', {'position': 'rope', 'norm': 'layernorm', 'gated': False, 'qk_norm': False}),
    'StableLmForCausalLM':   ('stablelm', {'position': 'rope', 'norm': 'layernorm', 'gated': True, 'qk_norm': False, 'bias': False,
                                           'head_dim': False}),
}
# the nonlinearities of FFNS in transformers' words; swish is silu once its beta is folded into the matrices
HIDDEN_ACT = {'ReLU': 'relu', 'GELU': 'gelu', 'GELUTanh': 'gelu_pytorch_tanh', 'SiLU': 'silu', 'Swish': 'silu', 'ReLU2': 'relu2',
              'Sigmoid': 'sigmoid', 'Identity': 'linear'}


def choose_class(config):
    """ the class of transformers that computes GPT(config); a UserError that names the settings in the way of the nearest one """
    act, gated = FFNS[config.ffn]
    if act.__name__ not in HIDDEN_ACT:
        raise UserError(f"ffn = {config.ffn!r}: transformers has no such activation")
    has = {'position': config.position, 'norm': config.norm, 'gated': gated, 'qk_norm': config.qk_norm, 'bias': config.bias,
           'n_kv_head': config.kv_heads != config.n_head, 'head_dim': config.n_head * config.head_width != config.n_embd}
    in_the_way = {name: [key for key, value in demands.items() if has[key] != value] for name, (_, demands) in CLASSES.items()}
    nearest = min(in_the_way, key=lambda name: len(in_the_way[name]))
    if in_the_way[nearest]:
        settings = (('ffn' if key == 'gated' else key) for key in in_the_way[nearest])
        settings = ' and '.join(f'{key} = {getattr(config, key)!r}' for key in settings)
        raise UserError(f"no class of transformers has all of this model; the nearest, {nearest}, is without {settings}")
    return nearest


def hf_config(config, name, vocab_size, ids):
    """ config.json as a dict; ids: {key: id} of the special tokens """
    attention_bias, eps = config.bias or config.qkv_bias, 1e-5
    act = HIDDEN_ACT[FFNS[config.ffn][0].__name__]
    out = {'architectures': [name], 'model_type': CLASSES[name][0], 'dtype': 'float32', 'vocab_size': vocab_size,
           'tie_word_embeddings': config.tie_embeddings, **ids}
    if name == 'GPT2LMHeadModel':
        dropout = {key: config.dropout for key in ('embd_pdrop', 'attn_pdrop', 'resid_pdrop')}
        return out | dropout | {'n_layer': config.n_layer, 'n_head': config.n_head, 'n_embd': config.n_embd, 'n_inner': config.hidden_width,
                                'n_positions': config.block_size, 'activation_function': act, 'layer_norm_epsilon': eps}
    rope = {'rope_type': 'default', 'rope_theta': config.rope_theta}  # others look for rope_theta outside of it
    out |= {'hidden_size': config.n_embd, 'intermediate_size': config.hidden_width, 'num_hidden_layers': config.n_layer,
            'num_attention_heads': config.n_head, 'num_key_value_heads': config.kv_heads, 'head_dim': config.head_width,
            'hidden_act': act, 'max_position_embeddings': config.block_size, 'rope_theta': config.rope_theta, 'rope_parameters': rope}
    if name == 'Starcoder2ForCausalLM':
        return out | {'norm_epsilon': eps, 'use_bias': attention_bias, 'sliding_window': None}
    if name == 'StableLmForCausalLM':
        return out | {'layer_norm_eps': eps, 'use_qkv_bias': attention_bias, 'rope_parameters': rope | {'partial_rotary_factor': 1.0}}
    return out | {'rms_norm_eps': eps, 'attention_bias': attention_bias} | ({} if 'bias' in CLASSES[name][1] else {'mlp_bias': config.bias})


# ours -> theirs, in all classes but GPT2LMHeadModel; then what some call otherwise
NAMES = {'wte': 'model.embed_tokens', 'norm_f': 'model.norm', 'h.': 'model.layers.', 'norm_1': 'input_layernorm',
         'norm_2': 'post_attention_layernorm', 'attn.': 'self_attn.', 'ffn.': 'mlp.'}
OTHER_NAMES = {'ApertusForCausalLM': {'input_layernorm': 'attention_layernorm', 'post_attention_layernorm': 'feedforward_layernorm'},
               'Starcoder2ForCausalLM': {'up_proj': 'c_fc', 'down_proj': 'c_proj'}}


def has_bias(name, part, config):
    """ whether the class `name` has a bias in `part` (a module of ours); where the model has none it is zero """
    if 'norm' in part:
        return config.norm == 'layernorm'
    if name == 'GPT2LMHeadModel':
        return 'h.' in part
    attention_bias = config.bias or config.qkv_bias
    if 'attn.' in part:
        return attention_bias and not (name == 'StableLmForCausalLM' and part.endswith('o_proj'))
    return 'ffn.' in part and (attention_bias if name == 'Starcoder2ForCausalLM' else config.bias)


def hf_weights(model, config, name, vocab_size):
    """ {their name: tensor} of a state dict of ours, with vocab_size rows in the embedding and the head """
    model, out = dict(model), {}
    for beta_name in [key for key in model if key.endswith('.act.beta')]:  # x sigmoid(beta x) = silu(beta x) / beta
        beta, ffn = model.pop(beta_name), beta_name.removesuffix('act.beta')
        if beta == 0:
            raise UserError(f"{beta_name} is 0, and x * sigmoid(0) is not a silu")
        for key in [key for key in model if key.startswith(f'{ffn}up_proj.')]:
            model[key] = model[key] * beta
        model[f'{ffn}down_proj.weight'] = model[f'{ffn}down_proj.weight'] / beta
    gpt2 = name == 'GPT2LMHeadModel'
    for ours, tensor in model.items():
        if ours == 'lm_head.weight' and config.tie_embeddings:
            continue
        if ours in ('wte.weight', 'lm_head.weight'):  # a row more is the mean of all, which adds at most ln(1 + 1/vocab_size) to the loss
            tensor = torch.cat((tensor, tensor.mean(0, keepdim=True)))[:vocab_size]
        # GPT-2's queries, keys and values are one matrix too
        for part, view in [(ours, tensor)] if gpt2 else split_parts(ours, tensor, config):
            module, _, kind = part.rpartition('.')
            if kind == 'weight' and has_bias(name, module, config):
                out.setdefault(f'{module}.bias', view.new_zeros(len(view)))
            out[part] = view.t() if gpt2 and is_transposed(part) else view
    return {hf_name(name, part): tensor.clone(memory_format=torch.contiguous_format) for part, tensor in out.items()}


def hf_name(name, part):
    if name == 'GPT2LMHeadModel':
        return part if part == 'lm_head.weight' else f'transformer.{gpt2_name(part)}'
    for ours, theirs in (NAMES | OTHER_NAMES.get(name, {})).items():
        part = part.replace(ours, theirs)
    return part


# -----------------------------------------------------------------------------
# the tokenizer, as tokenizer.json of the tokenizers library


PAD = '<|pad|>'  # fills up the shorter texts of a batch, where the tokenizer has no <|endoftext|> to do it


def byte_characters():
    """ how byte-level BPE writes the 256 bytes as printable characters (Radford et al. 2019) """
    printable = [*range(ord('!'), ord('~') + 1), *range(ord('¡'), ord('¬') + 1), *range(ord('®'), ord('ÿ') + 1)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(others)}


def merges_of(ranks):
    """ {token: rank} of a byte-pair encoding -> the pairs that it joins, in order: a token's pair is what the joins before it leave """
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [bytes([b]) for b in token]
        while len(parts) > 2:
            joined = [ranks.get(a + b, rank) for a, b in zip(parts, parts[1:], strict=False)]
            i = joined.index(min(joined))
            parts[i:i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            yield parts


def hf_tokenizer(spec, tokenizer):
    """ -> tokenizer.json as a dict whose ids are those of `tokenizer`, which spec describes; PAD, which no text gives, is one more """
    chars, special = byte_characters(), {}
    byte_level = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True, 'use_regex': False}
    pre, decoder = byte_level, byte_level
    if spec['name'] == 'byte':
        model = {'type': 'BPE', 'vocab': {chars[b]: b for b in range(256)} | {PAD: 256}, 'merges': []}
    elif spec['name'] == 'char':  # a character it does not know is an error there too
        vocab = {char: i for i, char in enumerate(tokenizer.chars)} | {PAD: tokenizer.vocab_size}
        model = {'type': 'WordLevel', 'vocab': vocab, 'unk_token': ''}
        pre, decoder = {'type': 'Split', 'pattern': {'Regex': r'[\s\S]'}, 'behavior': 'Isolated', 'invert': False}, {'type': 'Fuse'}
    else:
        def text(token):
            return ''.join(chars[b] for b in token)

        encoding, special = tokenizer.encoding, tokenizer.encoding._special_tokens
        model = {'type': 'BPE', 'vocab': {text(token): rank for token, rank in encoding._mergeable_ranks.items()},
                 'merges': [list(map(text, pair)) for pair in merges_of(encoding._mergeable_ranks)]}
        pattern = encoding._pat_str.replace('{1,3}+', '{1,3}')  # which tokenizers reads as (...{1,3})+; nothing after it could backtrack
        split = {'type': 'Split', 'pattern': {'Regex': pattern}, 'behavior': 'Isolated', 'invert': False}
        pre = {'type': 'Sequence', 'pretokenizers': [split, byte_level]}
    if model['type'] == 'BPE':
        model |= {'dropout': None, 'unk_token': None, 'continuing_subword_prefix': None, 'end_of_word_suffix': None, 'fuse_unk': False,
                  'byte_fallback': False, 'ignore_merges': False}
    added = [{'id': number, 'content': token, 'single_word': False, 'lstrip': False, 'rstrip': False, 'normalized': False, 'special': True}
             for token, number in special.items()]
    return {'version': '1.0', 'truncation': None, 'padding': None, 'added_tokens': added, 'normalizer': None, 'pre_tokenizer': pre,
            'post_processor': None, 'decoder': decoder, 'model': model}


# -----------------------------------------------------------------------------


UNFINISHED = '.unfinished'  # the folder in the folder where the files are made


def is_free(to):
    """ whether the folder `to` is there to be written: new, empty, or an earlier export (transformers names itself in what it saves) """
    if not os.path.lexists(to) or os.path.isdir(to) and set(os.listdir(to)) <= {UNFINISHED}:
        return True
    saved = read_json(os.path.join(to, 'config.json'))
    return 'nanoffn' in saved and 'transformers_version' not in saved


def write_folder(to, tensors, files):
    """
    model.safetensors and {name: value} as JSON files. All are whole before the first appears in `to`, and until the last has,
    config.json is of no model that could be loaded.
    """
    safetensors, tensor_files = need('safetensors', "exporting"), need('safetensors.torch', "exporting")
    is_new, temporary = not os.path.lexists(to), os.path.join(to, UNFINISHED)
    try:
        held = rundir.lock(temporary)
    except UserError as e:
        raise UserError(str(e).replace('--out_dir', '--to')) from None
    weights = os.path.join(temporary, 'model.safetensors')
    try:
        tensor_files.save_file(tensors, weights, metadata={'format': 'pt'})
        with open(weights, 'rb+') as file:
            os.fsync(file.fileno())
        for name, value in {**files, 'unfinished.json': {'nanoffn': "unfinished; export again"}}.items():
            write_json(os.path.join(temporary, name), value)
        shutil.copymode(os.path.join(temporary, name), weights)  # which safetensors keeps to its owner
        os.replace(os.path.join(temporary, 'unfinished.json'), os.path.join(to, 'config.json'))
        for name in ['model.safetensors', *files]:
            os.replace(os.path.join(temporary, name), os.path.join(to, name))
    except (OSError, safetensors.SafetensorError) as e:
        raise UserError(f"could not write {to}: {getattr(e, 'strerror', None) or e}; choose another --to") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        held.close()
        if is_new:
            with contextlib.suppress(OSError):
                os.rmdir(to)  # which is empty where nothing was written


def export(path, state, to):
    """ write the checkpoint `state`, which is from `path`, to the folder `to`; -> the class that loads it """
    config, spec = config_from(state['config']), state['tokenizer']
    name = choose_class(config)
    tokenizer = tokenizers.load(spec)
    vocab_size, eot = tokenizer.vocab_size, tokenizer.eot
    ids, rows = {'bos_token_id': eot, 'eos_token_id': eot, 'pad_token_id': None}, vocab_size
    if eot is None:  # one id more, which generate() never draws; "<|pad|>" in a text is text
        ids['pad_token_id'], rows = vocab_size, vocab_size + 1
        generation, special = ids | {'suppress_tokens': [vocab_size]}, {'pad_token': PAD, 'split_special_tokens': True}
    else:  # not padding in config.json too, where it keeps a token's embedding from being trained
        generation = ids | {'pad_token_id': eot}
        special = dict.fromkeys(('bos_token', 'eos_token', 'pad_token'), '<|endoftext|>')
    about = {'checkpoint': path, 'iter': state['iter'], 'ffn': config.ffn, 'tokenizer': spec, 'vocab_size': vocab_size}
    write_folder(to, hf_weights(state['model'], config, name, rows), {
        'generation_config.json': generation,
        'tokenizer.json': hf_tokenizer(spec, tokenizer),
        'tokenizer_config.json': {'tokenizer_class': 'PreTrainedTokenizerFast', 'model_max_length': config.block_size,
                                  'padding_side': 'left', 'clean_up_tokenization_spaces': False, **special},
        'config.json': hf_config(config, name, rows, ids) | {'nanoffn': about}})  # the last: with it the folder is one
    return name


def main():
    config = configure(ExportConfig, doc=__doc__)
    if not config.to:
        raise UserError("to = '': must be the folder to write, as in --to=hf/swiglu")
    to = os.path.normpath(config.to)
    if not is_free(to):
        raise UserError(f"{to} is there already and is not an earlier export; choose another --to")
    path, state = checkpoint.find(config.out_dir)
    name = export(path, state, to)
    say(f"{to}: {name}, from {path} at iter {state['iter']}\n"
          f"load it with transformers.AutoModelForCausalLM.from_pretrained({to!r})")


if __name__ == '__main__':
    run_main(main)
