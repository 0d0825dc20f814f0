"""
Text from a trained model.

    python sample.py                                       # continues a newline, with the newest run in out/
    python sample.py --out_dir=out/swiglu --start="def main(" --temperature=0.5
    python sample.py --start=FILE:prompt.txt               # the prompt from a file; --start=- reads standard input
    python sample.py --init_from=gpt2 --start="The answer is"
"""

import codecs
import glob
import os
import sys
from dataclasses import dataclass
from typing import Literal

import torch

import checkpoint
from configurator import UserError, configure, die, require
from data import tokenizers
from machine import autocast, choose_device, pack_for_sampling
from model import GPT, GPTConfig, config_from, generate
from weights import gpt2_settings, gpt2_tokenizer, load_gpt2


@dataclass(frozen=True)
class SampleConfig:
    out_dir: str = ''  # run directory ('' = the newest in out/)
    init_from: str = ''  # instead of a run: gpt2, gpt2-medium, gpt2-large, gpt2-xl, or a folder with such weights
    start: str = '\n'  # prompt: text, FILE:path, or - for standard input
    num_samples: int = 1  # how many texts
    max_new_tokens: int = 500  # length of each, in tokens
    temperature: float = 0.8  # below 1 is more predictable; 0 takes the likeliest token always
    top_k: int = 200  # sample from the k likeliest tokens (0 = all)
    top_p: float = 1.0  # sample from the likeliest tokens that have this much probability together (1 = all)
    seed: int = 1337  # of the sampling
    device: str = 'auto'  # cpu, cuda, cuda:N, mps
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # of matrix products

    def __post_init__(self):
        for key in ('num_samples', 'max_new_tokens'):
            require(self, getattr(self, key) >= 1, key, "at least 1")
        for key in ('temperature', 'top_k', 'seed'):
            require(self, getattr(self, key) >= 0, key, "at least 0")
        require(self, 0 < self.top_p <= 1, 'top_p', "above 0 and at most 1")
        require(self, not (self.out_dir and self.init_from), 'init_from', "left out when out_dir names a run")


def find_checkpoint(out_dir):
    """ the best checkpoint of a run, else its newest whole one, from out_dir or the newest run below out/ """
    if not out_dir:
        found = glob.glob('out/**/ckpt_*.pt', recursive=True)
        if not found:
            raise UserError("no run in out/ yet; train one (python train.py config/swiglu.py) or name it with --out_dir")
        out_dir = os.path.dirname(max(found, key=os.path.getmtime))
    best = os.path.join(out_dir, 'best.pt')
    if os.path.exists(best):
        try:
            return best, checkpoint.load(best)
        except UserError as e:
            print(f"skipping a checkpoint: {e}", file=sys.stderr)
    path, state = checkpoint.load_latest(out_dir, say=lambda text: print(text, file=sys.stderr))
    if not state:
        raise UserError(f"no usable checkpoint in {out_dir}; --out_dir names a run directory")
    return path, state


def read_prompt(start):
    if start == '-':
        return sys.stdin.read()
    if start.startswith('FILE:'):
        try:
            with open(start[5:], encoding='utf-8') as file:
                return file.read()
        except (OSError, ValueError) as e:
            raise UserError(f"cannot read the prompt {start[5:]}: {e}") from None
    return start


def main():
    config = configure(SampleConfig, doc=__doc__)
    device, dtype = choose_device(config.device, config.dtype)
    if config.init_from:
        path, model_config = config.init_from, GPTConfig(**gpt2_settings(config.init_from))
        state = {'model': load_gpt2(path, model_config), 'tokenizer': gpt2_tokenizer(path)}
    else:
        path, state = find_checkpoint(config.out_dir)
        model_config = config_from(state['config'])
    tokenizer = tokenizers.load(state['tokenizer'])
    prompt = tokenizer.encode(read_prompt(config.start))
    if not prompt:
        raise UserError("the prompt is empty; give at least one character, such as --start=$'\\n'")
    model = GPT(model_config)
    model.load_state_dict(state['model'])
    dtype = pack_for_sampling(model.to(device), device, dtype)

    block_size = model_config.block_size
    iteration = f", iter {state['iter']}" if 'iter' in state else ""
    val = f", val loss {state['val']['val/loss']:.4f}" if state.get('val') else ""
    print(f"{path}: {model_config.ffn}{iteration}{val}", file=sys.stderr)
    if len(prompt) > block_size:
        print(f"the prompt has {len(prompt)} tokens; the model sees the last {block_size}", file=sys.stderr)
    elif len(prompt) + config.max_new_tokens > block_size + 1:
        print(f"past {block_size} tokens the model sees the last {block_size}, and each token takes longer", file=sys.stderr)
    generator = torch.Generator(device).manual_seed(config.seed)
    for n in range(config.num_samples):
        if config.num_samples > 1:
            print(f"--- sample {n + 1}")
        show = codecs.getincrementaldecoder('utf-8')(errors='replace')  # a character may take several tokens
        print(show.decode(tokenizer.decode(prompt)), end='', flush=True)
        with autocast(device, dtype):
            for token in generate(model, torch.tensor([prompt], device=device), config.max_new_tokens, config.temperature, config.top_k,
                                  config.top_p, tokenizer.vocab_size, generator):
                print(show.decode(tokenizer.decode(token[0].tolist())), end='', flush=True)
        print(show.decode(b'', final=True))


if __name__ == '__main__':
    try:
        main()
    except UserError as e:
        die(e)
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(1)
