"""
GPT-2's weights to start from, out of the Hugging Face hub or a folder, without the transformers package.

GPT2LMHeadModel is the model of this repository with layernorm, learned positions, biases, tied embeddings and an ungated FFN; names
differ, and its matrices are transposed.
"""

import os
from dataclasses import replace

import torch

from configurator import UserError, need
from files import read_json
from model import GPT
from training.checkpoint import not_finite, paths

RUNS = ('auto', 'scratch', 'resume')  # the values of init_from that name no weights
GPT2 = ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl')  # those that are on the hub, at openai-community/
GPT2_VOCAB = 50257

GIT_LFS = b'version https://git-lfs.github.com/spec/'  # how the text begins that stands for a file which git-lfs has not fetched
# what some folders have in place of model.safetensors
INSTEAD = {'model.safetensors.index.json': "says that the weights are in several files, of which only one would be read",
           'pytorch_model.bin': "is a pickle, which may run any program when it is read"}

GPT2_NAMES = {'norm_': 'ln_', 'attn.qkv_proj': 'attn.c_attn', 'attn.o_proj': 'attn.c_proj', 'ffn.up_proj': 'mlp.c_fc',
              'ffn.down_proj': 'mlp.c_proj'}
GPT2_ACTIVATIONS = {'gelu_new': 'gelu_tanh', 'gelu_pytorch_tanh': 'gelu_tanh', 'gelu': 'gelu', 'relu': 'relu', 'relu2': 'relu2',
                    'silu': 'silu'}


def gpt2_name(name):
    """ what GPT2LMHeadModel calls a parameter of ours (it adds 'transformer.' to all but the head; the files on the hub do not) """
    for ours, theirs in GPT2_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def is_transposed(name):
    """ GPT-2's matrices inside the blocks are (inputs, outputs), ours are torch's (outputs, inputs) """
    return name.endswith('_proj.weight')


def locate(source, name):
    """ the path of the file `name` of the weights `source`: in the folder, or in the hub's cache after it was downloaded """
    if source not in GPT2:
        return in_folder(source, name)
    hub = need('huggingface_hub', f"init_from = {source!r}")
    try:
        cached = hub.try_to_load_from_cache(f'openai-community/{source}', name)  # these files do not change: no need to ask the hub again
        return cached if isinstance(cached, str) else hub.hf_hub_download(f'openai-community/{source}', name)
    except Exception as e:  # whatever the network and its libraries raise
        why = "HF_HUB_OFFLINE is set and it is not in the cache" if os.environ.get('HF_HUB_OFFLINE') else type(e).__name__
        raise UserError(f"init_from = {source!r}: {name} of openai-community/{source} could not be fetched ({why}); "
                        "connect once, or use --init_from=FOLDER, a folder with its config.json and model.safetensors") from None


def in_folder(folder, name):
    """ the path of the file `name` in the folder; a UserError that says what is wrong when it cannot be what it is to be """
    path = os.path.join(folder, name)
    try:
        with open(path, 'rb') as file:
            is_pointer = file.read(len(GIT_LFS)) == GIT_LFS
    except (FileNotFoundError, NotADirectoryError):
        for other, why in INSTEAD.items():
            if name == 'model.safetensors' and os.path.exists(os.path.join(folder, other)):
                raise UserError(f"there is no {path}, and {other} {why}; transformers makes it: "
                                f"from_pretrained({folder!r}).save_pretrained(ANOTHER, max_shard_size='1TB')") from None
        if paths(folder):
            raise UserError(f"init_from = {folder!r} is a run; sample.py takes it as --out_dir, export.py makes weights of it") from None
        raise UserError(f"init_from = {folder!r}: there is no {path}; it must be {', '.join(GPT2)}, or a folder with "
                        "config.json and model.safetensors as they are on the hub") from None
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from None
    if is_pointer:
        raise UserError(f"{path} is only git-lfs's pointer to the file; fetch it with `git lfs pull` in {folder}")
    return path


