# GPT-2 (124M) on Tiny Shakespeare in its own tokens, as nanoGPT fine-tunes gpt2-xl: few steps at a small constant learning rate.
#   python train.py config/finetune_shakespeare.py
# The weights, 0.5 GB, come from the Hugging Face hub; --init_from=FOLDER takes them from a copy. Larger: --init_from=gpt2-xl
# On a CPU, a shorter context and fewer sequences: --block_size=256 --batch_size=4
dataset = 'shakespeare'
init_from = 'gpt2'
out_dir = 'out/finetune_shakespeare'

batch_size = 32  # nanoGPT: 1 sequence x 32 accumulation steps, 32,768 tokens a step
max_iters = 20
optimizer = 'adamw'
learning_rate = 3e-5
schedule = 'constant'
warmup_iters = 0
weight_decay = 1e-1

eval_interval = 5
eval_tokens = 0  # the whole split
log_interval = 1
