# Llama 2 70B (Touvron et al. 2023, arXiv 2307.09288): 68,976,648,192 parameters; FFN at 3.5x
n_layer = 80
n_head = 64
n_kv_head = 8
n_embd = 8192
intermediate_size = 28672
vocab_size = 32000
block_size = 4096
ffn = 'swiglu'
norm = 'rmsnorm'
position = 'rope'
qk_norm = False
