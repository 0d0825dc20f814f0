# GPT-2 large (Radford et al. 2019): 774,030,080 parameters
n_layer = 36
n_head = 20
n_embd = 1280
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
