# LLaMA 65B (Touvron et al. 2023, arXiv 2302.13971): 65,285,660,672 parameters.
# The 8/3 width is rounded up to a multiple of 256.
n_layer = 80
n_head = 64
n_embd = 8192
vocab_size = 32000
block_size = 2048
multiple_of = 256
ffn = 'swiglu'
norm = 'rmsnorm'
position = 'rope'
qk_norm = False
