# LLaMA 33B (Touvron et al. 2023, arXiv 2302.13971): 32,528,943,616 parameters.
# The 8/3 width is rounded up to a multiple of 256.
n_layer = 60
n_head = 52
n_embd = 6656
vocab_size = 32000
block_size = 2048
multiple_of = 256
ffn = 'swiglu'
norm = 'rmsnorm'
position = 'rope'
qk_norm = False
