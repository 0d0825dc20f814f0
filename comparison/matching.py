"""
What is made equal: the hidden width at which FFNs cost the same, and the steps and learning rates in which they may then differ.
"""

from dataclasses import replace

from training.accounting import components


def ffn_cost(config, width, match):
    """ of all layers' FFN at a hidden width: its parameters, or its forward FLOPs per token when match is 'flops' """
    rows = components(replace(config, intermediate_size=width))
    return sum(row['flops' if match == 'flops' else 'params'] for row in rows if row['name'].startswith('ffn.'))


def matched_width(config, match='params', multiple=0):
    """
    The hidden width at which config.ffn costs what the ungated reference costs, which is config.intermediate_size wide, or 4 *
    n_embd: the multiple nearest in cost. match: what counts, 'params' or 'flops' ('time' takes the width of params; 'width4d' that
    of the reference itself). multiple: 0 for 8 below 512 and 64 above, where GPUs gain from it.
    """
    width = config.intermediate_size or 4 * config.n_embd
    if match == 'width4d':
        return width
    target = ffn_cost(replace(config, ffn='relu'), width, match)
    # the cost is a straight line in the width, so two points give the ideal width
    at_0, at_1 = (ffn_cost(config, n, match) for n in (1, 2))
    ideal = 1 + (target - at_0) / (at_1 - at_0)
    multiple = multiple or (8 if ideal < 512 else 64)
    below = max(multiple, multiple * int(ideal // multiple))
    return min((below, below + multiple), key=lambda n: abs(ffn_cost(config, n, match) - target))


def stretch(config, max_iters):
    """ the same schedule over another number of steps """
    ratio = max_iters / config.max_iters
    return replace(config, max_iters=max_iters, warmup_iters=round(config.warmup_iters * ratio),
                   lr_decay_iters=round(config.lr_decay_iters * ratio), eval_interval=max(1, round(config.eval_interval * ratio)))


def scale_lr(config, multiple):
    return replace(config, learning_rate=config.learning_rate * multiple, min_lr=config.min_lr * multiple)
