# Gemma 2B (2024, arXiv 2403.08295): 2,506,172,416 parameters; GeGLU (tanh), heads of 256, one key/value head.
# The shape only: Gemma also scales its embeddings, and its norms multiply by 1 + gain.
n_layer = 18
n_head = 8
n_kv_head = 1
head_dim = 256
n_embd = 2048
intermediate_size = 16384
vocab_size = 256000
block_size = 8192
ffn = 'geglu_tanh'
norm = 'rmsnorm'
position = 'rope'
qk_norm = False
tie_embeddings = True
