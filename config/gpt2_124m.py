# nanoGPT's GPT-2 (124M) recipe: 0.49M tokens per step, as one GPU's memory allows, on any number of GPUs.
#   torchrun --standalone --nproc_per_node=8 train.py config/gpt2_124m.py config/swiglu.py
# nanoGPT reaches validation loss 2.85 on OpenWebText with this recipe (600,000 steps, 8 x A100, 4 days).
# The data is made by data/openwebtext/prepare.py; with the embedded data: --dataset=stdlib
dataset = 'openwebtext'
n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
vocab_size = 50304  # 50,257 rounded up to a multiple of 64
norm = 'layernorm'
position = 'learned'
qk_norm = False
tie_embeddings = True
init = 'gpt2'
zero_init = False
ffn = 'gelu'

batch_size = 480  # nanoGPT: 12 sequences x 40 accumulation steps
optimizer = 'adamw'
learning_rate = 6e-4
min_lr = 6e-5
schedule = 'cosine'
warmup_iters = 2000
max_iters = 600000
weight_decay = 1e-1
beta2 = 0.95
grad_clip = 1.0

eval_interval = 1000
eval_tokens = 2**20
log_interval = 10
