# GPT-3 175B (Brown et al. 2020, table 2.1): 174,604,259,328 parameters.
# Its alternating dense and sparse attention counts as dense.
n_layer = 96
n_head = 96
n_embd = 12288
vocab_size = 50257
block_size = 2048
ffn = 'gelu_tanh'
norm = 'layernorm'
position = 'learned'
qk_norm = False
bias = True
tie_embeddings = True
init = 'gpt2'
zero_init = False