def read_config(source):
    """ -> its config.json's path and content, of a GPT2LMHeadModel or a UserError """
    path = locate(source, 'config.json')
    saved = read_json(path)
    about = saved.setdefault('nanoffn', {})  # what export.py says of it
    if not isinstance(about, dict) or not isinstance(about.setdefault('tokenizer', {'name': 'gpt2'}), dict):
        raise UserError(f"{path}: nanoffn = {about!r}")
    names = saved.get('architectures') or saved.get('model_type')
    architecture = names[0] if isinstance(names, list) else names
    if architecture != 'GPT2LMHeadModel':
        raise UserError(f"{path}: only a GPT2LMHeadModel can be loaded, not {architecture}")
    return path, saved


def gpt2_tokenizer(source):
    """ what data.tokenizers.load takes: GPT-2's, unless export.py wrote the folder and says otherwise """
    return read_config(source)[1]['nanoffn']['tokenizer']


def gpt2_settings(source):
    """ {setting: value} of the weights `source`. Raises UserError when config.json asks for what a GPT here does not compute. """
    path, saved = read_config(source)
    if source not in GPT2:
        locate(source, 'model.safetensors')  # said now, before a run directory is made
    for key in ('n_layer', 'n_head', 'n_embd', 'n_positions', 'vocab_size'):
        if type(saved.get(key)) is not int or saved[key] < 1:
            raise UserError(f"{path}: {key} is missing or not a number above 0")
    for key, value in {'layer_norm_epsilon': 1e-5, 'scale_attn_weights': True, 'scale_attn_by_inverse_layer_idx': False}.items():
        if saved.get(key, value) != value:
            raise UserError(f"{path}: {key} = {saved[key]!r}: only {value!r} can be loaded")
    vocab_size = saved['nanoffn'].get('vocab_size', saved['vocab_size'])  # an export has a row more, for padding
    if type(vocab_size) is not int or not 0 < vocab_size <= saved['vocab_size']:
        raise UserError(f"{path}: nanoffn = {saved['nanoffn']!r}")
    if vocab_size < GPT2_VOCAB and gpt2_tokenizer(source).get('name') == 'gpt2':
        raise UserError(f"{path}: vocab_size = {vocab_size}: GPT-2 has {GPT2_VOCAB:,} tokens, and others cannot be loaded")
    activation, width = saved.get('activation_function', 'gelu_new'), saved.get('n_inner') or 4 * saved['n_embd']
    tied = saved.get('tie_word_embeddings', True)
    if activation not in list(GPT2_ACTIVATIONS):
        raise UserError(f"{path}: activation_function = {activation!r}: must be one of {', '.join(GPT2_ACTIVATIONS)}")
    if type(width) is not int or width < 1 or type(tied) is not bool:
        raise UserError(f"{path}: n_inner = {width!r}, tie_word_embeddings = {tied!r}: must be a number above 0 and true or false")
    return {'n_layer': saved['n_layer'], 'n_head': saved['n_head'], 'n_embd': saved['n_embd'], 'block_size': saved['n_positions'],
            'vocab_size': vocab_size, 'ffn': GPT2_ACTIVATIONS[activation],
            'intermediate_size': 0 if width == 4 * saved['n_embd'] else width, 'n_kv_head': 0, 'head_dim': 0, 'norm': 'layernorm',
            'position': 'learned', 'qk_norm': False, 'bias': True, 'tie_embeddings': tied}


