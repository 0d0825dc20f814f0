# GPT-2 124M (Radford et al. 2019): 124,439,808 parameters
n_layer = 12
n_head = 12
n_embd = 768
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
