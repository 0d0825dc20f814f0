# GPT-2 medium (Radford et al. 2019): 354,823,168 parameters
n_layer = 24
n_head = 16
n_embd = 1024
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