def implied_by_weights(given):
    """
    The architecture that init_from implies when it names weights, so that nobody has to spell it out. block_size may be given smaller,
    vocab_size larger (as padding); any other setting that was given and contradicts the weights is a UserError.
    """
    given = dict(given)
    source = given.get('init_from', 'auto')
    if source in RUNS:
        return {}
    if source not in GPT2 and not os.path.isdir(source):
        raise UserError(f"init_from = {source!r}: must be {', '.join(RUNS + GPT2)}, or a folder with such weights")
    settings = gpt2_settings(source)
    n_embd, n_head = settings['n_embd'], settings['n_head']
    derived = {'n_kv_head': n_head, 'head_dim': n_embd // n_head, 'intermediate_size': 4 * n_embd}  # what 0 stands for
    wrong = []
    for key, value in settings.items():
        got = given.get(key, value)
        if key in ('block_size', 'vocab_size'):
            fits = got <= value if key == 'block_size' else got >= value or got == 0
        else:
            fits = got in (value, value or derived.get(key))
        if not fits:
            wrong.append(f"{key} = {got!r} (it has {value!r})")
    if wrong:
        raise UserError(f"init_from = {source!r} contradicts {', '.join(wrong)}; leave {'it' if len(wrong) == 1 else 'them'} out")
    return settings


def load_gpt2(source, config, say=print):
    """
    The state dict of GPT(config) with the weights `source`. Positions past block_size are cut off. Rows that pad the vocabulary are the
    mean of the others, which adds at most ln(padded / vocabulary) to the loss, 0.0009 for 50,304; zeros would be the likeliest tokens of
    all, as GPT-2's logits are far below 0.
    """
    safetensors, tensor_files = (need(module, f"init_from = {source!r}") for module in ('safetensors', 'safetensors.torch'))
    path, settings, rows = locate(source, 'model.safetensors'), gpt2_settings(source), read_config(source)[1]['vocab_size']
    if config.vocab_size < settings['vocab_size']:
        raise UserError(f"vocab_size = {config.vocab_size}: {source} has {settings['vocab_size']:,} token ids")
    try:
        with open(path, 'rb') as file:
            while file.read(2**24):  # it is mapped into memory next, where a disk that cannot be read ends the process
                pass
        saved = {name.removeprefix('transformer.'): tensor for name, tensor in tensor_files.load_file(path).items()}
    except (OSError, safetensors.SafetensorError) as e:
        raise UserError(f"cannot read {path}: {getattr(e, 'strerror', None) or e}") from None
    with torch.device('meta'):
        shapes = {name: parameter.shape for name, parameter in
                  GPT(replace(config, block_size=settings['block_size'], vocab_size=rows)).state_dict().items()}
    out, used = {}, set()
    for name, shape in shapes.items():
        theirs = 'wte.weight' if name == 'lm_head.weight' and config.tie_embeddings else gpt2_name(name)
        if theirs not in saved:
            raise UserError(f"{path}: {theirs} is missing")
        tensor = saved[theirs]
        if tensor.shape != (shape[::-1] if is_transposed(name) else shape):
            raise UserError(f"{path}: {theirs} is of shape {tuple(tensor.shape)}, which does not fit config.json")
        if not tensor.is_floating_point():
            raise UserError(f"{path}: {theirs} is of {tensor.dtype}; only weights that are not quantized can be loaded")
        tensor = tensor.float()
        if not_finite([(theirs, tensor)]):
            raise UserError(f"{path}: {theirs} is not finite, so the file is damaged or its run had diverged")
        if is_transposed(name):
            tensor = tensor.t()
        elif name == 'wpe.weight' and config.block_size < len(tensor):
            say(f"{source}: block_size {config.block_size:,} keeps the first of its {len(tensor):,} positions")
            tensor = tensor[:config.block_size]
        elif name in ('wte.weight', 'lm_head.weight'):
            tensor = tensor[:settings['vocab_size']]
            tensor = torch.cat((tensor, tensor.mean(0, keepdim=True).expand(config.vocab_size - len(tensor), -1)))
        out[name] = tensor
        used.add(theirs)
    # the causal mask and a second copy of a tied head are in some files
    left = [name for name in saved.keys() - used if not name.endswith(('.attn.bias', '.attn.masked_bias')) and name != 'lm_head.weight']
    if left:
        raise UserError(f"{path}: {min(left)} is not part of the model in config.json")
    return out
