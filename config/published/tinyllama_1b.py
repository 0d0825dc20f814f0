# TinyLlama 1.1B (Zhang et al. 2024, arXiv 2401.02385): 1,100,048,384 parameters
n_layer = 22
n_head = 32
n_kv_head = 4
n_embd = 2048
intermediate_size = 5632
vocab_size = 32000
block_size = 2048
ffn = 'swiglu'
norm = 'rmsnorm'
position = 'rope'
qk_norm = False
