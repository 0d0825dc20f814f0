"""
What each component of a model costs, in parameters and FLOPs.

    python cost.py                                     # of the default model
    python cost.py config/published/llama_7b.py        # of any model, in a second, with nothing allocated
    python cost.py config/swiglu.py --n_embd=512 --format=json

Every setting of train.py is taken, so every file in config/ works here.
"""

import json
import os
import sys
from dataclasses import dataclass, replace
from typing import Literal

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # which python -P leaves out

from configurator import configure, run_main, say
from model import GPTConfig
from train import TrainConfig
from training.accounting import components, ffn_mismatch, table, totals
from training.pretrained import implied_by_weights


@dataclass(frozen=True)
class CostConfig(TrainConfig):
    format: Literal['table', 'json'] = 'table'  # of the output
    seq_len: int = 0  # tokens that attention spans (0 = block_size)


def main():
    config = configure(CostConfig, doc=__doc__, implied=implied_by_weights)
    if config.vocab_size == 0:
        config = replace(config, vocab_size=GPTConfig.vocab_size)
    if config.format == 'json':
        rows = components(config, config.seq_len)
        ffn = {'name': config.ffn, 'width': config.hidden_width, 'mismatch': ffn_mismatch(config)[0]}
        say(json.dumps({'components': rows, 'total': totals(rows), 'ffn': ffn}, indent=2))
    else:
        say(f"{config.n_layer} layers, width {config.n_embd}, {config.n_head} heads, vocabulary {config.vocab_size:,}")
        say(table(config, config.seq_len))


if __name__ == '__main__':
    run_main(main)
