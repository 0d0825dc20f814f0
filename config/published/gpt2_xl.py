# GPT-2 XL (Radford et al. 2019): 1,557,611,200 parameters
n_layer = 48
n_head = 25
n_embd = 1600
vocab_size = 50257
block_size = 1024
ffn = 'gelu_tanh'
norm = 'layernorm'
position = 'learned'
qk_norm = False
bias = True
tie_embeddings = True
init = 'gpt2'
zero_init = False
