# Mistral 7B (Jiang et al. 2023, arXiv 2310.06825): 7,241,732,096 parameters.
# Its sliding-window attention counts as full.
n_layer = 32
n_head = 32
n_kv_head = 8
n_embd = 4096
intermediate_size = 14336
vocab_size = 32000
block_size = 8192
ffn = 'swiglu'
norm = 'rmsnorm'
position = 'rope'
qk_norm = False
