# LLaMA 7B (and Llama 2 7B) (Touvron et al. 2023, arXiv 2302.13971): 6,738,415,616 parameters.
# The 8/3 width is rounded up to a multiple of 256.
n_layer = 32
n_head = 32
n_embd = 4096
vocab_size = 32000
block_size = 2048
multiple_of = 256
ffn = 'swiglu'
norm = 'rmsnorm'
position = 'rope'
qk_norm = False
