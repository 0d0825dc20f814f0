# LLaMA 13B (and Llama 2 13B) (Touvron et al. 2023, arXiv 2302.13971): 13,015,864,320 parameters.
# The 8/3 width is rounded up to a multiple of 256.
n_layer = 40
n_head = 40
n_embd = 5120
vocab_size = 32000
block_size = 2048
multiple_of = 256
ffn = 'swiglu'
norm = 'rmsnorm'
position = 'rope'
qk_norm = False
