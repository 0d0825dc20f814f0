# Qwen2.5 0.5B (2024, arXiv 2412.15115): 494,032,768 parameters; biases on queries, keys and values only
n_layer = 24
n_head = 14
n_kv_head = 2
n_embd = 896
intermediate_size = 4864
vocab_size = 151936
block_size = 32768
rope_theta = 1000000.0
qkv_bias = True
tie_embeddings = True
ffn = 'swiglu'
norm = 'rmsnorm'
position = 'rope'
qk_norm = False
