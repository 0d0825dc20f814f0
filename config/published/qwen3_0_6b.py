# Qwen3 0.6B (2025, arXiv 2505.09388): 596,049,920 parameters; RMSNorm on queries and keys, heads wider than n_embd / n_head
n_layer = 28
n_head = 16
n_kv_head = 8
head_dim = 128
n_embd = 1024
intermediate_size = 3072
vocab_size = 151936
block_size = 32768
rope_theta = 1000000.0
tie_embeddings = True
ffn = 'swiglu'
norm = 'rmsnorm'
position = 'rope'
qk_norm = True
