# Llama 3 8B (2024): 8,030,261,248 parameters; FFN at 3.5x
n_layer = 32
n_head = 32
n_kv_head = 8
n_embd = 4096
intermediate_size = 14336
vocab_size = 128256
block_size = 8192
rope_theta = 500000.0
ffn = 'swiglu'
norm = 'rmsnorm'
position = 'rope'
qk_norm = False
